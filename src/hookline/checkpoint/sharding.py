"""Tensors that are spread over ranks (torch's DTensor): which piece is this rank's, and a new one made from
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from hookline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor: where it begins in the whole, and its numbers."""

    begins_at: tuple[int, ...]
    numbers: Tensor


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Whether it is a DTensor. Torch's class is looked up only if somebody has loaded it: it
    takes a while.
    """
    if type(value) is Tensor or not isinstance(value, Tensor) or not hasattr(value, "_spec"):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def own_piece(value: Any, where: str) -> Piece | None:
    """What this rank has to write of it; None if there is nothing, or another rank has the same and writes
    it.
    """
    mesh, placements = value.device_mesh, value.placements
    if any(each.is_partial() for each in placements):
        raise CheckpointError(
            f"{where} is a sum that the ranks have not added up yet ({value.placements}): it has no value to "
            "be stored. Call .redistribute() on it first."
        )
    _refuse_strided(value, where)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in its mesh
        return None
    if any(each.is_replicate() and at for each, at in zip(placements, coordinate, strict=True)):
        return None
    size, begins_at = _block(value)
    local = value.to_local()
    if not math.prod(size):
        return None
    return Piece(begins_at, local.detach())


def placed_like(target: Any, read: Any) -> Tensor:
    """A DTensor laid out like `target`, with the numbers that `read(begins_at, size)` finds; only this rank's
    are read.
    """
    from torch.distributed.tensor import DTensor

    _refuse_strided(target, "A tensor")
    size, begins_at = _block(target)
    local = target.to_local()
    block = read(begins_at, size).to(local.device)
    return DTensor.from_local(
        block,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def block_of(whole: Tensor, begins_at: Sequence[int], size: Sequence[int]) -> Tensor:
    """A copy of a block of a tensor that is there as a whole."""
    for dim, (start, length) in enumerate(zip(begins_at, size, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole.clone(memory_format=torch.contiguous_format)


def _block(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The size of this rank's block, and where it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, begins_at = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(size), tuple(begins_at)


def _refuse_strided(value: Any, where: str) -> None:
    """Two meshes that cut one dimension (tensor parallel within FSDP) leave a rank rows that are not
    neighbours.
    """
    if any(type(each).__name__ == "_StridedShard" for each in value.placements):
        raise CheckpointError(
            f"{where} is cut twice along one dimension ({value.placements}), which leaves each rank with "
            "rows that are not neighbours; checkpoints cannot hold that. Cut each dimension once."
        )
