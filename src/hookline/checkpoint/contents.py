"""Check the types in a checkpoint before a run is changed; a checksum does not prove types.

`check_contents` checks the parts that every run has. `check_like` compares the saved state of a hook, an
optimizer or a schedule with its current state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from hookline.checkpoint.sharded import ShardedTensor, is_dtensor
from hookline.metrics.accumulator import REDUCTIONS
from hookline.run.options import ACCUMULATE_BY
from hookline.run.state_parts import Counts
from hookline.util.errors import CheckpointError, described
from hookline.util.urls import shown

AMOUNTS = ("samples_seen", "tokens_seen")
MT_WORDS = 624
"""Words of the Mersenne Twister. NumPy accepts a larger position and then reads beyond the array."""
Check = Callable[[Any], bool]


def check_contents(contents: Mapping[str, Any], path: object) -> None:
    """Raise a CheckpointError if a run cannot restore the contents. Those of a `Line` have other parts."""
    if "position" in contents:
        check_parts(contents, RUN, path)


def check_parts(contents: Mapping[str, Any], names: Iterable[str], path: object) -> None:
    """Raise a CheckpointError if a part is missing or has the wrong type. path: named in the error."""
    for name in names:
        is_valid, wanted = RUN[name]
        if name not in contents:
            raise CheckpointError(
                f"The checkpoint {shown(path)} cannot be read: its state.json has no {name!r}."
            )
        if not _passes(is_valid, contents[name]):
            raise CheckpointError(
                f"The checkpoint {shown(path)} cannot be read: {name} in its state.json is not {wanted}: "
                f"{described(contents[name])}"
            )


def _passes(is_valid: Check, value: Any) -> bool:
    try:
        return bool(is_valid(value))
    except Exception:  # such as the comparison of a tensor with a number
        return False


def check_like(saved: Any, now: Any, where: str, loose: bool = False) -> None:
    """Raise a CheckpointError if saved values have other types than the current state of the same object.

    None stands for a number that is not known yet, or with `loose` for any value. Containers that are empty
    now, and entries that only one of the states has, are not checked.
    """
    if now is None or saved is None:
        other = now if saved is None else saved
        matches = loose or other is None or _is_numeric(other)
    elif isinstance(now, Mapping):
        matches = isinstance(saved, Mapping)
        for key in now if matches else ():
            if key in saved:
                check_like(saved[key], now[key], f"{where}.{key}", loose)
    elif isinstance(now, list | tuple | set):
        matches = isinstance(saved, list | tuple | set)
        if matches and not isinstance(now, set) and not isinstance(saved, set) and len(saved) == len(now):
            for index, (saved_item, item) in enumerate(zip(saved, now, strict=True)):
                check_like(saved_item, item, f"{where}[{index}]", loose)
    elif isinstance(now, bool | str):
        matches = isinstance(saved, type(now))
    elif _is_numeric(now):
        matches = _is_numeric(saved)
    else:
        matches = True  # an unknown class
    if not matches:
        raise CheckpointError(f"{where} is {described(saved)}, where this run has {described(now)}.")


def _is_numeric(value: Any) -> bool:
    return is_number(value) or isinstance(value, Tensor | ShardedTensor | np.ndarray)


# ---- types of values ---------------------------------------------------------------------------------------


def is_whole(value: Any, least: int = 0) -> bool:
    """Return whether it is an integer from `least` on that 64 bits can hold, so that it cannot overflow."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) < 2**63


def is_number(value: Any) -> bool:
    """Return whether it is a number, finite or not, but not a bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    """Return whether it is a number of samples or tokens, which a user's function may return as a float."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return is_number(value) and (
        is_whole(value) or (isinstance(value, float) and math.isfinite(value) and value >= 0)
    )


