"""Move a batch to a device, count its samples and tokens, and describe it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device) -> Any:
    """Return the same structure with every tensor, and every object with `.to`, on the device."""
    return _map_parts(
        batch,
        lambda part: hasattr(part, "to"),
        lambda part: part.to(device, non_blocking=True) if isinstance(part, Tensor) else part.to(device),
    )


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same structure with every tensor changed."""
    return _map_parts(batch, lambda part: isinstance(part, Tensor), change)


def _map_parts(batch: Any, is_part: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return the same structure of dictionaries, lists, tuples and dataclasses with its parts changed."""
    if is_part(batch):
        return change(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {
            field.name: _map_parts(getattr(batch, field.name), is_part, change)
            for field in dataclasses.fields(batch)
            if field.init
        }
        return dataclasses.replace(batch, **values)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # keeps the type, such as a defaultdict
        changed.update({key: _map_parts(value, is_part, change) for key, value in batch.items()})
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_parts(value, is_part, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map_parts(value, is_part, change) for value in batch)
    return batch


def batch_size(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor or array found; 1 if there is none."""
    kind = type(batch)
    if kind is tuple or kind is list:  # the common case first: this runs every batch
        first = batch[0] if batch else None
        if type(first) is Tensor and (shape := first.shape):
            return shape[0]
    array = first_array(batch)
    return int(array.shape[0]) if array is not None and array.ndim else 1


def count_tokens(batch: Any) -> int:
    """Return the number of tokens: the elements of `input_ids`, or of the first tensor."""
    kind = type(batch)
    if kind is tuple or kind is list:  # the common case first, as above
        first = batch[0] if batch else None
        if type(first) is Tensor:
            return first.numel()
    ids = first_array(batch.get("input_ids")) if isinstance(batch, Mapping) else None
    array = first_array(batch) if ids is None else ids
    return math.prod(array.shape) if array is not None else 0


def first_array(batch: Any) -> Any:
    """Return the first tensor or array in a nested structure. Do not consume iterators."""
    if hasattr(batch, "shape") and hasattr(batch, "ndim"):
        return batch
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    elif isinstance(batch, list | tuple):
        parts = list(batch)
    else:
        return None
    found = (first_array(part) for part in parts)
    return next((each for each in found if each is not None), None)


def describe_batch(batch: Any) -> str:
    """Return shapes and types: `float32[3, 4], int64[3]`."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {describe_batch(each)}" for key, each in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return ", ".join(describe_batch(each) for each in batch)
    return type(batch).__name__
