"""Per-rank state: the shards of a rank, and its state that differs from rank zero's."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
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

REPLICATED = ("module", "optimizers", "run", "world_size", "data_ranks")
"""Parts that are replicated or sharded by the strategy; a comparison would have to read all of them."""
BUFFERS_PART = "module buffers"
"""Buffers can differ between ranks, such as the statistics of a batch norm."""
HOOK_PREFIX = "hooks/"


class PerRankState:
    """The parts of a rank's contents that may differ from rank zero's, each with a checksum."""

    def __init__(self, contents: dict[str, Any], buffers: dict[str, Tensor]) -> None:
        self._shards = Shards()
        self.packed = pack_contents(contents, self._shards)
        self._stores: dict[str, TensorStore] = {}
        self._structures: dict[str, Any] = {}
        parts = {
            name: value for name, value in contents.items() if name not in REPLICATED and name != "hooks"
        }
        parts |= {f"{HOOK_PREFIX}{name}": state for name, state in contents.get("hooks", {}).items()}
        for number, (name, value) in enumerate((parts | {BUFFERS_PART: buffers}).items()):
            # `self._shards` already has their shards, under the same names
            store = self._stores[name] = TensorStore(shards=self._shards, label=f"{number}: ")
            self._structures[name] = pack(value, store, name.replace(HOOK_PREFIX, "hooks."))
        self.sums = {name: checksum(self._structures[name], store) for name, store in self._stores.items()}

    def for_rank(self, rank: int, sums_of_zero: dict[str, str]) -> Packed:
        """Return the contents that this rank writes."""
        if rank == 0:
            return self.packed
        tensors, own = TensorStore(), {}
        tensors.update(self._shards)
        for name, store in self._stores.items():
            if self.sums[name] != sums_of_zero.get(name):
                own[name] = self._structures[name]
                tensors.update(store)
        return Packed({}, TensorStore(), TensorStore(), self._shards.as_part(tensors, own))


def checksum(structure: Any, store: TensorStore) -> str:
    """Return a checksum of what `pack` returned. structure: its result. store: its tensors."""
    digest = hashlib.sha256(json.dumps(structure, sort_keys=True).encode())
    for name, tensor in store.items():
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            plain: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(plain)
    return digest.hexdigest()


def buffers_of(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the module's buffers in its state_dict that are not sharded."""
    return {
        name: state[name]
        for name, _ in module.named_buffers()
        if isinstance(state.get(name), Tensor) and not is_dtensor(state[name])
    }


# ---- reading -----------------------------------------------------------------------------------------------


Find = Callable[[dict[str, Any]], Any]
MAX_RANKS = 2**20


class RankFiles:
    """The `rank-N` files of a checkpoint; there are none if a single process wrote it."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        """Find the files. rank: search its file first; with the same world size, no other file is read."""
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
        """Return the rank-N.json of a rank: its own state, and the offsets of its shards."""
        if rank not in self._structures:
            self._structures[rank] = read_structure(self.path / f"rank-{rank}.json")
        return self._structures[rank]

    def sharded(self, entry: dict[str, Any]) -> ShardedTensor:
        """Return a sharded tensor without reading it."""
        name: str = entry["key"]
        shape = torch.Size(entry["shape"])
        return ShardedTensor(name, shape, dtype_of(entry["dtype"]), lambda: self._locations(name, len(shape)))

    def whole(self, entry: dict[str, Any]) -> Tensor:
        """Read all of a sharded tensor; return the same tensor for tied ones."""
        sharded = self.sharded(entry)
        first = next(sharded.locations(), None)
        stored = sharded.name if first is None else first.name
        if stored not in self._read:
            self._read[stored] = sharded.whole()
        return self._read[stored]

    def _locations(self, name: str, dimensions: int) -> Iterator[ShardLocation]:
        for rank in self.ranks:
            structure = self.structure(rank)
            stored = structure["shared"].get(name, name)  # tied tensors are stored once
            if stored in structure["shards"]:
                block = structure["shards"][stored]
                if not _is_block(block, dimensions):
                    raise CheckpointError(
                        f"{self.path}: rank-{rank}.json has an invalid offset or size for its shard of "
                        f"{name}: {described(block)}"
                    )
                yield ShardLocation(self.files[rank], stored, *block)

    def count(self, start: int = 0, step: int = 1) -> int:
        """Return the number of elements in all shards, or in every `step`-th file from `start` on."""
        elements = 0
        for rank in sorted(self.ranks)[start::step]:
            structure = self.structure(rank)
            sizes = {name: math.prod(size) for name, (_, size) in structure["shards"].items()}
            elements += sum(sizes.values()) + sum(
                sizes[first] for first in structure["shared"].values() if first in sizes
            )
        self.counted = elements
        return elements

    def adapt(self, contents: dict[str, Any], rank: int, data_ranks: Sequence[int], find: Find) -> None:
        """Change rank zero's contents to those of this rank. data_ranks: that of each rank of this run.

        With as many data-parallel ranks, this is the saved state of the rank that read the same batches.
        Otherwise the state is redistributed.
        """
        before, now = saved_data_ranks(contents), tuple(data_ranks)
        if max(before) != max(now):
            self._redistribute(contents, now[rank], before, max(now) + 1)
            return
        source = rank if before == now else before.index(now[rank])
        for name, value in self.own(source, find).items():
            _put_part(contents, name, value)

    def _redistribute(
        self, contents: dict[str, Any], rank: int, before: Sequence[int], world_size: int
    ) -> None:
        """Redistribute state over data-parallel ranks; `rank` and `world_size` count these."""
        own = [self.own(before.index(each), self.sharded) for each in range(max(before) + 1)]
        if "log" in contents:
            logs = [each.get("log", contents["log"]) for each in own]
            contents["log"] = add_logs(logs) if rank == 0 else nothing_logged(contents["log"])
        if "window" in contents:
            windows = [each.get("window", contents["window"]) for each in own]
            is_weighted = windows[0].get("by", "batches") != "batches"
            contents["window"] = sum_window(windows, world_size) if is_weighted else mean_window(windows)
        if any(_holds_metrics(each.get("metric_objects", contents.get("metric_objects"))) for each in own):
            contents["metric_objects"] = None  # only a metric itself could combine the states of its ranks
        if rank and "rng" in contents:
            contents["rng"] = own[rank].get("rng", contents["rng"]) if rank < len(own) else None

    def own(self, rank: int, find: Find) -> dict[str, Any]:
        """Return the saved state of a rank that differs from rank zero's."""
        structures = self.structure(rank)["own"] if rank in self.ranks else {}
        if not structures:
            return {}
        tensors = Stored(self.files[rank].others(self.structure(rank)["shards"]), find)
        return {name: unpack(structure, tensors) for name, structure in structures.items()}


