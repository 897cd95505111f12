"""Averaged weights in a checkpoint: a hook keeps them beside the trained ones, and validation may have scored
either.

A hook that averages leaves a note in every checkpoint, `scored_weights`: {"hook": name, "state": key} if
evaluations use the weights under this key of its state, {"hook": None} if they use the module's own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookline.checkpoint.sharded import ShardedTensor
from hookline.util.errors import CheckpointError, OptionError, closest

log = logging.getLogger("hookline")
NOTE = "scored_weights"
WEIGHTS = ("scored", "raw", "averaged")
"""What can be asked for: the weights that validation scored, those that the optimizers train, or the average
of them.
"""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The weights that were taken from a checkpoint."""

    weights: Mapping[str, Any]
    hook: str | None = None
    """The hook whose average they are; None: they are the trained ones."""

    @property
    def kind(self) -> str:
        """'averaged' or 'raw'."""
        return "raw" if self.hook is None else "averaged"


def check_weights(wanted: Any) -> None:
    """Refuse a word that names no weights."""
    if wanted not in WEIGHTS:
        raise OptionError(
            f"weights={wanted!r}, allowed: {', '.join(map(repr, WEIGHTS))}.{closest(str(wanted), WEIGHTS)}"
        )


def choose_weights(contents: Mapping[str, Any], wanted: str, where: str) -> Chosen:
    """Return the weights that were asked for, of a checkpoint's contents. Log which, where there are several.

    wanted: one of `WEIGHTS`. where: the checkpoint's name, for messages.
    """
    check_weights(wanted)
    note, averaging = _note(contents), averaging_hooks(contents)
    if wanted == "raw":
        return Chosen(weights_in(contents, where))
    if wanted == "averaged":
        if not averaging:
            raise OptionError(
                f"{where} holds no averaged weights: no hook has averaged any. An average that has not "
                "begun is empty."
            )
        hook = _only(averaging, where)
        return Chosen(weights_of_hook(contents, hook, where), hook)
    if not averaging or (note is not None and note.get("hook") not in averaging):
        return Chosen(weights_in(contents, where))
    if note is None and len(averaging) > 1:
        log.warning(
            "%s does not say which weights were scored, and several hooks keep averaged ones: %s. Taking "
            "the trained weights.",
            where,
            ", ".join(averaging),
        )
        return Chosen(weights_in(contents, where))
    hook = averaging[0] if note is None else note["hook"]
    if note is None:
        log.warning(
            "%s does not say which weights were scored. Taking the averaged weights of hook %r, because "
            "evaluations use them by default; weights='raw' takes the trained ones.",
            where,
            hook,
        )
    else:
        log.warning(
            "%s: taking the averaged weights of hook %r, which evaluations have scored; weights='raw' "
            "takes the trained ones.",
            where,
            hook,
        )
    return Chosen(weights_of_hook(contents, hook, where), hook)


def weights_in(contents: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the module's weights in the contents of a checkpoint."""
    weights = contents.get("module")
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{where} holds no weights by name.")
    return weights


def averaging_hooks(contents: Mapping[str, Any]) -> list[str]:
    """Return the names of the hooks that keep an average, of contents or of what state.json
    says about them.
    """
    states = contents.get("hooks")
    states = states if isinstance(states, Mapping) else {}
    return [
        name
        for name, state in states.items()
        if isinstance(state, Mapping) and isinstance(state.get("averages"), Mapping) and state["averages"]
    ]


def scored_hook(contents: Mapping[str, Any]) -> str | None:
    """Return the hook whose average evaluations have scored, as far as the checkpoint says it; None: the
    trained weights.
    """
    hook = (_note(contents) or {}).get("hook")
    return hook if hook in averaging_hooks(contents) else None


def _note(contents: Mapping[str, Any]) -> Mapping[str, Any] | None:
    note = contents.get(NOTE)
    return note if isinstance(note, Mapping) else None


def weights_of_hook(contents: Mapping[str, Any], hook: str, where: str) -> dict[str, Any]:
    """Return the module's weights, with those in their place that a hook keeps; of tied ones it has one name
    only.
    """
    states: Mapping[str, Any] = contents["hooks"] if isinstance(contents.get("hooks"), Mapping) else {}
    if hook not in states:
        raise OptionError(
            f"{where} holds no state of a hook {hook!r}.{closest(hook, states)} "
            f"It has: {', '.join(states) or 'none'}."
        )
    weights: Any = OrderedDict(weights_in(contents, where))
    weights._metadata = getattr(contents["module"], "_metadata", OrderedDict())  # the versions of the layers
    kept = next(
        (
            each
            for each in _mappings(states[hook])
            if any(_stands_for(value, weights.get(name)) for name, value in each.items())
        ),
        None,
    )
    if kept is None:
        raise OptionError(
            f"{hook} in {where} keeps no weights: nothing in its state is called and shaped like one of the "
            "module's. An average that has not begun is empty."
        )
    fitting = {name: value for name, value in kept.items() if _stands_for(value, weights.get(name))}
    by_memory = {
        weights[name].data_ptr(): value
        for name, value in fitting.items()
        if isinstance(weights[name], Tensor)
    }
    for name, value in weights.items():
        tied = by_memory.get(value.data_ptr()) if isinstance(value, Tensor) and value.numel() else None
        kept_one = fitting.get(name, tied)
        if isinstance(kept_one, Tensor):
            weights[name] = kept_one.to(value.dtype)
        elif kept_one is not None:
            weights[name] = kept_one  # pieces, which are read and converted later
    return weights  # type: ignore[no-any-return]


def _mappings(state: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(state, Mapping):
        yield from (each for each in (state, *state.values()) if isinstance(each, Mapping))


def _stands_for(value: Any, weight: Any) -> bool:
    both = isinstance(value, Tensor | ShardedTensor) and isinstance(weight, Tensor | ShardedTensor)
    return both and weight.shape.numel() > 0 and value.shape == weight.shape


def _only(hooks: list[str], where: str) -> str:
    if len(hooks) > 1:
        raise OptionError(
            f"{where} holds the averaged weights of several hooks: {', '.join(hooks)}. Choose one with "
            "hook=... of `hookline checkpoint export`."
        )
    return hooks[0]
