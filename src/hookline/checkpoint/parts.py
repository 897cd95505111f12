"""What each rank writes for itself: its pieces of tensors, and whatever differs from what rank zero has."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.format import Packed, Shards, TensorStore, pack, pack_contents
from hookline.checkpoint.sharding import is_dtensor

SAME_EVERYWHERE = ("module", "optimizers", "run", "world_size")
"""Replicated or spread over ranks by whoever runs them; comparing them would mean to read all of it."""
BUFFERS = "module buffers"
"""Those are what a rank changes by itself, such as the statistics of a batch norm."""
HOOK = "hooks/"


class OwnParts:
    """What of a rank's contents may be its own, each with a sum to compare it with rank zero's."""

    def __init__(self, contents: dict[str, Any], buffers: dict[str, Tensor]) -> None:
        self._shards = Shards()
        self.packed = pack_contents(contents, self._shards)
        self._stores: dict[str, TensorStore] = {}
        self._structures: dict[str, Any] = {}
        for number, (name, value) in enumerate((_separate(contents) | {BUFFERS: buffers}).items()):
            # their pieces are among the shards already, under the same names
            store = self._stores[name] = TensorStore(shards=self._shards, label=f"{number}: ")
            self._structures[name] = pack(value, store, name.replace(HOOK, "hooks."))
        self.sums = {name: _sum(self._structures[name], store) for name, store in self._stores.items()}

    def for_rank(self, rank: int, sums_of_zero: dict[str, str]) -> Packed:
        """What this rank writes."""
        if rank == 0:
            return self.packed
        tensors, own = TensorStore(), {}
        tensors.update(self._shards)
        for name, store in self._stores.items():
            if self.sums[name] != sums_of_zero.get(name):
                own[name] = self._structures[name]
                tensors.update(store)
        return Packed({}, TensorStore(), TensorStore(), self._shards.as_part(tensors, own))


def _separate(contents: dict[str, Any]) -> dict[str, Any]:
    """By names; every hook for itself, and of the module only the buffers."""
    apart = {
        name: value for name, value in contents.items() if name not in SAME_EVERYWHERE and name != "hooks"
    }
    apart |= {f"{HOOK}{name}": state for name, state in contents.get("hooks", {}).items()}
    return apart


def _sum(structure: Any, store: TensorStore) -> str:
    found = hashlib.sha256(json.dumps(structure, sort_keys=True).encode())
    for name, tensor in store.items():
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            plain: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(plain)
    return found.hexdigest()


def buffers_of(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    """The module's buffers as they are in its state, if they are not spread over ranks."""
    return {
        name: state[name]
        for name, _ in module.named_buffers()
        if isinstance(state.get(name), Tensor) and not is_dtensor(state[name])
    }
