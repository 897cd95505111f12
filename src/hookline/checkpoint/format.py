"""Nested state as JSON and tensors: what a checkpoint can hold, and nothing else. No pickle is written or read."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.errors import CheckpointError

TAG = "$"


class TensorStore(dict[str, Tensor]):
    """Tensors by name, and by the memory they lie in, so that the same one is found again at once."""

    def __init__(self) -> None:
        super().__init__()
        self.index: dict[Any, str] = {}


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Something JSON can hold; tensors are put into `tensors`, the same one only once. `where` names the value in errors."""
    kind: Any = type(value)  # exactly: a subclass would come back as something else
    if value is None or kind in (bool, str, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            raise CheckpointError(f"{where} is a tensor that holds no plain numbers ({value.layout}, {value.device}).")
        return {TAG: "tensor", "key": _keep(value.detach(), tensors, where), "grad": value.requires_grad}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8) \
                or not array.dtype.isnative:  # fmt: skip
            raise CheckpointError(f"{where} is an array of {array.dtype.str}, which a checkpoint cannot hold: "
                                  "only native numbers can be stored.")  # fmt: skip
        signed = array.view(array.dtype.str.replace("u", "i")) if array.dtype.kind == "u" and array.itemsize > 1 else array
        return {TAG: "array", "key": _keep(torch.from_numpy(np.array(signed)), tensors, where), "dtype": array.dtype.str,
                "scalar": isinstance(value, np.generic)}  # fmt: skip
    if kind is Counter:  # MultiStepLR keeps its milestones in one, and needs its zero for what is missing
        return {TAG: "counter", "value": pack(dict(value), tensors, where)}
    if kind is dict or kind.__name__ in ("OrderedDict", "defaultdict"):
        if all(isinstance(key, str) and key != TAG for key in value):
            return {key: pack(each, tensors, f"{where}.{key}") for key, each in value.items()}
        pairs = [
            [pack(key, tensors, f"a key of {where}"), pack(each, tensors, f"{where}[{key!r}]")] for key, each in value.items()
        ]
        return {TAG: "dict", "value": pairs}
    if kind in (list, tuple, set):
        parts = [pack(each, tensors, f"{where}[{index}]") for index, each in enumerate(value)]
        return parts if kind is list else {TAG: kind.__name__, "value": parts}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__name__}, which a checkpoint cannot hold. "
        "It can hold numbers, text, None, tensors, arrays, and lists, tuples, sets and dictionaries of them."
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The opposite of `pack`."""
    if isinstance(value, list):
        return [unpack(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: unpack(each, tensors) for key, each in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tensor":
        return tensors[value["key"]]
    if kind == "array":
        array = tensors[value["key"]].numpy().view(np.dtype(value["dtype"]))
        return array[()] if value["scalar"] else array
    if kind == "counter":
        return Counter(unpack(value["value"], tensors))
    if kind == "dict":
        return {unpack(key, tensors): unpack(each, tensors) for key, each in value["value"]}
    if kind in ("tuple", "set"):
        parts = [unpack(each, tensors) for each in value["value"]]
        return tuple(parts) if kind == "tuple" else set(parts)
    raise CheckpointError(f"unknown kind of value {kind!r} in a checkpoint")


def _keep(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> str:
    memory = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()) if tensor.numel() else None
    index = tensors.index if isinstance(tensors, TensorStore) else {}
    if memory is not None and memory in index:
        return index[memory]  # tied weights are stored once
    key = where
    while key in tensors:
        key += "'"
    tensors[key] = tensor
    if memory is not None:
        index[memory] = key
    return key
