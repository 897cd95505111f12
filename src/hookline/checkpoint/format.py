"""Convert nested state to JSON and tensors, and back. No pickle is written or read."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hookline.checkpoint.sharded import is_dtensor, own_shard
from hookline.util.errors import CheckpointError, described
from hookline.util.text import encodable

TAG = "$"
MAX_DEPTH = 100
"""Levels of nesting; the limit also stops state that contains itself."""
SAFE_INT = 2**63
"""Integers from here on are written as text: Python refuses to parse very long ones, and other readers round
them.
"""
RESERVED_NAME = "__metadata__"
"""The name that the safetensors format reserves."""
CAN_HOLD = (
    "It can hold numbers, text, None, tensors, arrays, and lists, tuples, sets and dictionaries of them."
)
PLAIN_TYPES = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
)
"""The dtypes that every supported release of safetensors can store; others are stored as bytes or pairs."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A weight that a checkpoint leaves out, because the base model has it: its dtype, shape and sha256."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class TensorStore(dict[str, Tensor]):
    """Tensors by name, with an index by memory so that a tied tensor is stored once."""

    def __init__(self, prefix: str = "", shards: Shards | None = None, label: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        """Removed from the names of tensors: `module.weight` is stored as `weight`, as other tools expect."""
        self.label = label
        """Added before the names."""
        self.index: dict[Any, str] = {}
        self.shared: dict[str, str] = {}
        """The names of tied tensors, and the name that each is stored under."""
        self.shards = shards
        """The store for this rank's shards of sharded tensors."""


class Shards(TensorStore):
    """This rank's shards of sharded tensors, by the full names of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, tuple[list[int], list[int]]] = {}
        """The offset of each shard in the whole tensor, and its size."""
        self.names: dict[str, Any] = {}
        """All sharded tensors, also without a shard here, so that all ranks choose the same names."""
        self.elements_wanted = self.elements_here = 0

    def as_part(self, tensors: TensorStore, own: dict[str, Any]) -> RankPart:
        """Return these shards with the per-rank state of this rank."""
        structure = {"own": own, "shards": self.blocks, "shared": self.shared}
        return RankPart(structure, tensors, self.elements_wanted, self.elements_here)


@dataclass(frozen=True, slots=True)
class RankPart:
    """The files of one rank: its shards, and its state that differs from rank zero's."""

    structure: dict[str, Any] = field(default_factory=lambda: {"own": {}, "shards": {}, "shared": {}})
    tensors: TensorStore = field(default_factory=TensorStore)
    elements_wanted: int = 0
    """Elements of all sharded tensors. The `elements_here` of all ranks must add up to it."""
    elements_here: int = 0
    """Elements that this rank stores."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The contents of a checkpoint, split by file."""

    structure: dict[str, Any]
    model: TensorStore
    rest: TensorStore
    part: RankPart = field(default_factory=RankPart)


def pack_contents(contents: dict[str, Any], shards: Shards | None = None) -> Packed:
    """Split contents by file. The tensors are not copied."""
    shards = Shards() if shards is None else shards
    model, rest = TensorStore("module.", shards), TensorStore("", shards)
    structure = {key: pack(value, model if key == "module" else rest, key) for key, value in contents.items()}
    model.shared |= {
        name.removeprefix("module."): first.removeprefix("module.")
        for name, first in shards.shared.items()
        if name.startswith("module.")
    }
    return Packed(structure, model, rest, shards.as_part(shards, {}))


def unpack_contents(
    structure: dict[str, Any], model: Mapping[str, Tensor], rest: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the contents that `pack_contents` has split."""
    return {key: unpack(value, model if key == "module" else rest) for key, value in structure.items()}


class Stored(dict[str, Tensor]):
    """The tensors of a file, with a function that finds tensors sharded over the files of several ranks."""

    def __init__(self, tensors: Mapping[str, Tensor], find_sharded: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__(tensors)
        self.find_sharded = find_sharded
        """Takes the entry of a sharded tensor; returns the whole tensor or a `ShardedTensor`."""


def pack(value: Any, tensors: TensorStore, where: str, depth: int = 0) -> Any:
    """Return a value as JSON and add its tensors to `tensors`, tied ones once. where: named in errors."""
    kind: Any = type(value)  # the exact type, because a subclass would come back as its base class
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -SAFE_INT <= value < SAFE_INT else {TAG: "int", "value": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        return _pack_tensor(value, tensors, where)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _pack_array(value, tensors, where)
    if kind is LeftOut:
        return {TAG: "left_out", "dtype": value.dtype, "shape": list(value.shape), "sha256": value.sha256}
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{where[:100]}... is nested more than {MAX_DEPTH} levels deep, or holds itself."
        )
    if kind is dict or kind in (Counter, OrderedDict, defaultdict):
        return _pack_dict(value, kind, tensors, where, depth)
    if kind is set:
        return {TAG: "set", "value": [_pack_key(each, tensors, where, depth) for each in value]}
    if kind in (list, tuple):
        parts = [pack(each, tensors, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)]
        return parts if kind is list else {TAG: "tuple", "value": parts}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__name__}, which a checkpoint cannot hold. {CAN_HOLD}"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `pack` has converted."""
    if isinstance(value, list):
        return [unpack(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: unpack(each, tensors) for key, each in value.items()}
    if kind == "int":
        return int(value["value"], 16)
    if kind == "float":
        return float(value["value"])
    if kind == "tensor":
        return _unpack_tensor(value, tensors)
    if kind == "sharded":
        return cast(Stored, tensors).find_sharded(value)
    if kind == "array":
        array = _unpack_tensor(value, tensors).numpy()
        return array[()] if value["scalar"] else array
    if kind == "left_out":
        return LeftOut(str(value["dtype"]), tuple(map(int, value["shape"])), str(value["sha256"]))
    if kind in ("dict", "ordered", "counter"):
        return _unpack_dict(kind, value, tensors)
    if kind in ("tuple", "set"):
        parts = [unpack(each, tensors) for each in value["value"]]
        return tuple(parts) if kind == "tuple" else set(parts)
    raise CheckpointError(f"unknown kind of value {kind!r} in a checkpoint")


def tensor_keys(packed: Any) -> set[str]:
    """Return the names in the file of all tensors and arrays in a packed value."""
    if isinstance(packed, dict) and packed.get(TAG) in ("tensor", "array"):
        return {packed["key"]}
    inner = packed.values() if isinstance(packed, dict) else packed if isinstance(packed, list) else ()
    return set().union(*map(tensor_keys, inner))


# ---- dictionaries ------------------------------------------------------------------------------------------


def _pack_dict(value: dict[Any, Any], kind: type, tensors: TensorStore, where: str, depth: int) -> Any:
    packed: dict[str, Any]
    if all(type(key) is str and key != TAG for key in value):
        packed = {key: pack(each, tensors, f"{where}.{key}", depth + 1) for key, each in value.items()}
    else:
        packed = {
            TAG: "dict",
            "value": [
                [
                    _pack_key(key, tensors, where, depth),
                    pack(each, tensors, f"{where}[{_key_text(key)}]", depth + 1),
                ]
                for key, each in value.items()
            ],
        }
    if kind is Counter:  # MultiStepLR stores its milestones in one, and needs 0 for missing keys
        return {TAG: "counter", "value": packed}
    if kind is not OrderedDict:
        return packed
    # a module's state_dict has the versions of its layers as an attribute, which load_state_dict reads
    metadata = getattr(value, "_metadata", None)
    return {
        TAG: "ordered",
        "value": packed,
        "metadata": pack(metadata, tensors, f"{where}._metadata", depth + 1),
    }


def _unpack_dict(kind: str, value: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if kind == "dict":
        return {unpack(key, tensors): unpack(each, tensors) for key, each in value["value"]}
    inner = unpack(value["value"], tensors)
    if kind == "counter":
        return Counter(inner)
    ordered: Any = OrderedDict(inner)
    metadata = unpack(value["metadata"], tensors)
    if metadata is not None:
        ordered._metadata = metadata
    return ordered


def _key_text(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # Python does not print integers with thousands of digits
        return "a very long number"


def _pack_key(key: Any, tensors: TensorStore, where: str, depth: int) -> Any:
    if isinstance(key, Tensor):  # hashed by identity, so that a lookup after a resume would fail
        raise CheckpointError(f"a key of {where} is a tensor, which a checkpoint cannot hold as a key.")
    return pack(key, tensors, f"a key of {where}", depth + 1)


# ---- tensors and arrays ------------------------------------------------------------------------------------


def _pack_tensor(value: Tensor, tensors: TensorStore, where: str) -> Any:
    if is_dtensor(value):
        return _pack_sharded(value, tensors.shards, where)
    if nn.parameter.is_lazy(value):
        raise CheckpointError(f"{where} has no shape yet: run a batch through the module before saving it.")
    if not is_dense(value):
        raise CheckpointError(
            f"{where} is not a plain dense tensor "
            f"({type(value).__name__}, {value.dtype}, {value.layout}, {value.device})."
        )
    tensor = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    packed: dict[str, Any] = {TAG: "tensor", "key": _add_tensor(tensor, tensors, where)}
    if tensor.dtype not in PLAIN_TYPES:
        packed |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        packed["memory_format"] = "channels_last"  # an optimizer's moments have the layout of their weights
    return packed


def is_dense(value: Tensor) -> bool:
    """Return whether a tensor is a plain one, whose values are in its own memory."""
    kind, plain = cast(Any, type(value)), cast(Any, Tensor)
    return not (
        nn.parameter.is_lazy(value)
        or value.layout is not torch.strided
        or value.device.type == "meta"
        or value.is_quantized
        or value.is_nested
        or kind.__torch_dispatch__ is not plain.__torch_dispatch__
    )


def _pack_sharded(value: Any, shards: Shards | None, where: str) -> Any:
    """Return the entry of a sharded tensor and add this rank's shard to `shards`.

    The name is the same on all ranks, also on a rank without a shard.
    """
    if value.dtype not in PLAIN_TYPES:
        raise CheckpointError(
            f"{where} is sharded over ranks and has dtype {value.dtype}, which can be stored only unsharded."
        )
    if shards is None:
        raise CheckpointError(f"{where} is sharded over ranks, which is not allowed here.")
    name = encodable(where)  # a name in a file must not contain unpaired surrogates
    while name in shards.names and shards.names[name] is not value:
        name += "'"
    if name not in shards.names:
        shards.names[name] = value
        shards.elements_wanted += value.numel()
        shard = own_shard(value, where)
        if shard is not None:
            shards.elements_here += shard.values.numel()
            if _add_tensor(shard.values, shards, name) == name:
                shards.blocks[name] = (list(shard.offset), list(shard.values.shape))
    return {
        TAG: "sharded",
        "key": name,
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
    }


def _unpack_tensor(value: dict[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[value["key"]]
    if "dtype" in value:
        dtype = dtype_of(value["dtype"])
        tensor = (
            torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype).reshape(value["shape"])
        )
    return tensor.contiguous(memory_format=torch.channels_last) if "memory_format" in value else tensor


def dtype_of(name: Any) -> torch.dtype:
    """Return a dtype by its name."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{described(name)} is not a dtype.")
    return found


def _pack_array(value: Any, tensors: TensorStore, where: str) -> Any:
    array = np.asarray(value)
    kind = array.dtype.kind
    if kind not in "biufc" or array.dtype.itemsize > (16 if kind == "c" else 8) or not array.dtype.isnative:
        raise CheckpointError(
            f"{where} is an array of {array.dtype.str}, which a checkpoint cannot hold: "
            "only native numbers can be stored."
        )
    return {
        **_pack_tensor(torch.from_numpy(np.array(array)), tensors, where),
        TAG: "array",
        "scalar": isinstance(value, np.generic),
    }


def as_storable(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that safetensors supports: complex as pairs, rare dtypes as bytes."""
    if tensor.dtype in PLAIN_TYPES:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _add_tensor(tensor: Tensor, tensors: TensorStore, where: str) -> str:
    """Add a tensor to a store and return its name, or the name of a tied tensor that is already there."""
    name = tensors.label + encodable(where.removeprefix(tensors.prefix))
    memory = (
        (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if tensor.numel()
        else None
    )
    if memory is not None and memory in tensors.index:
        first = tensors.shared[name] = tensors.index[memory]
        return first
    while name in tensors or name == RESERVED_NAME:
        name += "'"
    tensors[name] = as_storable(tensor)
    if memory is not None:
        tensors.index[memory] = name
    return name
