"""Averaged weights in a checkpoint: a hook stores them beside the trained weights.

Validation may have scored either. A hook that averages weights adds the entry `scored_weights` to every
checkpoint: {"hook": name, "state": key} if evaluations use the weights under this key of its state,
{"hook": None} if they use the module's own weights.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookline.checkpoint.sharded import ShardedTensor
from hookline.util.errors import CheckpointError, OptionError, closest
from hookline.util.terminal import log_notice

log = logging.getLogger("hookline")
SCORED_WEIGHTS = "scored_weights"
CHOICES = ("scored", "raw", "averaged")
"""Allowed values of `weights=`: the weights that validation scored, the trained weights, or their average."""


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Weights and their source."""

    where: str
    """The name of the source in messages."""
    weights: Mapping[str, Any]
    step: int | None = None
    """The step of the checkpoint, if the source is one."""
    hook: str | None = None
    """The hook that averaged them; None: they are the trained weights."""

    @property
    def kind(self) -> str:
        """Return 'averaged' or 'raw'."""
        return "raw" if self.hook is None else "averaged"


def check_weights(wanted: Any) -> None:
    """Raise an OptionError if `wanted` is not one of `CHOICES`."""
    if wanted not in CHOICES:
        raise OptionError(
            f"weights={wanted!r}, allowed: {', '.join(map(repr, CHOICES))}.{closest(str(wanted), CHOICES)}"
        )


def choose_weights(
    contents: Mapping[str, Any], wanted: str, where: str, step: int | None = None
) -> FoundWeights:
    """Return the requested weights of a checkpoint. Log the choice if there are several.

    wanted: one of `CHOICES`. where, step: the checkpoint's name, for messages, and its step.
    """
    check_weights(wanted)
    scored, averaging = _scored_entry(contents), averaging_hooks(contents)
    if wanted == "raw":
        return FoundWeights(where, weights_in(contents, where), step)
    if wanted == "averaged":
        if not averaging:
            raise OptionError(
                f"{where} does not contain averaged weights: no hook has averaged any. An average that has "
                "not started yet is empty."
            )
        if len(averaging) > 1:
            raise OptionError(
                f"{where} contains the averaged weights of several hooks: {', '.join(averaging)}. Choose one "
                "with hook=... of `hookline checkpoint export`."
            )
        hook = averaging[0]
        return FoundWeights(where, weights_of_hook(contents, hook, where), step, hook)
    if not averaging or (scored is not None and scored.get("hook") not in averaging):
        return FoundWeights(where, weights_in(contents, where), step)
    if scored is None and len(averaging) > 1:
        log.warning(
            "%s does not say which weights were scored, and several hooks store averaged weights: %s. Taking "
            "the trained weights.",
            where,
            ", ".join(averaging),
        )
        return FoundWeights(where, weights_in(contents, where), step)
    hook = averaging[0] if scored is None else scored["hook"]
    if scored is None:
        log.warning(
            "%s does not say which weights were scored. Taking the averaged weights of hook %r, because "
            "evaluations use them by default; weights='raw' takes the trained weights.",
            where,
            hook,
        )
    else:
        log_notice(
            log,
            "%s: taking the averaged weights of hook %r, which evaluations have scored; weights='raw' "
            "takes the trained weights.",
            where,
            hook,
        )
    return FoundWeights(where, weights_of_hook(contents, hook, where), step, hook)


def weights_in(contents: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the module's weights in the contents of a checkpoint."""
    weights = contents.get("module")
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{where} does not contain a table of named weights.")
    return weights


def averaging_hooks(contents: Mapping[str, Any]) -> list[str]:
    """Return the names of the hooks that store an average. contents: a checkpoint's, or its state.json's."""
    states = contents.get("hooks")
    states = states if isinstance(states, Mapping) else {}
    return [
        name
        for name, state in states.items()
        if isinstance(state, Mapping) and isinstance(state.get("averages"), Mapping) and state["averages"]
    ]


def scored_hook(contents: Mapping[str, Any]) -> str | None:
    """Return the hook whose average was scored, or None for the trained weights or an unknown hook."""
    hook = (_scored_entry(contents) or {}).get("hook")
    return hook if hook in averaging_hooks(contents) else None


def _scored_entry(contents: Mapping[str, Any]) -> Mapping[str, Any] | None:
    entry = contents.get(SCORED_WEIGHTS)
    return entry if isinstance(entry, Mapping) else None


def weights_of_hook(contents: Mapping[str, Any], hook: str, where: str) -> dict[str, Any]:
    """Return the module's weights, replaced by the weights in a hook's state where it has them.

    The hook stores tied weights under one name only.
    """
    states: Mapping[str, Any] = contents["hooks"] if isinstance(contents.get("hooks"), Mapping) else {}
    if hook not in states:
        raise OptionError(
            f"{where} does not contain the state of a hook {hook!r}.{closest(hook, states)} "
            f"It has: {', '.join(states) or 'none'}."
        )
    weights: Any = OrderedDict(weights_in(contents, where))
    weights._metadata = getattr(contents["module"], "_metadata", OrderedDict())  # the versions of the layers
    averages = next(
        (
            each
            for each in _mappings(states[hook])
            if any(_matches(value, weights.get(name)) for name, value in each.items())
        ),
        None,
    )
    if averages is None:
        raise OptionError(
            f"{hook} in {where} does not store weights: nothing in its state has the name and shape of one "
            "of the module's weights. An average that has not started yet is empty."
        )
    matching = {name: value for name, value in averages.items() if _matches(value, weights.get(name))}
    by_storage = {storage_of(weights[name]) or name: value for name, value in matching.items()}
    converted: dict[int, Any] = {}
    for name, value in weights.items():
        average = matching.get(name, by_storage.get(storage_of(value) or name))
        if average is not None:
            # once for each average, so that tied weights stay tied
            weights[name] = converted.setdefault(id(average), _in_dtype(average, value.dtype))
    return weights  # type: ignore[no-any-return]


def storage_of(value: Any) -> Any:
    """Return what tied weights have in common: their memory, or the place of a tensor that is not read yet.

    None: the value has no elements, or is not a tensor.
    """
    if isinstance(value, ShardedTensor):
        first = next(value.locations(), None)
        return None if first is None else (first.file.path, first.name, value.shape, value.dtype)
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value) or not value.numel():
        return None
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in a dtype; one that is not read yet is converted when it is read."""
    return replace(value, dtype=dtype) if isinstance(value, ShardedTensor) else value.to(dtype)


def _mappings(state: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(state, Mapping):
        yield from (each for each in (state, *state.values()) if isinstance(each, Mapping))


def _matches(value: Any, weight: Any) -> bool:
    both = isinstance(value, Tensor | ShardedTensor) and isinstance(weight, Tensor | ShardedTensor)
    return both and weight.shape.numel() > 0 and value.shape == weight.shape
