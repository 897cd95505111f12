"""Tensors that lie in the files of several ranks: read as a whole, or only the block that a rank needs."""

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

# ---- Tensors that are spread over ranks (torch's DTensor)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A block of a tensor: where it begins in the whole, and its values."""

    offset: tuple[int, ...]
    values: Tensor


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Whether it is a DTensor. Torch's class is looked up only if somebody has loaded it: it
    takes a while.
    """
    if type(value) is Tensor or not isinstance(value, Tensor) or not hasattr(value, "_spec"):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def own_shard(value: Any, where: str) -> TensorShard | None:
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
    size, offset = _block(value)
    local = value.to_local()
    if not math.prod(size):
        return None
    return TensorShard(offset, local.detach())


def shard_like(target: Any, read: Any) -> Tensor:
    """A DTensor laid out like `target`, with the values that `read(offset, size)` finds; only this rank's
    are read.
    """
    from torch.distributed.tensor import DTensor

    _refuse_strided(target, "A tensor")
    size, offset = _block(target)
    local = target.to_local()
    block = read(offset, size).to(local.device)
    return DTensor.from_local(
        block,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def block_of(whole: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """A copy of a block of a tensor that is there as a whole."""
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole.clone(memory_format=torch.contiguous_format)


def _block(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The size of this rank's block, and where it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(size), tuple(offset)


def _refuse_strided(value: Any, where: str) -> None:
    """Two meshes that cut one dimension (tensor parallel within FSDP) leave a rank rows that are not
    neighbours.
    """
    if any(type(each).__name__ == "_StridedShard" for each in value.placements):
        raise CheckpointError(
            f"{where} is cut twice along one dimension ({value.placements}), which leaves each rank with "
            "rows that are not neighbours; checkpoints cannot hold that. Cut each dimension once."
        )


class LazyFile:
    """A file of tensors that is opened when it is first needed, and once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def part(self, name: str) -> Any:
        """A tensor whose values are read when it is sliced."""
        return self._open().get_slice(name)

    def others(self, names: Container[str]) -> dict[str, Tensor]:
        """Every tensor but these, in memory of its own."""
        file = self._open()
        return {name: file.get_tensor(name).clone() for name in file.keys() if name not in names}  # noqa: SIM118 - no mapping

    def _open(self) -> Any:
        if self._file is None:
            self._file = safe_open(self.path, framework="pt")
        return self._file


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """Where a piece is: its file and its name there, where it begins in the whole, and its size."""

    file: LazyFile
    name: str
    offset: Sequence[int]
    size: Sequence[int]


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor of a checkpoint that several ranks have written, not read yet."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    places: Callable[[], Iterator[ShardLocation]]
    """Where the pieces are, those first that this rank is most likely to need: the others may never be looked
    for.
    """

    def whole(self) -> Tensor:
        """All of it, in memory of its own."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of it, in memory of its own; only the bytes that belong to the block are read."""
        made = torch.empty(tuple(size), dtype=self.dtype)
        missing = made.numel()
        places = self.places()
        while missing and (place := next(places, None)) is not None:
            there, here = [], []
            for start, length, at, wide in zip(offset, size, place.offset, place.size, strict=True):
                low, high = max(start, at), min(start + length, at + wide)
                there.append(slice(low - at, high - at))
                here.append(slice(low - start, high - start))
            if all(each.stop > each.start for each in here):
                stored = place.file.part(place.name)
                made[tuple(here)] = stored[tuple(there)] if there else stored[...]
                missing -= math.prod(each.stop - each.start for each in here)
        if missing:
            raise CheckpointError(
                f"{self.name}: {missing} of its {made.numel()} values are in no file of the checkpoint."
            )
        return made


def materialize(value: Any, like: Mapping[str, Any], name: str = "") -> Any:
    """What was read, as a run needs it: tensors by the name of one that is spread over ranks are spread like
    it.

    So are those that were spread, under another name, like one of the same shape: a hook may call them what
    it likes. Everything else becomes a whole tensor in memory of its own. Dictionaries and lists are changed
    in place.
    """
    if isinstance(value, ShardedTensor | Tensor):
        return materialize_tensor(value, like[name] if name in like else _of_shape(value, like))
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = materialize(each, like, key if isinstance(key, str) else "")
    elif isinstance(value, list):
        value[:] = [materialize(each, like) for each in value]
    elif type(value) is tuple:
        return tuple(materialize(each, like) for each in value)
    return value


def _of_shape(value: ShardedTensor | Tensor, like: Mapping[str, Any]) -> Any:
    return (
        next((each for each in like.values() if each.shape == value.shape), None)
        if isinstance(value, ShardedTensor)
        else None
    )


def materialize_tensor(value: Any, like: Any) -> Any:
    """One tensor: spread like another of its shape if that is spread, else whole."""
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
    """The state of an optimizer: what is shaped like its parameter is spread like it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for name, parameter in zip(names, parameters, strict=False):  # torch says what does not fit
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, ShardedTensor | Tensor):
                state["state"][name][key] = materialize_tensor(value, parameter)
    materialize(state, {})


def materialize_gradients(window: dict[str, Any], like: Mapping[str, Any]) -> None:
    """Of an accumulation window: those that were spread are spread again; whole ones are a rank's own and
    stay whole.
    """
    for name, value in window.get("gradients", {}).items():
        window["gradients"][name] = materialize_tensor(
            value, like.get(name) if isinstance(value, ShardedTensor) else None
        )
    window.update(materialize({name: value for name, value in window.items() if name != "gradients"}, {}))


def sharded_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """The parameters and buffers of a module that are spread over ranks, by their names in it and in its
    state_dict.
    """
    own = {
        name: each for name, each in (*module.named_parameters(), *module.named_buffers()) if is_dtensor(each)
    }
    return own and {**own, **{name: each for name, each in module.state_dict().items() if is_dtensor(each)}}
