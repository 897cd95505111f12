"""Sharded tensors: DTensors in memory, and tensors in the files of several ranks.

A reader can load a whole tensor, or only the block that its rank needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from torch import Tensor

from hookline.util.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A block of a tensor: its offset in the whole tensor, and its values."""

    offset: tuple[int, ...]
    values: Tensor


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Return whether it is a DTensor. Import the class only if necessary, because the import is slow."""
    if type(value) is Tensor or not isinstance(value, Tensor) or not hasattr(value, "_spec"):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def own_shard(value: Any, where: str) -> TensorShard | None:
    """Return the shard that this rank writes; None if it has no elements or another rank writes them."""
    mesh, placements = value.device_mesh, value.placements
    if any(each.is_partial() for each in placements):
        raise CheckpointError(
            f"{where} has a partial placement ({value.placements}): its value is not known until the ranks "
            "reduce it. Call .redistribute() on it first."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the device mesh
        return None
    if any(each.is_replicate() and index for each, index in zip(placements, coordinate, strict=True)):
        return None
    if not _is_first_copy(mesh):
        return None
    size, offset = _block(value, where)
    local = value.to_local()
    if not math.prod(size):
        return None
    return TensorShard(offset, local.detach())


def shard_like(target: Any, read: Any) -> Tensor:
    """Return a DTensor with the placements of `target`; `read(offset, size)` reads this rank's block."""
    from torch.distributed.tensor import DTensor

    size, offset = _block(target, "A tensor")
    return DTensor.from_local(
        read(offset, size).to(target.to_local().device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def block_of(whole: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return a copy of a block of a tensor."""
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole.clone(memory_format=torch.contiguous_format)


def _is_first_copy(mesh: Any) -> bool:
    """Return whether this rank writes tensors on a mesh that may be a part of a larger one.

    Parallel parts of the larger mesh have equal copies of such tensors, for example of layers that tensor
    parallelism leaves whole. The part with the first rank writes them.
    """
    whole = mesh._get_root_mesh()
    return whole is mesh or bool((mesh.mesh == whole.mesh.min()).any())


def _block(value: Any, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size and the offset of this rank's block. Raise a CheckpointError if it is not one block."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if not _is_one_block(value, list(size), list(offset)):
        raise CheckpointError(
            f"{where} is sharded twice along one dimension ({value.placements} of {tuple(value.shape)}), so "
            "that a rank has rows that are not contiguous; checkpoints cannot hold that. Choose sizes that "
            "the dimensions of the mesh divide."
        )
    return tuple(size), tuple(offset)


def _is_one_block(value: Any, size: list[int], offset: list[int]) -> bool:
    """Return whether this rank's rows are contiguous, if they are sharded twice along one dimension.

    They are if the later dimensions of the mesh (tensor parallelism) divide the rows first, and the earlier
    one (FSDP) divides each part: then `split_factor` is the number of these parts.
    """
    mesh, placements = value.device_mesh, value.placements
    strided = [dim for dim, each in enumerate(placements) if hasattr(each, "split_factor")]
    if not strided:
        return True
    for dim in strided:
        later = range(dim + 1, mesh.ndim)
        same = [each for each in later if getattr(placements[each], "dim", None) == placements[dim].dim]
        if placements[dim].split_factor != math.prod(map(mesh.size, same)):
            return False
    found_size, found_offset = list(value.shape), [0] * value.ndim
    sharding = [dim for dim, each in enumerate(placements) if hasattr(each, "dim")]
    for dim in sorted(sharding, key=lambda each: (each in strided, each)):
        along = placements[dim].dim
        chunk = -(-found_size[along] // mesh.size(dim))
        start = min(chunk * mesh.get_local_rank(dim), found_size[along])
        found_offset[along] += start
        found_size[along] = min(chunk, found_size[along] - start)
    return found_size == size and (found_offset == offset or not math.prod(size))


class LazyFile:
    """A safetensors file that is opened on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def part(self, name: str) -> Any:
        """Return a tensor whose values are read when it is sliced."""
        return self._open().get_slice(name)

    def others(self, names: Container[str]) -> dict[str, Tensor]:
        """Return copies of all tensors except these."""
        file = self._open()
        return {name: file.get_tensor(name).clone() for name in file.keys() if name not in names}  # noqa: SIM118 - not a mapping

    def _open(self) -> Any:
        if self._file is None:
            self._file = safe_open(self.path, framework="pt")
        return self._file


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """The location of a shard: its file, its name there, its offset in the whole tensor, and its size."""

    file: LazyFile
    name: str
    offset: Sequence[int]
    size: Sequence[int]


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor in the files of several ranks that is not read yet."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    locations: Callable[[], Iterator[ShardLocation]]
    """Yields the shards, those that this rank probably needs first, so that the others need not be found."""

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read a block; only its bytes are read from the files."""
        block = torch.empty(tuple(size), dtype=self.dtype)
        missing = block.numel()
        locations = self.locations()
        while missing and (shard := next(locations, None)) is not None:
            in_shard, in_block = [], []
            for start, length, shard_start, shard_length in zip(
                offset, size, shard.offset, shard.size, strict=True
            ):
                low, high = max(start, shard_start), min(start + length, shard_start + shard_length)
                in_shard.append(slice(low - shard_start, high - shard_start))
                in_block.append(slice(low - start, high - start))
            if all(each.stop > each.start for each in in_block):
                stored = shard.file.part(shard.name)
                block[tuple(in_block)] = stored[tuple(in_shard)] if in_shard else stored[...]
                missing -= math.prod(each.stop - each.start for each in in_block)
        if missing:
            raise CheckpointError(
                f"{self.name}: {missing} of its {block.numel()} elements are in no file of the checkpoint."
            )
        return block


def materialize(value: Any, like: Mapping[str, Any], name: str = "") -> Any:
    """Return state with every tensor read: sharded like the tensor of the same name in `like`, else whole.

    A `ShardedTensor` with another name is sharded like one of the same shape, because a hook may use its own
    names. Dictionaries and lists are changed in place.
    """
    if isinstance(value, ShardedTensor | Tensor):
        return materialize_tensor(value, like[name] if name in like else _same_shape(value, like))
    if isinstance(value, dict):
        for key, inner in value.items():
            value[key] = materialize(inner, like, key if isinstance(key, str) else "")
    elif isinstance(value, list):
        value[:] = [materialize(each, like) for each in value]
    elif type(value) is tuple:
        return tuple(materialize(each, like) for each in value)
    return value


def _same_shape(value: ShardedTensor | Tensor, like: Mapping[str, Any]) -> Any:
    return (
        next((each for each in like.values() if each.shape == value.shape), None)
        if isinstance(value, ShardedTensor)
        else None
    )


def materialize_tensor(value: Any, like: Any) -> Any:
    """Read one tensor: sharded like `like` if that is a DTensor of the same shape, else whole."""
    if is_dtensor(value):
        return value
    if is_dtensor(like) and like.shape == value.shape:
        read = (
            value.read
            if isinstance(value, ShardedTensor)
            else lambda offset, size: block_of(value, offset, size)
        )
        return shard_like(like, read)
    return value.whole() if isinstance(value, ShardedTensor) else value.clone()


def materialize_optimizer(state: dict[str, Any], optimizer: Any) -> None:
    """Read the state of an optimizer in place: tensors with a parameter's shape are sharded like it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for name, parameter in zip(names, parameters, strict=False):  # torch reports a mismatch
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, ShardedTensor | Tensor):
                state["state"][name][key] = materialize_tensor(value, parameter)
    materialize(state, {})


def materialize_gradients(window: dict[str, Any], like: Mapping[str, Any]) -> None:
    """Read the gradients of an accumulation window in place; unsharded ones are local and stay whole."""
    for name, value in window.get("gradients", {}).items():
        window["gradients"][name] = materialize_tensor(
            value, like.get(name) if isinstance(value, ShardedTensor) else None
        )
    window.update(materialize({name: value for name, value in window.items() if name != "gradients"}, {}))


def sharded_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """Return the sharded parameters and buffers of a module, by their names in it and in its state_dict."""
    own = {
        name: each for name, each in (*module.named_parameters(), *module.named_buffers()) if is_dtensor(each)
    }
    return own and {**own, **{name: each for name, each in module.state_dict().items() if is_dtensor(each)}}


def join_blocks(
    name: str, shape: Sequence[int], dtype: torch.dtype, blocks: Sequence[tuple[Sequence[int], Tensor]]
) -> Tensor:
    """Return a tensor made of blocks, each with its offset. Raise unless they cover every element once."""
    if len(blocks) == 1 and not any(blocks[0][0]) and blocks[0][1].shape == torch.Size(shape):
        return blocks[0][1]
    # checked before memory for the whole is taken, because a file may claim any shape
    if sum(block.numel() for _, block in blocks) != math.prod(shape):
        raise CheckpointError(
            f"the shards of {name} have {sum(block.numel() for _, block in blocks)} of its "
            f"{math.prod(shape)} elements"
        )
    whole, filled = torch.empty(tuple(shape), dtype=dtype), torch.zeros(tuple(shape), dtype=torch.bool)
    for offset, block in blocks:
        place = tuple(slice(start, start + size) for start, size in zip(offset, block.shape, strict=True))
        if block.shape != filled[place].shape or filled[place].any():
            raise CheckpointError(
                f"the shards of {name} overlap, or reach outside of its shape {list(shape)}"
            )
        whole[place], filled[place] = block, True
    return whole
