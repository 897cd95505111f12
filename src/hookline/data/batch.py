"""What a batch holds: moving it to a device, counting its samples and tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device) -> Any:
    """The same structure with every tensor, and everything that has `.to`, on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)({key: move(value, device) for key, value in batch.items()}) \
            if type(batch) is not dict else {key: move(value, device) for key, value in batch.items()}  # fmt: skip
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    if hasattr(batch, "to"):
        return batch.to(device)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = {field.name: move(getattr(batch, field.name), device) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **moved)
    return batch


def batch_size(batch: Any) -> int:
    """The number of samples: the length of the first tensor found; 1 if there is none."""
    kind = type(batch)
    if kind is tuple or kind is list:  # the common case first: this runs every batch
        first = batch[0] if batch else None
        if type(first) is Tensor and first.ndim:
            return first.shape[0]
    tensor = first_tensor(batch)
    return tensor.shape[0] if tensor is not None and tensor.ndim else 1


def count_tokens(batch: Any) -> int:
    """The number of tokens: the elements of `input_ids`, or of the first tensor."""
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    tensor = ids if isinstance(ids, Tensor) else first_tensor(batch)
    return tensor.numel() if tensor is not None else 0


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor in a nested structure."""
    if isinstance(batch, Tensor):
        return batch
    values: Any = batch.values() if hasattr(batch, "values") and callable(batch.values) else batch
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        return None
    for value in values:
        found = first_tensor(value)
        if found is not None:
            return found
    return None
