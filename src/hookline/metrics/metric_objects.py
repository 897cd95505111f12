"""Metric objects: torchmetrics' and others with its methods. Find those of a module, save and restore them.

`state_dict` of a module leaves out the state of torchmetrics' objects. A resume inside an epoch needs it, or
the value of the epoch would cover only the batches after the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CACHES = ("_computed", "_forward_cache")
"""Attributes of torchmetrics that are computed from the others."""
JOINED = "joined"
"""The entry of a list of tensors that is saved as one tensor: an epoch may append a hundred thousand."""


def is_metric(found: Any) -> bool:
    """Return whether it has the methods of a metric object."""
    return all(callable(getattr(found, name, None)) for name in ("update", "compute", "reset"))


def metric_objects(module: nn.Module, logged: Iterable[Any]) -> Iterator[Any]:
    """Yield the metric objects that are part of the module or were logged, each once."""
    for found in {id(each): each for each in (*module.modules(), *logged)}.values():
        if is_metric(found):
            yield found


def named_metrics(module: nn.Module) -> dict[str, Any]:
    """Return the metric objects of a module that can be saved, by their names in it."""
    found = {}
    for prefix, owner in module.named_modules():
        if is_metric(owner):
            found[prefix] = owner
        for name, value in vars(owner).items():
            # a class, such as one of torcheval, need not be a module
            if hasattr(value, "load_state_dict") and not isinstance(value, type) and is_metric(value):
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def save_objects(
    module: nn.Module, logged: Mapping[str, Any], left_out: Iterable[Any] = ()
) -> dict[str, Any]:
    """Return the states of the module's metric objects, and which of them were logged in this epoch.

    left_out: objects of an evaluation, which begins again in a resumed run. A logged object that cannot be
    restored has None for its name.
    """
    metrics = named_metrics(module)
    names = {id(each): name for name, each in metrics.items()}
    excluded = {id(each) for each in left_out}
    states = {name: state_of(each) for name, each in metrics.items() if id(each) not in excluded}
    unsaved = [name for name, state in states.items() if state and not _is_plain(state)]
    return {
        "states": {name: state for name, state in states.items() if state and name not in unsaved},
        "logged": {
            key: None if (name := names.get(id(each))) in unsaved else name for key, each in logged.items()
        },
    }


def load_objects(module: nn.Module, saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Restore the objects that `save_objects` saved. Reset others that have been updated since.

    Return the logged objects by the names under which they were logged, and the names of lost ones.
    """
    metrics, states = named_metrics(module), saved.get("states", {})
    for name, metric in metrics.items():
        if name in states:
            load_state(metric, states[name])
        elif state_of(metric):
            metric.reset()
    logged = saved.get("logged", {})
    found = {key: metrics[name] for key, name in logged.items() if name in metrics}
    return found, [
        *(key for key in logged if key not in found),
        *(name for name in states if name not in metrics),
    ]


def state_of(metric: Any) -> dict[str, Any]:
    """Return the state of a metric object; empty if it was not updated, or if `state_dict` of the module
    has its state.
    """
    if not isinstance(getattr(metric, "_defaults", None), dict):
        return {} if isinstance(metric, nn.Module) else dict(metric.state_dict())
    defaults = metric._defaults
    state = {
        name: _joined(value)
        for name, value in vars(metric).items()
        # wrappers keep tensors and counts beside the states that they declare
        if name in defaults or (isinstance(value, Tensor) and name not in CACHES) or _is_count(name, value)
    }
    is_used = any(_is_count(name, value) and value for name, value in state.items())
    return (
        state if is_used or any(isinstance(state[name], Tensor) for name in state.keys() - defaults) else {}
    )


def load_state(metric: Any, state: Mapping[str, Any]) -> None:
    """Restore what `state_of` returned, on the device of the metric. Raise TypeError for other state."""
    if not isinstance(getattr(metric, "_defaults", None), dict):
        metric.load_state_dict(state)
        return
    metric.reset()
    for name, value in state.items():
        now = vars(metric).get(name)
        restored = _on_device(value, metric)
        fits = (
            isinstance(restored, Tensor | list)
            if isinstance(now, list)
            else isinstance(restored, Tensor)
            if isinstance(now, Tensor)
            else _is_count(name, now) and _is_count(name, restored)
        )
        if not fits:
            raise TypeError(
                f"{type(metric).__name__}.{name} is {type(restored).__name__} in the checkpoint and "
                f"{type(now).__name__} here"
            )
        setattr(metric, name, restored)


def _is_count(name: str, value: Any) -> bool:
    return type(value) is int and name.startswith("_")


def _joined(value: Any) -> Any:
    """Return a list of tensors as one tensor if their types and shapes allow it; other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, list) or not all(isinstance(each, Tensor) for each in value):
        return list(value) if isinstance(value, list) else value
    tensors = [each.detach() for each in value]
    if len({(each.dtype, each.device, each.ndim, each.shape[1:]) for each in tensors}) != 1:
        return tensors
    if not tensors[0].ndim:
        return {JOINED: torch.stack(tensors), "lengths": None}
    return {JOINED: torch.cat(tensors), "lengths": torch.tensor([len(each) for each in tensors])}


def _on_device(value: Any, metric: Any) -> Any:
    """Return a saved value as the metric holds it."""
    device = getattr(metric, "device", None)
    if isinstance(value, Tensor):
        return value.to(device, copy=True)  # a metric changes its state in place
    if isinstance(value, list):
        return [_on_device(each, metric) for each in value]
    if isinstance(value, Mapping):
        joined, lengths = value[JOINED].to(device, copy=True), value["lengths"]
        return list(joined.unbind() if lengths is None else joined.split(lengths.tolist()))
    return value


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint without pickled objects can hold the value."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Tensor | bool | int | float | str)
