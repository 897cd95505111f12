"""Rank sharding: all ranks use one order of samples or batches, and each reads its part of it."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, IterableDataset, Subset, TensorDataset

from hookline.data.exclusions import Cut, without
from hookline.data.fingerprint import difference, fingerprint
from hookline.data.libraries import rank_conflict
from hookline.data.seeding import Generators, states_of
from hookline.data.sources import batch_size_of, is_of_samples, keeps_its_ways, length_of, shards_itself
from hookline.distributed.comm import Ranks
from hookline.util.errors import OptionError

log = logging.getLogger("hookline")
END: Any = object()


@dataclass(slots=True)
class RankBatch:
    """This rank's newest batch, in relation to the batches that the other ranks read at the same time."""

    is_padding: bool = False
    """Whether the rank is out of data and repeats a batch so that collectives match."""
    factor: float = 1.0
    """The weight of the loss that makes the mean over the ranks the mean over the samples of all ranks."""
    samples: int | None = None
    """The samples in the batches of all ranks; None if they must be counted."""


@dataclass(frozen=True, slots=True)
class RankSharding:
    """How a loader is shared by the ranks: which ranks read it, and for training or evaluation."""

    ranks: Ranks = field(default_factory=Ranks)
    trains: bool = True
    """Training applies `drop_last` to the batches of all ranks together; an evaluation uses the same samples
    as on one process.
    """
    is_sharded: bool = True
    """False: all batches of the loader are for this rank."""
    rank_batch: RankBatch = field(default_factory=RankBatch)
    """Updated before each batch."""


