"""Check the types in a checkpoint before a run is changed; a checksum does not prove types.

`check_contents` checks the parts that every run has. `check_like` compares the saved state of a hook, an
optimizer or a schedule with its current state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from hookline.checkpoint.sharded import ShardedTensor, is_dtensor
from hookline.metrics.accumulator import REDUCTIONS
from hookline.run.options import ACCUMULATE_BY
from hookline.run.state_parts import Counts
from hookline.util.errors import CheckpointError, described
from hookline.util.limited_json import is_table, is_text
from hookline.util.urls import shown

AMOUNTS = ("samples_seen", "tokens_seen")
MT_STATE_WORDS = 624
"""Words of the Mersenne Twister. NumPy accepts a larger position and then reads beyond the array."""
TypeCheck = Callable[[Any], bool]


def check_contents(contents: Mapping[str, Any], path: object) -> None:
    """Raise a CheckpointError if a run cannot restore the contents. Those of a `Line` have other parts."""
    if "position" in contents:
        check_parts(contents, RUN_PARTS, path)


def check_parts(contents: Mapping[str, Any], names: Iterable[str], path: object) -> None:
    """Raise a CheckpointError if a part is missing or has the wrong type. path: named in the error."""
    for name in names:
        is_valid, wanted = RUN_PARTS[name]
        if name not in contents:
            raise CheckpointError(
                f"The checkpoint {shown(path)} cannot be read: its state.json has no {name!r}."
            )
        if not _passes(is_valid, contents[name]):
            raise CheckpointError(
                f"The checkpoint {shown(path)} cannot be read: {name} in its state.json is not {wanted}: "
                f"{described(contents[name])}"
            )


def _passes(is_valid: TypeCheck, value: Any) -> bool:
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


def _is_anything(value: Any) -> bool:
    return True


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _none_or(is_valid: TypeCheck) -> TypeCheck:
    return lambda value: value is None or is_valid(value)


def _one_of(allowed: Container[Any]) -> TypeCheck:
    return lambda value: value in allowed


def _from(least: int) -> TypeCheck:
    return lambda value: is_whole(value, least)


def _list_of(is_valid: TypeCheck) -> TypeCheck:
    """Return a check for a list in which every item passes."""
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _items_of(*checks: TypeCheck) -> TypeCheck:
    """Return a check for a list or tuple with one item for each of these checks."""
    return lambda value: (
        isinstance(value, list | tuple)
        and len(value) == len(checks)
        and all(is_valid(item) for is_valid, item in zip(checks, value, strict=True))
    )


def _values(is_valid: TypeCheck, is_key: TypeCheck = is_text) -> TypeCheck:
    """Return a check for a dict in which every key and every value passes."""
    return lambda value: (
        isinstance(value, dict) and all(map(is_key, value)) and all(map(is_valid, value.values()))
    )


def _has(entries: Mapping[str, TypeCheck], optional: Iterable[str] = ()) -> TypeCheck:
    """Return a check for a dict with these entries, each of which passes its check."""
    return lambda value: (
        isinstance(value, dict)
        and all(
            is_valid(value[name]) if name in value else name in optional for name, is_valid in entries.items()
        )
    )


# ---- parts of a run ----------------------------------------------------------------------------------------


_is_accumulator = _has({"reduce": _one_of(REDUCTIONS), "total": _none_or(_is_value), "count": _is_value})
_is_log = _has(
    {
        "train_loss": _is_accumulator,
        "means": _values(_is_accumulator),
        "by_loader": _values(_is_accumulator),
        "keys": _values(_items_of(_is_flag, _is_flag, _none_or(_is_accumulator))),
        "pending": _values(_is_value),
        "reductions": _values(is_text),
    },
    optional=["reductions"],
)
WEIGHTING: dict[str, TypeCheck] = {"by": _one_of(ACCUMULATE_BY), "unit": _is_amount, "correction": _is_amount}
"""Entries of an accumulation window that also exist between two windows."""
_are_gradients = _values(lambda gradient: isinstance(gradient, Tensor | ShardedTensor))
_is_open_window = _has(
    {
        "batches": is_whole,
        "count": _is_amount,
        "size": _from(1),
        "had_none": _is_flag,
        "losses": _list_of(_is_value),
        "factors": _list_of(_is_value),
        "held": _list_of(_items_of(_is_value, _is_value, is_text)),
        "fed": _values(_is_amount, is_key=is_whole),
        "gradients": _are_gradients,
        **WEIGHTING,
    },
    optional=["factors", *WEIGHTING],
)


_BETWEEN: dict[str, TypeCheck] = {
    **WEIGHTING,
    "gradients": _are_gradients,  # of manual optimization, which has no window
    "is_lost": _is_flag,  # of a file of Lightning, which has no gradients
}
_is_between = _has(_BETWEEN, optional=_BETWEEN)


def _is_window(value: Any) -> bool:
    is_between = isinstance(value, dict) and value.keys() <= _BETWEEN.keys()
    return _is_between(value) if is_between else _is_open_window(value)


_is_position = _has(
    {
        "batches": is_whole,
        "validated_at": _items_of(_from(-1), _from(-1)),
        "epoch_advanced": _is_flag,
        "owes_validation": _is_flag,
        "plateau_due": _is_flag,
    },
    optional=["plateau_due"],
)
_are_filters = _values(
    _list_of(
        _list_of(
            _has(
                {"of": is_text, "passed": _none_or(is_whole), "done": _is_flag, "calls": is_whole},
                optional=["passed", "done", "calls"],
            )
        )
    )
)


def _is_numpy_stream(state: Any) -> bool:
    return (
        isinstance(state, tuple)
        and len(state) == 5
        and state[0] == "MT19937"
        and isinstance(state[1], np.ndarray)
        and state[1].shape == (MT_STATE_WORDS,)
        and is_whole(state[2])
        and state[2] <= MT_STATE_WORDS
        and state[3] in (0, 1)
        and is_number(state[4])
    )


def _is_python_stream(state: Any) -> bool:
    return (
        isinstance(state, tuple)
        and len(state) == 3
        and state[0] == 3
        and (state[2] is None or is_number(state[2]))
        and isinstance(state[1], tuple)
        and all(is_whole(word) and word < 2**32 for word in state[1])
        and len(state[1]) == MT_STATE_WORDS + 1
        and state[1][-1] <= MT_STATE_WORDS
    )


READERS = {"indices": ("generators", "current", "opened", "by_index"), "stream": ("generators",)}
"""Entries of a loader's state beside the common ones, by the kind of reader."""
LOADER_FACTS = ("length", "batch_size", "workers", "units", "world_size", "apart")
_is_seed = _none_or(_from(-(2**63)))
_is_count_or_none = _none_or(is_whole)


