"""What each rank writes for itself: its pieces of tensors, and whatever differs from what rank zero has."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.format import (
    TAG,
    Packed,
    Shards,
    Stored,
    TensorStore,
    dtype_of,
    pack,
    pack_contents,
    unpack,
)
from hookline.checkpoint.sharded import LazyFile, ShardedTensor, ShardLocation, is_dtensor
from hookline.util.errors import CheckpointError, described
from hookline.util.limited_json import STRUCTURE_BYTES, parse_json, read_within
from hookline.util.urls import OF_RANK

REPLICATED = ("module", "optimizers", "run", "world_size")
"""Replicated or spread over ranks by whoever runs them; comparing them would mean to read all of it."""
BUFFERS = "module buffers"
"""Those are what a rank changes by itself, such as the statistics of a batch norm."""
HOOK = "hooks/"


class PerRankState:
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
    apart = {name: value for name, value in contents.items() if name not in REPLICATED and name != "hooks"}
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


# ---- What ranks have written for themselves, read again


Find = Callable[[dict[str, Any]], Any]
MAX_RANKS = 2**20


class RankFiles:
    """The `rank-N` files of a checkpoint; there are none if one process has written it all."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        """`rank`: whose own is looked at first; with as many ranks as before it needs nobody else's."""
        self.path = path
        found = sorted(
            int(name[1]) for each in path.glob("rank-*.json") if (name := OF_RANK.fullmatch(each.name))
        )
        self.ranks = sorted(found, key=lambda each: each != rank)
        self.files = {rank: LazyFile(path / f"rank-{rank}.safetensors") for rank in found}
        self._structures: dict[int, dict[str, Any]] = {}
        self._read: dict[str, Tensor] = {}
        self.counted = 0

    def structure(self, rank: int) -> dict[str, Any]:
        """What a rank says of its files: what is its own, and where its pieces belong."""
        if rank not in self._structures:
            self._structures[rank] = read_structure(self.path / f"rank-{rank}.json")
        return self._structures[rank]

    def pieces(self, entry: dict[str, Any]) -> ShardedTensor:
        """A tensor that was spread over ranks, not read yet."""
        name: str = entry["key"]
        shape = torch.Size(entry["shape"])
        return ShardedTensor(name, shape, dtype_of(entry["dtype"]), lambda: self._places(name, len(shape)))

    def whole(self, entry: dict[str, Any]) -> Tensor:
        """All of such a tensor; tied ones are one tensor again."""
        pieces = self.pieces(entry)
        first = next(pieces.places(), None)
        stored = pieces.name if first is None else first.name
        if stored not in self._read:
            self._read[stored] = pieces.whole()
        return self._read[stored]

    def _places(self, name: str, dimensions: int) -> Iterator[ShardLocation]:
        for rank in self.ranks:
            structure = self.structure(rank)
            stored = structure["shared"].get(name, name)  # tied ones are stored once
            if stored in structure["shards"]:
                block = structure["shards"][stored]
                if not _is_block(block, dimensions):
                    raise CheckpointError(
                        f"{self.path}: rank-{rank}.json does not say where its piece of {name} belongs: "
                        f"{described(block)}"
                    )
                yield ShardLocation(self.files[rank], stored, *block)

    def count(self, share: int = 0, of: int = 1) -> int:
        """How many numbers the pieces have, or those in one of so many shares of the files."""
        found = 0
        for rank in sorted(self.ranks)[share::of]:
            structure = self.structure(rank)
            sizes = {name: math.prod(size) for name, (_, size) in structure["shards"].items()}
            found += sum(sizes.values()) + sum(
                sizes[first] for name, first in structure["shared"].items() if first in sizes
            )
        self.counted = found
        return found

    def adapt(self, contents: dict[str, Any], rank: int, world_size: int, find: Find) -> None:
        """Rank zero's contents become those of this rank: its own if there are as many ranks as before, else
        fair shares.
        """
        before = contents.get("world_size", 1)
        if type(before) is not int or not 1 <= before <= MAX_RANKS:
            raise CheckpointError(f"world_size={described(before)} is not a number of ranks.")
        if before == world_size:
            for name, value in self.own(rank, find).items():
                _put(contents, name, value)
        else:
            self._redistribute(contents, rank, before, world_size)

    def _redistribute(self, contents: dict[str, Any], rank: int, before: int, world_size: int) -> None:
        own = {each: self.own(each, self.pieces) for each in range(before)}
        logs = [own[each].get("log", contents["log"]) for each in range(before)] if "log" in contents else []
        if logs:
            contents["log"] = add_logs(logs) if rank == 0 else nothing_logged(contents["log"])
        windows = (
            [own[each].get("window", contents["window"]) for each in range(before)]
            if "window" in contents
            else []
        )
        if windows:
            is_weighted = windows[0].get("by", "batches") != "batches"
            contents["window"] = sum_window(windows, world_size) if is_weighted else mean_window(windows)
        if rank and "rng" in contents:
            contents["rng"] = own[rank].get("rng", contents["rng"]) if rank < before else None

    def own(self, rank: int, find: Find) -> dict[str, Any]:
        """What a rank had otherwise than rank zero."""
        structures = self.structure(rank)["own"] if rank in self.ranks else {}
        if not structures:
            return {}
        tensors = Stored(
            self.files[rank].others(self.structure(rank)["shards"]), find
        )  # pieces are read if they are needed
        return {name: unpack(structure, tensors) for name, structure in structures.items()}