class ShardPlan:
    """A division of one order over the ranks. A unit is a sample or a whole batch.

    In each turn, every rank gets `size` units, which make one batch.
    """

    def __init__(self, rank: int, world_size: int, size: int, of_samples: bool, drops_short: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.size = size
        self.of_samples = of_samples
        self.drops_short = drops_short
        """Whether to drop a last turn that does not have enough units for all ranks."""
        self.short: dict[int, int] = {}
        """The turns without enough units for all ranks, with their number of units."""

    @property
    def per_turn(self) -> int:
        """Return the number of units in one turn of all ranks."""
        return self.size * self.world_size

    def turns(self, units: int) -> int:
        """Return the number of turns in this many units."""
        return units // self.per_turn if self.drops_short else -(-units // self.per_turn)

    def samples(self, units: Iterable[Any], turn: int) -> Iterator[list[Any]]:
        """Yield this rank's samples of each turn."""
        rank, world_size, remaining = self.rank, self.world_size, iter(units)
        while group := list(itertools.islice(remaining, self.per_turn)):
            if len(group) < self.per_turn:
                if self.drops_short:
                    return
                self.short[turn] = len(group)
            yield group[rank::world_size] or [group[rank % len(group)]]
            turn += 1

    def batches(self, units: Iterable[Any], turn: int) -> Iterator[Any]:
        """Yield this rank's batches; read and discard those of the other ranks."""
        remaining, count, mine = iter(units), 0, END
        while (unit := next(remaining, END)) is not END:
            # the first batch of the turn is the padding batch if this rank gets none
            if count == self.rank or (count < self.rank and mine is END):
                mine = unit
            count += 1
            if count == self.world_size:
                yield mine
                turn, count, mine = turn + 1, 0, END
        if count and not self.drops_short:
            self.short[turn] = count
            yield mine

    def describe(self, turn: int, into: RankBatch) -> None:
        """Write the weight, samples and padding flag of this rank's batch in a turn."""
        units = self.short.get(turn)
        if units is None:
            into.is_padding, into.factor, units = False, 1.0, self.per_turn
        else:
            mine = len(range(self.rank, units, self.world_size))
            into.is_padding, into.factor = mine == 0, mine * self.world_size / units
        into.samples = units if self.of_samples else None


def shard_plan_for(source: Any, sharding: RankSharding) -> ShardPlan:
    """Return a plan that divides a source by samples if its batches are built here, else by batches."""
    ranks = sharding.ranks
    rank, world_size = (0, 1) if is_apart(source, sharding) else (ranks.data_rank, ranks.data_size)
    if is_of_samples(source):
        batch_sampler = source.batch_sampler
        return ShardPlan(
            rank, world_size, batch_sampler.batch_size, True, sharding.trains and batch_sampler.drop_last
        )
    return ShardPlan(
        rank,
        world_size,
        1,
        False,
        world_size > 1 and sharding.trains and getattr(source, "drop_last", False) is True,
    )


def is_apart(source: Any, sharding: RankSharding) -> bool:
    """Return whether each rank has its own source and reads all of its batches."""
    return sharding.ranks.alone or not sharding.is_sharded or shards_itself(source)


def units_of(source: Any, shard_plan: ShardPlan, trains: bool) -> int | None:
    """Return the number of units in a pass, if it is known."""
    if not shard_plan.of_samples:
        return length_of(source)
    batch_sampler: BatchSampler = source.batch_sampler
    samples = length_of(batch_sampler.sampler)
    if samples is None or trains or not batch_sampler.drop_last:
        return samples
    return samples - samples % batch_sampler.batch_size


def rank_batches(source: Any, shard_plan: ShardPlan, trains: bool) -> int | None:
    """Return the number of batches of this rank in a pass, if it is known."""
    if shard_plan.world_size == 1 or not (shard_plan.of_samples and keeps_its_ways(source)):
        length = length_of(source)
        return None if length is None else shard_plan.turns(length * shard_plan.size)
    units = units_of(source, shard_plan, trains)
    return None if units is None else shard_plan.turns(units)


class ShardedSampler:
    """This rank's part of a sampler's indices, batch by batch."""

    def __init__(self, sampler: Any, shard_plan: ShardPlan, trains: bool) -> None:
        self.shard_plan = shard_plan
        self.units: Any = sampler
        if (
            shard_plan.of_samples
        ):  # an evaluation drops the samples that the batch sampler drops on one process
            self.units = sampler.sampler if trains else FlatBatches(sampler)

    def begin(self, turn: int, passed_over: int, cuts: Sequence[Cut] = ()) -> Iterator[Any]:
        """Yield from this turn on. Draw the units before it, because that advances the generators.

        cuts: the samples to leave out.
        """
        units = without(self.units, cuts) if cuts else iter(self.units)
        deque(itertools.islice(units, passed_over), maxlen=0)
        return (
            self.shard_plan.samples(units, turn)
            if self.shard_plan.of_samples
            else self.shard_plan.batches(units, turn)
        )


class FlatBatches:
    """An iterable over the samples of batches."""

    def __init__(self, batches: Iterable[Iterable[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.batches)


@dataclass(frozen=True, slots=True)
class OwnSource:
    """The access of `padded_batches` to a source that only this rank reads."""

    name: str
    before_reading: Callable[[], None]
    """Called before each batch is read."""
    any_batch: Callable[[], Any]
    """Returns a batch to repeat if the rank has no batch from the start."""


def padded_batches(batches: Iterator[Any], source: OwnSource, ranks: Ranks, turn: RankBatch) -> Iterator[Any]:
    """Yield the batches of this rank's own source, and padding batches until all ranks are out of data.

    The ranks count who has a next batch before they work on the current one, and read the result after it,
    so that no rank waits for it.
    """
    source.before_reading()
    newest = coming = next(batches, END)
    ranks_with_data = ranks.total([coming is not END])
    while count := ranks_with_data.read()[0]:
        turn.is_padding = coming is END
        turn.factor, turn.samples = (0.0 if turn.is_padding else ranks.world_size / count), None
        if not turn.is_padding:
            newest = coming
            source.before_reading()
            coming = next(batches, END)
        elif newest is END and (newest := source.any_batch()) is END:
            raise OptionError(
                f"The loader {source.name!r} is empty on rank {ranks.rank}, but not on other ranks. "
                "Every rank needs at least one batch."
            )
        ranks_with_data = ranks.total([coming is not END])
        yield newest


# ---- checks that the ranks have the same source ------------------------------------------------------------


def compare_sources(
    ranks: Ranks,
    name: str,
    source: Any,
    generators: Generators,
    length: int | None,
    apart: bool,
    excluded: list[int],
) -> list[int | None]:
    """Return the lengths on all ranks. Raise if a shared source differs. Waits for all ranks."""
    dataset = getattr(source, "dataset", None)
    mine = {
        "conflict": rank_conflict(source, ranks.data_rank, ranks.data_size),
        "apart": apart,
        "its batch_size": batch_size_of(source),
        "its number of batches": length,
        "the length of its dataset": None if isinstance(dataset, IterableDataset) else length_of(dataset),
        "generators": _digest(generators),
        "excluded": excluded,
        "content": fingerprint(_content(dataset)),
    }
    of_all = ranks.gather(mine)
    by_rank = {key: [each[key] for each in of_all] for key in mine}
    if conflicts := list(filter(None, by_rank["conflict"])):
        raise OptionError(f"The loader {name!r} cannot be read on {ranks.world_size} ranks: {conflicts[0]}")
    if _differ(by_rank["apart"]):
        raise OptionError(
            f"The loader {name!r} shards itself only on some ranks: {_list_by_rank(by_rank['apart'])}."
        )
    lengths = by_rank["its number of batches"]
    if apart:
        _refuse_differing_lengths(ranks, name, lengths)
    else:
        # a list cannot have the attribute
        own_data = " If each rank has its own data, set loader.shards_itself = True."
        hint = own_data if hasattr(source, "__dict__") else ""
        _compare_shared(f"The loader {name!r} is shared by all ranks", by_rank, generators, hint, ranks.rank)
    return lengths


def _compare_shared(
    shared: str, by_rank: dict[str, list[Any]], generators: Generators, hint: str, rank: int
) -> None:
    """Raise if a shared source differs between ranks. shared: the beginning of the message; hint: its end."""
    if None in by_rank["its batch_size"]:  # unknown on some rank
        by_rank = by_rank | {"its batch_size": []}
    for what in ("its batch_size", "its number of batches", "the length of its dataset"):
        if _differ(by_rank[what]):
            raise OptionError(
                f"{shared}, but {what} differs: {_list_by_rank(by_rank[what])}. Make it the same on every "
                f"rank.{hint}"
            )
    if _differ(by_rank["generators"]):
        raise OptionError(
            f"{shared}, but its random generators ({', '.join(generators)}) have different states, so the "
            f"order would differ. Seed them with the same value on every rank.{hint}"
        )
    if _differ(by_rank["excluded"]):
        counts = _list_by_rank(list(map(len, by_rank["excluded"])))
        raise OptionError(
            f"{shared}, but the samples to exclude differ ({counts}). Pass the same list on every rank."
        )
    if rank == 0 and any(difference(by_rank["content"][0], each) for each in by_rank["content"]):
        log.warning(
            "%s, but its dataset differs. If split_dataset_by_node, shard or a Subset for each rank made it, "
            "each rank trains on a part of its part: leave that out, because Hookline gives each rank its "
            "samples. If random_split made it, pass it generator=torch.Generator().manual_seed(0) on every "
            "rank.%s",
            shared,
            hint,
        )


def _content(dataset: Any) -> Any:
    """Return what tells datasets of equal length apart, as far as it is known without reading a sample."""
    if isinstance(dataset, Subset):
        return [np.asarray(dataset.indices), _content(dataset.dataset)]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    return getattr(dataset, "_fingerprint", None)  # of a Hugging Face dataset


def _differ(values: list[Any]) -> bool:
    return any(each != values[0] for each in values)


SAME_BATCHES = (
    "The ranks of a tensor-parallel group compute one model together, so they must read the same batches. A "
    "loader that shards itself must use trainer.strategy.ranks.data_rank and data_size, not the rank and the "
    "world size."
)


def _refuse_differing_lengths(ranks: Ranks, name: str, lengths: list[int | None]) -> None:
    """Raise if ranks that must read the same batches have different numbers of them."""
    of_readers = [lengths[ranks.data_ranks.index(each)] for each in ranks.data_ranks]
    if lengths != of_readers:
        raise OptionError(
            f"The number of batches of the loader {name!r} differs within a tensor-parallel group: "
            f"{_list_by_rank(lengths)}. {SAME_BATCHES}"
        )


def compared_batches(batches: Iterator[Any], ranks: Ranks, name: str) -> Iterator[Any]:
    """Yield the batches. Raise on all ranks if ranks that must read the same ones differ in the first."""
    for number, batch in enumerate(batches):
        if number == 0:
            of_all = ranks.gather(fingerprint(batch))
            for rank, found in enumerate(of_all):
                first = ranks.data_ranks.index(ranks.data_ranks[rank])
                if differs := difference(of_all[first], found):
                    raise OptionError(
                        f"The first batch of the loader {name!r} differs between rank {first} and rank "
                        f"{rank} of one tensor-parallel group: {differs}. {SAME_BATCHES}"
                    )
        yield batch


def _digest(generators: Generators) -> str:
    if not generators:
        return ""
    return hashlib.blake2b(
        repr([_state_to_lists(each) for each in states_of(generators).values()]).encode(), digest_size=8
    ).hexdigest()


def _state_to_lists(state: Any) -> Any:
    """Return a state as plain lists, because the repr of a tensor or an array is shortened."""
    if hasattr(state, "tolist"):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _state_to_lists(each) for key, each in state.items()}
    return [_state_to_lists(each) for each in state] if isinstance(state, list | tuple) else state


def _list_by_rank(values: list[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