def _is_loader_state(value: Any) -> bool:
    """Check the entries that Hookline writes, not the state of the user's loader or dataset."""
    if value is None:
        return True
    if not isinstance(value, dict) or not is_text(value.get("kind")):
        return False
    if value["kind"] == "mixture":
        return _is_mixture(value)
    if "of_samples" in value and not set(LOADER_FACTS) <= set(value.get("facts") or ()):
        return False
    own: dict[str, TypeCheck] = {
        "generators": is_table,
        "current": is_table,
        "opened": _is_flag,
        "by_index": _is_flag,
    }
    common = {
        "seed": _is_seed,
        "in_pass": _is_flag,
        "of_samples": _is_flag,
        "passed_over": _is_count_or_none,
        "facts": _values(_is_count_or_none),
    }
    needed = READERS.get(value["kind"], ())
    others = [name for name in own if name not in needed]
    return _has({**common, **own}, ["of_samples", "passed_over", *others])(value)


_is_mixture = _has(
    {
        "cursor": is_table,
        "loaders": _values(_is_loader_state),
        "left": _values(_is_loader_state),
        "samples": _values(_is_amount),
        "tokens": _values(_is_amount),
        "batches": _values(_is_amount),
        "seed": _is_seed,
        "began_with": _is_anything,
    }
)
_is_optimizer_state = _has(
    {"state": _values(is_table, is_key=_is_anything), "param_groups": _list_of(_has({"params": _is_list}))}
)
_is_rng = _has({"python": _is_python_stream, "numpy": _is_numpy_stream, "torch": _is_tensor})


RUN_PARTS: dict[str, tuple[TypeCheck, str]] = {
    "run": (is_text, "text"),
    "module": (is_table, "a table of weights"),
    "datamodule": (_is_anything, ""),
    "hooks": (_values(_is_anything), "a table of hooks"),
    "kinds": (_none_or(_list_of(is_text)), "a list of names, or None"),
    "optimizers": (_list_of(_is_optimizer_state), "a list of the states of optimizers"),
    "schedulers": (_is_list, "a list of the states of schedules"),
    "precision": (is_table, "a table"),
    "counters": (
        _has({name: _is_amount if name in AMOUNTS else is_whole for name in Counts.SAVED}),
        "a table of counts from 0 on",
    ),
    "position": (_is_position, "a position in the data"),
    "window": (_is_window, "an accumulation window"),
    "log": (_is_log, "what an epoch has logged"),
    "filters": (_are_filters, "what filters have counted"),
    "metrics": (_values(_is_value), "a table of numbers"),
    "loggers": (is_table, "a table of loggers"),
    "rng": (_none_or(_is_rng), "the state of random streams"),  # None: a rank that the saved run did not have
    "loader": (_is_loader_state, "the position of a loader"),
}
"""Every part that a resume needs, with its check and its type in words."""


# ---- gradients of an open accumulation window --------------------------------------------------------------


def window_gradients(module: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by parameter name. Plain ones are local until the window closes."""
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    for name, parameter in _fsdp_parameters(module, wrapped):
        # FSDP stores unsharded gradients beside the parameters until they are reduced over the ranks
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None and hasattr(parameter, "_unsharded_param"):
            gradient = parameter._unsharded_param.grad
        if gradient is not None:  # with tensor parallelism a part, or a summand; the whole fits any mesh
            found[name] = gradient.full_tensor() if is_dtensor(gradient) else gradient
    return found


def clear_gradients(module: nn.Module, wrapped: nn.Module) -> None:
    """Clear all gradients, also those that FSDP stores beside the parameters in an open window."""
    for parameter in module.parameters():
        parameter.grad = None
    for _, parameter in _fsdp_parameters(module, wrapped):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def put_gradients(module: nn.Module, wrapped: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Set the gradients that `window_gradients` returned, and clear those that an earlier run has left."""
    clear_gradients(module, wrapped)
    fsdp_parameters = dict(_fsdp_parameters(module, wrapped))
    for name, parameter in module.named_parameters():
        value = gradients.get(name)
        if value is None:
            continue
        if is_dtensor(value) or name not in fsdp_parameters:
            parameter.grad = value.to(parameter.device, parameter.dtype)
        else:
            unsharded = _like_unsharded(fsdp_parameters[name], value.to(parameter.device))
            fsdp_parameters[name].unsharded_accumulated_grad = unsharded


def _like_unsharded(parameter: Any, gradient: Tensor) -> Tensor:
    """Return a whole gradient as FSDP holds it until the ranks reduce it: divided by tensor parallelism."""
    if not parameter.is_dtensor:
        return gradient
    from torch.distributed.tensor import distribute_tensor

    spec = getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec  # until torch 2.12
    return distribute_tensor(gradient, spec.mesh, spec.placements, src_data_rank=None)


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