def _is_block(block: Any, dimensions: int) -> bool:
    """Return whether it says where a block begins and how large it is, in each of so many dimensions."""
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(
            isinstance(each, list)
            and len(each) == dimensions
            and all(type(number) is int and number >= 0 for number in each)
            for each in block
        )
    )


def read_structure(path: Path) -> dict[str, Any]:
    """What `state.json`, or a rank's own, says of the contents of a checkpoint."""
    try:
        structure = parse_json(read_within(path, STRUCTURE_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{path.name}: {error}.") from None
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path.name} is not a table.")
    return structure


def elements_wanted(structure: Any) -> int:
    """How many numbers the tensors have that are spread over ranks, by what is said of the whole contents."""
    return sum({entry["key"]: math.prod(entry["shape"]) for entry in _sharded_entries(structure)}.values())


def _sharded_entries(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and value.get(TAG) == "sharded":
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _sharded_entries(each)


def _put(contents: dict[str, Any], name: str, value: Any) -> None:
    if name.startswith(HOOK):
        contents["hooks"][name.removeprefix(HOOK)] = value
    elif name == BUFFERS:
        contents["module"].update(value)
    else:
        contents[name] = value


# ---- another number of ranks -------------------------------------------------------------------------------


def add_logs(logs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks had logged in the epoch so far, as if one had logged it all."""
    whole = logs[0]
    for each in logs[1:]:
        whole["train_loss"] = _add(whole["train_loss"], each["train_loss"])
        for kind in ("means", "by_loader"):
            for name, state in each[kind].items():
                whole[kind][name] = _add(whole[kind].get(name), state)
        for name, (on_step, prog_bar, epoch) in each["keys"].items():
            known = whole["keys"].get(name, [on_step, prog_bar, None])
            whole["keys"][name] = [known[0], known[1], _add(known[2], epoch)]
    return whole


def nothing_logged(log: dict[str, Any]) -> dict[str, Any]:
    """The same keys with nothing in them: rank zero has it all."""
    return {
        **log,
        "train_loss": _nothing(log["train_loss"]),
        **{
            kind: {name: _nothing(state) for name, state in log[kind].items()}
            for kind in ("means", "by_loader")
        },
        "keys": {
            name: [on_step, bar, _nothing(epoch)] for name, (on_step, bar, epoch) in log["keys"].items()
        },
        "pending": {},
    }


def _nothing(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return state and {"reduce": state["reduce"], "total": None, "count": type(state["count"])(0)}


def _add(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    if one is None or other is None or one["total"] is None or other["total"] is None:
        return other if one is None or one["total"] is None else one
    reduce, mine, theirs = one["reduce"], one["total"], other["total"]
    if reduce == "last":
        total = mine
    elif reduce in ("max", "min"):
        total = (max if reduce == "max" else min)(mine, theirs)
    else:
        total = mine + theirs
    return {"reduce": reduce, "total": total, "count": one["count"] + other["count"]}


def mean_window(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """An accumulation window that was open: the mean of the ranks' gradients, which is what an update would
    have used.
    """
    if not any(each.get("gradients") for each in windows):
        return windows[0]
    if len({(each.get("batches"), each.get("count")) for each in windows}) > 1:
        raise CheckpointError(
            "its ranks were at different places of an accumulation window, which another number of ranks "
            "cannot go on with. Resume with as many ranks as before."
        )
    grads = [each["gradients"] for each in windows]
    names = dict.fromkeys(name for each in grads for name in each)
    return {**windows[0], "gradients": {name: _mean([each.get(name) for each in grads]) for name in names}}


def sum_window(windows: list[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Return an open window that counts samples or tokens, as each of `world_size` ranks continues it.

    Each sample counts as much as those to come: the sums over the ranks there were, divided by the number of
    ranks there are.
    """
    grads = [each.get("gradients", {}) for each in windows]
    if not any(grads):
        return windows[0]
    names = dict.fromkeys(name for each in grads for name in each)
    numbers = dict.fromkeys(number for each in windows for number in each["fed"])
    return {
        **windows[0],
        "count": sum(each["count"] for each in windows) / world_size,
        "fed": {
            number: sum(each["fed"].get(number, 0) for each in windows) / world_size for number in numbers
        },
        "gradients": {
            name: _mean([each.get(name) for each in grads]) * (len(windows) / world_size) for name in names
        },
    }


def _mean(values: list[Any]) -> Any:
    known = [each for each in values if each is not None]
    if isinstance(known[0], ShardedTensor):  # spread over ranks: what is stored is the mean of all already
        return known[0].whole()
    return torch.stack(known).sum(0) / len(values)
