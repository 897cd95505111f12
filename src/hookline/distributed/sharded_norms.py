"""Norms, clipping and scaling of tensors that may be sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor: its shard, or the tensor itself. It shares the tensor's memory."""
    whole: Any = tensor
    if type(tensor) is Tensor or not hasattr(whole, "to_local"):
        return tensor
    with torch.no_grad():
        shard: Tensor = whole.to_local()
    return shard


def sharded_dims(tensor: Any) -> list[int]:
    """Return the dimensions of the device mesh over which the tensor is sharded.

    A dimension that FSDP and tensor parallelism both shard has a placement whose `is_shard` is false.
    """
    return [
        dim
        for dim, place in enumerate(getattr(tensor, "placements", ()))
        if not place.is_replicate() and not place.is_partial()
    ]


def is_sharded(tensor: Any) -> bool:
    """Return whether other processes hold other parts of the tensor."""
    return bool(sharded_dims(tensor))


def _sharded_alike(tensors: Sequence[Any]) -> Iterator[tuple[list[int], list[Any]]]:
    """Yield the indices of tensors with one mesh and the same placements, in the same order on all ranks, and
    the process groups over which they are sharded, one for each dimension of the mesh.
    """
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            kinds.setdefault((tensor.device_mesh, tensor.placements), []).append(index)
    for (mesh, _), where in kinds.items():
        yield where, [mesh.get_group(dim) for dim in sharded_dims(tensors[where[0]])]


def over_shards(vector: Tensor, tensors: Sequence[Any], order: float = 2.0) -> Tensor:
    """Turn norms of local parts into norms of whole tensors, with one all-reduce per kind of sharding."""
    for where, groups in _sharded_alike(tensors):
        highest = math.isinf(order)
        # a maximum over ranks may lose a NaN, but not an infinity
        part = vector[where].nan_to_num(math.inf, math.inf) if highest else vector[where] ** order
        for group in groups:
            operation = torch.distributed.ReduceOp.MAX if highest else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(part, operation, group=group)
        vector[where] = part if highest else part ** (1 / order)
    return vector


def shards_of(tensors: Sequence[Any]) -> int:
    """Return over how many processes the tensors are sharded."""
    return max(
        (math.prod(each.device_mesh.size(dim) for dim in sharded_dims(each)) for each in tensors), default=1
    )


def gather_rows(rows: Sequence[Tensor], tensors: Sequence[Any]) -> list[Tensor]:
    """Concatenate the row of each tensor from the shards of all processes.

    Tensors that are sharded alike share two collectives for each dimension of their mesh.
    """
    gathered = list(rows)
    for where, groups in _sharded_alike(tensors):
        alike = [gathered[index] for index in where]
        for group in groups:
            alike = _gather_rows(alike, group)
        for index, row in zip(where, alike, strict=True):
            gathered[index] = row
    return gathered


def _gather_rows(rows: list[Tensor], group: Any) -> list[Tensor]:
    many, device = torch.distributed.get_world_size(group), rows[0].device
    lengths = torch.tensor([len(each) for each in rows], device=device)
    all_lengths = [torch.empty_like(lengths) for _ in range(many)]
    torch.distributed.all_gather(all_lengths, lengths, group=group)
    longest = int(max(each.sum() for each in all_lengths))
    mine = torch.cat(rows)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    gathered = [torch.empty_like(padded) for _ in range(many)]
    torch.distributed.all_gather(gathered, padded, group=group)
    parts = [
        torch.split(each[: int(n.sum())], n.tolist()) for each, n in zip(gathered, all_lengths, strict=True)
    ]
    return [torch.cat(row) for row in zip(*parts, strict=True)]


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the total norm, equal on every rank, as a tensor on its device.

    Norms of half precision are computed in float32, because float16 ends at 65504.
    """
    here = [local_part(each) for each in grads]
    if not any(is_sharded(each) or each.dtype in HALF for each in grads):
        return torch.nn.utils.get_total_norm(here)
    # with a real dtype, torch does not compute the norm of complex numbers
    here = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in here]
    dtype = torch.float64 if any(each.dtype is torch.float64 for each in here) else torch.float32
    found = torch._foreach_norm(here, 2.0, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    vector = torch.stack([each.to(found[0].device, dtype) for each in found])
    norm: Tensor = torch.linalg.vector_norm(over_shards(vector, grads))
    return norm


def clip_norm(grads: Sequence[Tensor], limit: float) -> Tensor:
    """Clip the total norm to `limit` in place, and return the norm before."""
    norm = norm_of(grads)
    scale_gradients(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def clip_values(grads: Sequence[Tensor], limit: float) -> Tensor | None:
    """Clamp every element to `limit` in place. Return None, because this does not compute the norm."""
    here = [local_part(each) for each in grads]
    torch._foreach_clamp_min_(here, -limit)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_clamp_max_(here, limit)  # pyright: ignore[reportPrivateImportUsage]
    return None


def scale_gradients(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply the local parts in place."""
    here = [local_part(each) for each in grads if each.numel()]
    if isinstance(factor, Tensor) and any(each.device != factor.device for each in here):
        for tensor in here:
            tensor.mul_(factor.to(tensor.device))
    else:
        torch._foreach_mul_(here, factor)  # pyright: ignore[reportPrivateImportUsage]


def agree_on_overflow(found: dict[Any, Tensor], parameters: Sequence[Any]) -> bool:
    """Return whether a gradient overflowed on any rank, and set the scaler's flags (`found`) to match."""
    device = next(iter(found))
    seen = torch.stack([local_part(each).to(device).reshape(()) for each in found.values()]).sum().reshape(1)
    for _, groups in _sharded_alike(parameters):
        for group in groups:
            torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX, group=group)
    overflowed = bool(seen.item())
    for flag in found.values():
        local_part(flag).fill_(float(overflowed))
    return overflowed
