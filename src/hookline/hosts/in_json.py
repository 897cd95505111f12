"""What is kept of the hooks, where a host keeps nothing but JSON."""

from __future__ import annotations

import base64
import logging
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.format import TensorStore, pack, unpack
from hookline.errors import CheckpointError

log = logging.getLogger("hookline")
LARGEST = 1_000_000
"""Numbers that the state of one hook may have in tensors: more do not belong into a file of text."""


def as_json(kept: dict[str, Any]) -> dict[str, Any]:
    """The same for JSON to hold. A hook whose state cannot be held is left out, with a warning."""
    hooks = {}
    for name, state in kept["hooks"].items():
        try:
            hooks[name] = _text(state, f"the state of hook {name!r}")
        except CheckpointError as error:
            log.warning(
                "%s It is not kept in this host's checkpoints; hookline.hooks.ModelCheckpoint keeps it.",
                error,
            )
    rest = _text({key: value for key, value in kept.items() if key != "hooks"}, "the line")
    return {"hooks": hooks, "rest": rest}


def from_json(kept: dict[str, Any]) -> dict[str, Any]:
    """The opposite."""
    return {**_value(kept["rest"]), "hooks": {name: _value(each) for name, each in kept["hooks"].items()}}


def _text(value: Any, where: str) -> dict[str, Any]:
    tensors = TensorStore()
    structure = pack(value, tensors, where)
    numbers = sum(each.numel() for each in tensors.values())
    if numbers > LARGEST:
        raise CheckpointError(f"{where} has {numbers:,} numbers in tensors, more than {LARGEST:,}.")
    return {"structure": structure, "tensors": {name: _bytes(each) for name, each in tensors.items()}}


def _value(text: dict[str, Any]) -> Any:
    return unpack(text["structure"], {name: _tensor(*each) for name, each in text["tensors"].items()})


def _bytes(tensor: Tensor) -> tuple[str, list[int], str]:
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(plain.dtype).removeprefix("torch."), list(plain.shape), base64.b64encode(content).decode()


def _tensor(dtype: str, shape: list[int], content: str) -> Tensor:
    kind = getattr(torch, dtype)
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(base64.b64decode(content)), dtype=torch.uint8).view(kind).reshape(shape)