def _is_value(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _all(value: Any, kinds: tuple[type, ...], is_valid: Check) -> bool:
    """Return whether it is one of these containers and every item passes."""
    return isinstance(value, kinds) and all(is_valid(each) for each in cast(Any, value))


def _values(value: Any, is_valid: Check) -> bool:
    """Return whether it is a dict with string keys in which every value passes."""
    return isinstance(value, dict) and all(map(_is_text, value)) and all(map(is_valid, value.values()))


def _has(value: Any, entries: Mapping[str, Check], optional: Iterable[str] = ()) -> bool:
    """Return whether it is a dict with these entries, and each passes its check."""
    if not isinstance(value, dict):
        return False
    return all(
        is_valid(value[name]) if name in value else name in optional for name, is_valid in entries.items()
    )


# ---- parts of a run ----------------------------------------------------------------------------------------


def _is_accumulator(value: Any) -> bool:
    return _has(
        value,
        {
            "reduce": lambda kind: kind in REDUCTIONS,
            "total": lambda total: total is None or _is_value(total),
            "count": _is_value,
        },
    )


def _is_log(value: Any) -> bool:
    def is_key(key: Any) -> bool:
        return (
            _all(key, (list, tuple), lambda _: True)
            and len(key) == 3
            and _is_flag(key[0])
            and _is_flag(key[1])
            and (key[2] is None or _is_accumulator(key[2]))
        )

    def are_means(means: Any) -> bool:
        return _values(means, _is_accumulator)

    return _has(
        value,
        {
            "train_loss": _is_accumulator,
            "means": are_means,
            "by_loader": are_means,
            "keys": lambda keys: _values(keys, is_key),
            "pending": lambda each: _values(each, _is_value),
            "reductions": lambda each: _values(each, _is_text),
        },
        optional=["reductions"],
    )


def _is_window(value: Any) -> bool:
    def is_held(each: Any) -> bool:
        is_triple = isinstance(each, list | tuple) and len(each) == 3
        return is_triple and _is_value(each[0]) and _is_value(each[1]) and _is_text(each[2])

    def are_losses(each: Any) -> bool:
        return _all(each, (list,), _is_value)

    weighting: dict[str, Check] = {
        "by": lambda by: by in ACCUMULATE_BY,
        "unit": _is_amount,
        "correction": _is_amount,
    }
    is_between = (
        isinstance(value, dict)
        and value.keys() <= weighting.keys()
        and _has(value, weighting, optional=weighting)
    )
    return is_between or _has(
        value,
        {
            "batches": is_whole,
            "count": _is_amount,
            "size": lambda size: is_whole(size, 1),
            "had_none": _is_flag,
            "losses": are_losses,
            "factors": are_losses,
            "held": lambda held: _all(held, (list,), is_held),
            "fed": lambda fed: (
                isinstance(fed, dict) and all(map(is_whole, fed)) and all(map(_is_amount, fed.values()))
            ),
            "gradients": lambda grads: _values(grads, lambda each: isinstance(each, Tensor | ShardedTensor)),
            **weighting,
        },
        optional=["factors", *weighting],
    )


def _is_position(value: Any) -> bool:
    def is_pair(pair: Any) -> bool:
        return _all(pair, (list, tuple), lambda each: is_whole(each, -1)) and len(pair) == 2

    return _has(
        value,
        {
            "batches": is_whole,
            "validated_at": is_pair,
            "epoch_advanced": _is_flag,
            "owes_validation": _is_flag,
            "plateau_due": _is_flag,
        },
        optional=["plateau_due"],
    )


def _are_filters(value: Any) -> bool:
    counts = {
        "of": _is_text,
        "passed": lambda each: each is None or is_whole(each),
        "done": _is_flag,
        "calls": is_whole,
    }

    def is_listener(states: Any) -> bool:
        return _all(states, (list,), lambda state: _has(state, counts, optional=["passed", "done", "calls"]))

    return _values(value, lambda listeners: _all(listeners, (list,), is_listener))


def _is_rng(value: Any) -> bool:
    if value is None:  # of a rank that the saved run did not have
        return True

    def is_numpy(state: Any) -> bool:
        return (
            isinstance(state, tuple)
            and len(state) == 5
            and state[0] == "MT19937"
            and isinstance(state[1], np.ndarray)
            and state[1].shape == (MT_WORDS,)
            and is_whole(state[2])
            and state[2] <= MT_WORDS
            and state[3] in (0, 1)
            and is_number(state[4])
        )

    def is_python(state: Any) -> bool:
        return (
            isinstance(state, tuple)
            and len(state) == 3
            and state[0] == 3
            and (state[2] is None or is_number(state[2]))
            and _all(state[1], (tuple,), lambda word: is_whole(word) and word < 2**32)
            and len(state[1]) == MT_WORDS + 1
            and state[1][-1] <= MT_WORDS
        )

    return _has(
        value, {"python": is_python, "numpy": is_numpy, "torch": lambda state: isinstance(state, Tensor)}
    )


READERS = {"indices": ("generators", "current", "opened", "by_index"), "stream": ("generators",)}
"""Entries of a loader's state beside the common ones, by the kind of reader."""
FACTS = ("length", "batch_size", "workers", "units", "world_size", "apart")


def _is_loader(value: Any) -> bool:
    """Check the entries that Hookline writes, not the state of the user's loader or dataset."""
    if value is None:
        return True
    if not isinstance(value, dict) or not _is_text(value.get("kind")):
        return False
    if value["kind"] == "mixture":
        return _is_mixture(value)

    def is_count(each: Any) -> bool:
        return each is None or is_whole(each)

    def are_facts(each: Any) -> bool:
        return _values(each, is_count) and ("of_samples" not in value or set(FACTS) <= set(each))

    own: dict[str, Check] = {
        "generators": _is_table,
        "current": _is_table,
        "opened": _is_flag,
        "by_index": _is_flag,
    }
    optional = [
        "of_samples",
        "passed_over",
        *(name for name in own if name not in READERS.get(value["kind"], ())),
    ]
    return _has(
        value,
        {
            "seed": lambda seed: seed is None or is_whole(seed, -(2**63)),
            "in_pass": _is_flag,
            "of_samples": _is_flag,
            "passed_over": is_count,
            "facts": are_facts,
            **own,
        },
        optional,
    )


def _is_mixture(value: dict[str, Any]) -> bool:
    def are_counts(each: Any) -> bool:
        return _values(each, _is_amount)

    def are_loaders(each: Any) -> bool:
        return _values(each, _is_loader)

    return _has(
        value,
        {
            "cursor": _is_table,
            "loaders": are_loaders,
            "left": are_loaders,
            "samples": are_counts,
            "tokens": are_counts,
            "batches": are_counts,
            "seed": lambda seed: seed is None or is_whole(seed, -(2**63)),
            "began_with": lambda _: True,
        },
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _are_optimizers(value: Any) -> bool:
    def is_group(group: Any) -> bool:
        return _has(group, {"params": lambda names: isinstance(names, list)})

    def is_optimizer(state: Any) -> bool:
        return _has(
            state,
            {
                "state": lambda each: isinstance(each, dict) and all(map(_is_table, each.values())),
                "param_groups": lambda groups: _all(groups, (list,), is_group),
            },
        )

    return _all(value, (list,), is_optimizer)


RUN: dict[str, tuple[Check, str]] = {
    "run": (_is_text, "text"),
    "module": (_is_table, "a table of weights"),
    "datamodule": (lambda value: True, ""),
    "hooks": (lambda value: _values(value, lambda _: True), "a table of hooks"),
    "kinds": (lambda value: value is None or _all(value, (list,), _is_text), "a list of names, or None"),
    "optimizers": (_are_optimizers, "a list of the states of optimizers"),
    "schedulers": (lambda value: isinstance(value, list), "a list of the states of schedules"),
    "precision": (_is_table, "a table"),
    "counters": (
        lambda value: _has(
            value, {name: _is_amount if name in AMOUNTS else is_whole for name in Counts.SAVED}
        ),
        "a table of counts from 0 on",
    ),
    "position": (_is_position, "a position in the data"),
    "window": (_is_window, "an accumulation window"),
    "log": (_is_log, "what an epoch has logged"),
    "filters": (_are_filters, "what filters have counted"),
    "metrics": (lambda value: _values(value, _is_value), "a table of numbers"),
    "loggers": (_is_table, "a table of loggers"),
    "rng": (_is_rng, "the state of random streams"),
    "loader": (_is_loader, "the position of a loader"),
}
"""Every part that a resume needs, with its check and its type in words."""


# ---- gradients of an open accumulation window --------------------------------------------------------------


def window_gradients(module: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by parameter name. Plain ones are local until the window closes."""
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    for name, each in _fsdp_parameters(module, wrapped):
        # FSDP stores unsharded gradients beside the parameters until they are reduced over the ranks
        gradient = each.unsharded_accumulated_grad
        if gradient is None and hasattr(each, "_unsharded_param"):
            gradient = each._unsharded_param.grad
        if gradient is not None:
            found[name] = gradient
    return found


def put_gradients(module: nn.Module, wrapped: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Set the gradients that `window_gradients` returned."""
    fsdp_parameters = dict(_fsdp_parameters(module, wrapped))
    for name, parameter in module.named_parameters():
        value = gradients.get(name)
        if value is None:
            continue
        if is_dtensor(value) or name not in fsdp_parameters:
            parameter.grad = value.to(parameter.device)
        else:
            fsdp_parameters[name].unsharded_accumulated_grad = value.to(parameter.device)


def _fsdp_parameters(module: nn.Module, wrapped: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each sharded parameter with FSDP's `FSDPParam` object."""
    names = {id(each): name for name, each in module.named_parameters() if is_dtensor(each)}
    units: list[Any] = (
        [each for each in wrapped.modules() if hasattr(each, "_get_fsdp_state")] if names else []
    )
    for unit in units:
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if id(parameter.sharded_param) in names:
                    yield names[id(parameter.sharded_param)], parameter
