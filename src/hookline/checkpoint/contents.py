"""What the contents of a checkpoint must be, checked before anything of a run is changed: a checksum proves
no types.

`check_contents` knows the parts that are the same in every run. `check_like` compares the state of an object
with the one that the object has now: hooks, optimizers and schedules.
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
from hookline.run.save_request import COUNTERS
from hookline.util.errors import CheckpointError, described
from hookline.util.urls import shown

AMOUNTS = ("samples_seen", "tokens_seen")
MT_WORDS = 624
"""Words of the Mersenne Twister. Numpy takes any position among them, and reads beyond the array at a larger
one.
"""
Check = Callable[[Any], bool]


def check_contents(contents: Mapping[str, Any], path: object) -> None:
    """Refuse the contents of a run's checkpoint that cannot be restored; those of a `Line`
    have other parts.
    """
    if "position" in contents:
        check_parts(contents, RUN, path)


def check_parts(contents: Mapping[str, Any], names: Iterable[str], path: object) -> None:
    """Refuse contents that lack one of these parts, or in which one is of another kind. path: whose contents
    they are.
    """
    for name in names:
        fits, wanted = RUN[name]
        if name not in contents:
            raise CheckpointError(
                f"The checkpoint {shown(path)} cannot be read: its state.json has no {name!r}."
            )
        if not _is_fit(fits, contents[name]):
            raise CheckpointError(
                f"The checkpoint {shown(path)} cannot be read: {name} in its state.json is not {wanted}: "
                f"{described(contents[name])}"
            )


def _is_fit(fits: Check, value: Any) -> bool:
    try:
        return bool(fits(value))
    except Exception:  # a tensor where a number should be cannot be compared with one
        return False


def check_like(saved: Any, now: Any, where: str, loose: bool = False) -> None:
    """Refuse state whose values are of other kinds than those that the same object has now.

    None stands for a number that is not known yet; loose: for any value that is left to a default. What is
    empty now may hold anything later, and so may what is new.
    """
    if now is None or saved is None:
        other = now if saved is None else saved
        fits = loose or other is None or _is_numeric(other)
    elif isinstance(now, Mapping):
        fits = isinstance(saved, Mapping)
        for key in now if fits else ():
            if key in saved:
                check_like(saved[key], now[key], f"{where}.{key}", loose)
    elif isinstance(now, list | tuple | set):
        fits = isinstance(saved, list | tuple | set)
        if fits and not isinstance(now, set) and not isinstance(saved, set) and len(saved) == len(now):
            for index, (each, other) in enumerate(zip(saved, now, strict=True)):
                check_like(each, other, f"{where}[{index}]", loose)
    elif isinstance(now, bool | str):
        fits = isinstance(saved, type(now))
    elif _is_numeric(now):
        fits = _is_numeric(saved)
    else:
        fits = True  # of a class that we do not know
    if not fits:
        raise CheckpointError(f"{where} is {described(saved)}, where this run has {described(now)}.")


def _is_numeric(value: Any) -> bool:
    return is_number(value) or isinstance(value, Tensor | ShardedTensor | np.ndarray)


# ---- kinds of values ---------------------------------------------------------------------------------------


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a count: within what other systems can hold, so that nothing overflows later."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) < 2**63


def is_number(value: Any) -> bool:
    """Whether it is a number, finite or not, but not True or False."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    """Samples or tokens as somebody counts them."""
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


def _all(value: Any, kinds: tuple[type, ...], fits: Check) -> bool:
    """Whether it is a list, or a tuple, of such values."""
    return isinstance(value, kinds) and all(fits(each) for each in cast(Any, value))


def _values(value: Any, fits: Check) -> bool:
    """Whether it is a table of text to such values."""
    return isinstance(value, dict) and all(map(_is_text, value)) and all(map(fits, value.values()))


def _has(value: Any, entries: Mapping[str, Check], optional: Iterable[str] = ()) -> bool:
    """Whether it is a table with these entries."""
    if not isinstance(value, dict):
        return False
    return all(fits(value[name]) if name in value else name in optional for name, fits in entries.items())


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

    def losses(each: Any) -> bool:
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
            "losses": losses,
            "factors": losses,
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
        },
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
    if value is None:  # of a rank that was not there before
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
"""What the state of a loader has beside the common parts, by the way that it is read."""
FACTS = ("length", "batch_size", "workers", "units", "world_size", "apart")


def _is_loader(value: Any) -> bool:
    """The parts that we write; what a loader or dataset of the user's keeps is the user's."""
    if value is None:
        return True
    if not isinstance(value, dict) or not _is_text(value.get("kind")):
        return False
    if value["kind"] == "mixture":
        return _is_mixture(value)

    def known(each: Any) -> bool:
        return each is None or is_whole(each)

    def facts(each: Any) -> bool:
        return _values(each, known) and ("of_samples" not in value or set(FACTS) <= set(each))

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
            "passed_over": known,
            "facts": facts,
            **own,
        },
        optional,
    )


def _is_mixture(value: dict[str, Any]) -> bool:
    def counts(each: Any) -> bool:
        return _values(each, _is_amount)

    def loaders(each: Any) -> bool:
        return _values(each, _is_loader)

    return _has(
        value,
        {
            "cursor": _is_table,
            "loaders": loaders,
            "left": loaders,
            "samples": counts,
            "tokens": counts,
            "batches": counts,
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
    "kinds": (lambda value: _all(value, (list,), _is_text), "a list of names"),
    "optimizers": (_are_optimizers, "a list of the states of optimizers"),
    "schedulers": (lambda value: isinstance(value, list), "a list of the states of schedules"),
    "precision": (_is_table, "a table"),
    "counters": (
        lambda value: _has(value, {name: _is_amount if name in AMOUNTS else is_whole for name in COUNTERS}),
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
"""Every part that a resume relies on, and what it must be."""


# ---- The gradients of an accumulation window that is still open


def window_gradients(module: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    """By the names of the parameters. Plain ones are this rank's own: the ranks' are brought together when
    the window closes.
    """
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    for name, each in _fsdp_parameters(module, wrapped):
        # FSDP keeps whole gradients beside the parameters until they are added up over ranks
        held = each.unsharded_accumulated_grad
        if held is None and hasattr(each, "_unsharded_param"):
            held = each._unsharded_param.grad
        if held is not None:
            found[name] = held
    return found


def put_gradients(module: nn.Module, wrapped: nn.Module, gradients: dict[str, Tensor]) -> None:
    """The opposite."""
    kept_beside = dict(_fsdp_parameters(module, wrapped))
    for name, parameter in module.named_parameters():
        value = gradients.get(name)
        if value is None:
            continue
        if is_dtensor(value) or name not in kept_beside:
            parameter.grad = value.to(parameter.device)
        else:
            kept_beside[name].unsharded_accumulated_grad = value.to(parameter.device)


def _fsdp_parameters(module: nn.Module, wrapped: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP's own record of each parameter, by the parameter's name."""
    names = {id(each): name for name, each in module.named_parameters() if is_dtensor(each)}
    units: list[Any] = (
        [each for each in wrapped.modules() if hasattr(each, "_get_fsdp_state")] if names else []
    )
    for each in units:
        for group in each._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if id(parameter.sharded_param) in names:
                    yield names[id(parameter.sharded_param)], parameter
