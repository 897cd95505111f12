"""Nested state as JSON and tensors: what a checkpoint can hold, and nothing else. No pickle is written or
read.
"""

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

TAG = "$"
DEEPEST = 100
"""Levels of nesting. State that holds itself has no last one."""
SAFE_INT = 2**63
"""From here on whole numbers are written as text: Python refuses to read very long ones, and other readers
round them.
"""
RESERVED = "__metadata__"
"""The one name that a safetensors file keeps for itself."""
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
"""What every release of safetensors that is allowed can store; other types are stored as bytes or pairs of
numbers.
"""


class TensorStore(dict[str, Tensor]):
    """Tensors by name, and by the memory they lie in, so that the same one is found again at once."""

    def __init__(self, prefix: str = "", shards: Shards | None = None, label: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        """Left out of the names of tensors: `module.weight` is kept as `weight`, as other tools expect it."""
        self.label = label
        """Put before the names."""
        self.index: dict[Any, str] = {}
        self.shared: dict[str, str] = {}
        """The names of tied tensors, and the name that each is stored under."""
        self.shards = shards
        """Where this rank's pieces of tensors go that are spread over ranks."""


class Shards(TensorStore):
    """This rank's pieces of tensors that are spread over ranks, by the full names of these."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, tuple[list[int], list[int]]] = {}
        """Where each piece begins in the whole, and its size."""
        self.names: dict[str, Any] = {}
        """All such tensors, those included that this rank has no piece of: every rank must choose the same
        names.
        """
        self.numbers_wanted = self.numbers_here = 0

    def as_part(self, tensors: TensorStore, own: dict[str, Any]) -> Part:
        """These pieces, and what else a rank writes for itself."""
        structure = {"own": own, "shards": self.blocks, "shared": self.shared}
        return Part(structure, tensors, self.numbers_wanted, self.numbers_here)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank of many writes for itself: its pieces, and what differs from rank zero's."""

    structure: dict[str, Any] = field(default_factory=lambda: {"own": {}, "shards": {}, "shared": {}})
    tensors: TensorStore = field(default_factory=TensorStore)
    numbers_wanted: int = 0
    """How many numbers the tensors have that are spread over ranks, and how many this rank stores: the ranks'
    add up to them.
    """
    numbers_here: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """The contents of a checkpoint, taken apart: what goes into each of its files."""

    structure: dict[str, Any]
    model: TensorStore
    rest: TensorStore
    part: Part = field(default_factory=Part)


def pack_contents(contents: dict[str, Any], shards: Shards | None = None) -> Packed:
    """Take contents apart; the tensors are those that came in, not copies."""
    shards = Shards() if shards is None else shards
    model, rest = TensorStore("module.", shards), TensorStore("", shards)
    structure = {key: pack(value, model if key == "module" else rest, key) for key, value in contents.items()}
    inside = {name: first for name, first in shards.shared.items() if name.startswith("module.")}
    model.shared |= {
        name.removeprefix("module."): first.removeprefix("module.") for name, first in inside.items()
    }
    return Packed(structure, model, rest, shards.as_part(shards, {}))


def unpack_contents(
    structure: dict[str, Any], model: Mapping[str, Tensor], rest: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The opposite."""
    return {key: unpack(value, model if key == "module" else rest) for key, value in structure.items()}


class Stored(dict[str, Tensor]):
    """The tensors of a file that was read, and those that were spread over the files of several ranks."""

    def __init__(self, tensors: Mapping[str, Tensor], find_sharded: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__(tensors)
        self.find_sharded = find_sharded
        """From a description to the tensor, or to what stands for it."""


def pack(value: Any, tensors: TensorStore, where: str, depth: int = 0) -> Any:
    """Something JSON can hold; tensors are put into `tensors`, the same one only once. `where` names the
    value in errors.
    """
    kind: Any = type(value)  # exactly: a subclass would come back as something else
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
    if depth > DEEPEST:
        raise CheckpointError(f"{where[:100]}... is nested more than {DEEPEST} levels deep, or holds itself.")
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
    """The opposite of `pack`."""
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
    if kind in ("dict", "ordered", "counter"):
        return _unpack_dict(kind, value, tensors)
    if kind in ("tuple", "set"):
        parts = [unpack(each, tensors) for each in value["value"]]
        return tuple(parts) if kind == "tuple" else set(parts)
    raise CheckpointError(f"unknown kind of value {kind!r} in a checkpoint")


def tensor_keys(packed: Any) -> set[str]:
    """Return the names, in their file, of all tensors and arrays in what `pack` returned."""
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
                    pack(each, tensors, f"{where}[{_shown(key)}]", depth + 1),
                ]
                for key, each in value.items()
            ],
        }
    if kind is Counter:  # MultiStepLR keeps its milestones in one, and needs its zero for what is missing
        return {TAG: "counter", "value": packed}
    if kind is not OrderedDict:
        return packed
    # a module's state_dict carries the versions of its layers as an attribute; load_state_dict looks for it
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
    made: Any = OrderedDict(inner)
    metadata = unpack(value["metadata"], tensors)
    if metadata is not None:
        made._metadata = metadata
    return made


def _shown(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # Python does not write whole numbers of thousands of digits
        return "a very long number"


def _pack_key(key: Any, tensors: TensorStore, where: str, depth: int) -> Any:
    if isinstance(key, Tensor):  # found by identity, so nobody could find it again
        raise CheckpointError(f"a key of {where} is a tensor, which a checkpoint cannot hold as a key.")
    return pack(key, tensors, f"a key of {where}", depth + 1)


# ---- tensors and arrays ------------------------------------------------------------------------------------


def _pack_tensor(value: Tensor, tensors: TensorStore, where: str) -> Any:
    if is_dtensor(value):
        return _pack_sharded(value, tensors.shards, where)
    kind, plain = cast(Any, type(value)), cast(Any, Tensor)
    wrapper = kind.__torch_dispatch__ is not plain.__torch_dispatch__
    if nn.parameter.is_lazy(value):
        raise CheckpointError(f"{where} has no shape yet: run a batch through the module before it is saved.")
    if (
        value.layout is not torch.strided
        or value.device.type == "meta"
        or value.is_quantized
        or value.is_nested
        or wrapper
    ):
        raise CheckpointError(
            f"{where} is a tensor that holds no plain numbers "
            f"({kind.__name__}, {value.dtype}, {value.layout}, {value.device})."
        )
    tensor = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    packed: dict[str, Any] = {TAG: "tensor", "key": _keep(tensor, tensors, where)}
    if tensor.dtype not in PLAIN_TYPES:
        packed |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        packed["memory_format"] = "channels_last"  # moments of an optimizer lie like their weights
    return packed


def _pack_sharded(value: Any, shards: Shards | None, where: str) -> Any:
    """A description; this rank's piece is put aside. The name is the same on every rank, whatever piece each
    has.
    """
    if value.dtype not in PLAIN_TYPES:
        raise CheckpointError(
            f"{where} is spread over ranks and of {value.dtype}, which can be stored only as a whole."
        )
    if shards is None:
        raise CheckpointError(f"{where} is spread over ranks, and has no place here.")
    name = _printable(where)
    while (
        name in shards.names and shards.names[name] is not value
    ):  # the same once more: it was packed already
        name += "'"
    if name not in shards.names:
        shards.names[name] = value
        shards.numbers_wanted += value.numel()
        piece = own_shard(value, where)
        if piece is not None:
            shards.numbers_here += piece.numbers.numel()
            if _keep(piece.numbers, shards, name) == name:
                shards.blocks[name] = (list(piece.begins_at), list(piece.numbers.shape))
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
    """A type of numbers by its name."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{described(name)} is not a type of numbers.")
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


def stored(tensor: Tensor) -> Tensor:
    """As something that safetensors has a name for: complex numbers as pairs, rare types as their bytes."""
    if tensor.dtype in PLAIN_TYPES:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _printable(name: str) -> str:
    """Not every text is allowed as a name in a file: no halves of a pair of surrogates."""
    return name.encode("utf-8", "backslashreplace").decode()


def _keep(tensor: Tensor, tensors: TensorStore, where: str) -> str:
    name = tensors.label + _printable(where.removeprefix(tensors.prefix))
    memory = (
        (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if tensor.numel()
        else None
    )
    if memory is not None and memory in tensors.index:
        first = tensors.shared[name] = tensors.index[memory]
        return first  # tied weights are stored once
    while name in tensors or name == RESERVED:
        name += "'"
    tensors[name] = stored(tensor)
    if memory is not None:
        tensors.index[memory] = name
    return name