def saved_data_ranks(contents: dict[str, Any]) -> tuple[int, ...]:
    """Return the data-parallel rank of each rank that wrote a checkpoint."""
    world_size = contents.get("world_size", 1)
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        raise CheckpointError(f"world_size={described(world_size)} is not a number of ranks.")
    found = contents.get("data_ranks")
    if found is None:  # without tensor parallelism
        return tuple(range(world_size))
    if (
        not isinstance(found, list)
        or len(found) != world_size
        or not all(type(each) is int for each in found)
        or set(found) != set(range(len(set(found))))
    ):
        raise CheckpointError(
            f"data_ranks={described(found)} does not give a data-parallel rank to each of {world_size} ranks."
        )
    return tuple(found)


def _is_block(block: Any, dimensions: int) -> bool:
    """Return whether it is an offset and a size with this number of dimensions."""
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(
            isinstance(each, list)
            and len(each) == dimensions
            and all(type(length) is int and length >= 0 for length in each)
            for each in block
        )
    )


def read_structure(path: Path) -> dict[str, Any]:
    """Read the structure of the contents from `state.json` or `rank-N.json`."""
    try:
        structure = parse_json(read_within(path, STRUCTURE_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{path.name}: {error}.") from None
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path.name} is not a JSON object.")
    return structure


def elements_wanted(structure: Any) -> int:
    """Return the number of elements of all sharded tensors in the structure of the contents."""
    return sum({entry["key"]: math.prod(entry["shape"]) for entry in _sharded_entries(structure)}.values())


def _sharded_entries(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and value.get(TAG) == "sharded":
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _sharded_entries(inner)


def _holds_metrics(saved: Any) -> bool:
    return isinstance(saved, dict) and any(saved.values())


def _put_part(contents: dict[str, Any], name: str, value: Any) -> None:
    if name.startswith(HOOK_PREFIX):
        contents["hooks"][name.removeprefix(HOOK_PREFIX)] = value
    elif name == BUFFERS_PART:
        contents["module"].update(value)
    else:
        contents[name] = value


# ---- a different world size --------------------------------------------------------------------------------


def add_logs(logs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the logs of all ranks in this epoch so far, combined into one."""
    total = logs[0]
    for log in logs[1:]:
        total["train_loss"] = _add_accumulators(total["train_loss"], log["train_loss"])
        for kind in ("means", "by_loader"):
            for name, state in log[kind].items():
                total[kind][name] = _add_accumulators(total[kind].get(name), state)
        for name, (on_step, prog_bar, epoch) in log["keys"].items():
            known = total["keys"].get(name, [on_step, prog_bar, None])
            total["keys"][name] = [known[0], known[1], _add_accumulators(known[2], epoch)]
    return total


def nothing_logged(log: dict[str, Any]) -> dict[str, Any]:
    """Return the same keys with empty values, because rank zero has the combined log."""
    return {
        **log,
        "train_loss": _empty(log["train_loss"]),
        **{
            kind: {name: _empty(state) for name, state in log[kind].items()}
            for kind in ("means", "by_loader")
        },
        "keys": {name: [on_step, bar, _empty(epoch)] for name, (on_step, bar, epoch) in log["keys"].items()},
        "pending": {},
    }


def _empty(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return state and {"reduce": state["reduce"], "total": None, "count": type(state["count"])(0)}


def _add_accumulators(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
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
    """Return an open accumulation window with the mean of the ranks' gradients, as an update would use it."""
    if not any(each.get("gradients") for each in windows):
        return windows[0]
    if len({(each.get("batches"), each.get("count")) for each in windows}) > 1:
        raise CheckpointError(
            "its ranks were at different positions in an accumulation window, which a different number of "
            "ranks cannot continue. Resume with as many ranks as before."
        )
    grads = [each["gradients"] for each in windows]
    names = dict.fromkeys(name for each in grads for name in each)
    return {**windows[0], "gradients": {name: _average([each.get(name) for each in grads]) for name in names}}


def sum_window(windows: list[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Return an open window that counts samples or tokens, for each of `world_size` ranks to continue.

    Divide the sums over the saved ranks by the new world size, so that every sample has the same weight.
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
            name: _average([each.get(name) for each in grads]) * (len(windows) / world_size) for name in names
        },
    }


def _average(values: list[Any]) -> Any:
    known = [each for each in values if each is not None]
    if isinstance(known[0], ShardedTensor):  # a sharded gradient is already the mean over the ranks
        return known[0].whole()
    return torch.stack(known).sum(0) / len(values)
