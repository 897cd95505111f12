"""Which part of the data is this rank's: one order for all ranks, dealt out in turn like cards."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import BatchSampler

from hookline.data.generators import Found, states_of
from hookline.data.sources import is_of_samples, keeps_its_ways, length_of, shards_itself
from hookline.distributed.comm import Ranks
from hookline.util.errors import OptionError

END: Any = object()


@dataclass(slots=True)
class RankBatch:
    """What this rank's newest batch is among the batches that all ranks got in the same turn."""

    is_padding: bool = False
    """There was nothing left for this rank: it repeats something, which counts for nothing, so that it can
    take part.
    """
    factor: float = 1.0
    """What a loss is multiplied by, so that the mean over ranks is the mean over the samples of all of them.
    """
    samples: int | None = None
    """Samples of all ranks in this turn; None if only the ranks themselves know."""


@dataclass(frozen=True, slots=True)
class RankSharding:
    """Whose data it is, and what for."""

    ranks: Ranks = field(default_factory=Ranks)
    trains: bool = True
    """Training drops what `drop_last` says of all ranks together; an evaluation measures the same as on one
    process.
    """
    is_sharded: bool = True
    """False: whatever comes is meant for this rank alone."""
    rank_batch: RankBatch = field(default_factory=RankBatch)
    """Where it is said what the newest batch is."""


class ShardPlan:
    """Units of one order, dealt out to all ranks: `size` to each at a time. A unit is a sample, or a whole
    batch.
    """

    def __init__(self, rank: int, world_size: int, size: int, of_samples: bool, drops_short: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.size = size
        self.of_samples = of_samples
        self.drops_short = drops_short
        """Whether a last turn that has not enough for everybody is left out."""
        self.short: dict[int, int] = {}
        """The turns that had not enough for everybody, and how many units there were."""

    @property
    def per_turn(self) -> int:
        """Units that all ranks get together in one turn."""
        return self.size * self.world_size

    def turns(self, units: int) -> int:
        """How many turns this many units make."""
        return units // self.per_turn if self.drops_short else -(-units // self.per_turn)

    def samples(self, units: Iterable[Any], turn: int) -> Iterator[list[Any]]:
        """This rank's samples, turn by turn."""
        rank, world_size, remaining = self.rank, self.world_size, iter(units)
        while group := list(itertools.islice(remaining, self.per_turn)):
            if len(group) < self.per_turn:
                if self.drops_short:
                    return
                self.short[turn] = len(group)
            yield group[rank::world_size] or [group[rank % len(group)]]
            turn += 1

    def batches(self, units: Iterable[Any], turn: int) -> Iterator[Any]:
        """This rank's batches; the others' are read and let go."""
        remaining, count, mine = iter(units), 0, END
        while (unit := next(remaining, END)) is not END:
            if count == self.rank or (
                count < self.rank and mine is END
            ):  # the first one, until its own comes
                mine = unit
            count += 1
            if count == self.world_size:
                yield mine
                turn, count, mine = turn + 1, 0, END
        if count and not self.drops_short:
            self.short[turn] = count
            yield mine

    def describe(self, turn: int, into: RankBatch) -> None:
        """Say what this rank's batch of a turn is among those of all ranks."""
        units = self.short.get(turn)
        if units is None:
            into.is_padding, into.factor, units = False, 1.0, self.per_turn
        else:
            mine = len(range(self.rank, units, self.world_size))
            into.is_padding, into.factor = mine == 0, mine * self.world_size / units
        into.samples = units if self.of_samples else None


def shard_plan_for(source: Any, sharding: RankSharding) -> ShardPlan:
    """How a source is dealt out: by samples where its batches are made of them here, else batch by batch."""
    ranks = sharding.ranks
    rank, world_size = (0, 1) if is_apart(source, sharding) else (ranks.rank, ranks.world_size)
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
    """Whether each rank has a source of its own, whose batches are all meant for it."""
    return sharding.ranks.alone or not sharding.is_sharded or shards_itself(source)


def units_of(source: Any, shard_plan: ShardPlan, trains: bool) -> int | None:
    """How many there are to be dealt out in a pass, if that is known."""
    if not shard_plan.of_samples:
        return length_of(source)
    batch_sampler: BatchSampler = source.batch_sampler
    samples = length_of(batch_sampler.sampler)
    if samples is None or trains or not batch_sampler.drop_last:
        return samples
    return samples - samples % batch_sampler.batch_size


def rank_batches(source: Any, shard_plan: ShardPlan, trains: bool) -> int | None:
    """Batches that this rank gets in a pass, if that is known."""
    if shard_plan.world_size == 1 or not (shard_plan.of_samples and keeps_its_ways(source)):
        length = length_of(source)
        return None if length is None else shard_plan.turns(length * shard_plan.size)
    units = units_of(source, shard_plan, trains)
    return None if units is None else shard_plan.turns(units)


class ShardedSampler:
    """This rank's part of what a sampler yields, as lists of indices or whatever the sampler makes of a
    batch.
    """

    def __init__(self, sampler: Any, shard_plan: ShardPlan, trains: bool) -> None:
        self.shard_plan = shard_plan
        self.units: Any = sampler
        if shard_plan.of_samples:  # an evaluation drops what the batch sampler would drop on one process
            self.units = sampler.sampler if trains else Flat(sampler)

    def begin(self, turn: int, passed_over: int) -> Iterator[Any]:
        """From this turn on. The units before it are drawn, also if nothing comes after them: generators move
        by that.
        """
        units = iter(self.units)
        deque(itertools.islice(units, passed_over), maxlen=0)
        return (
            self.shard_plan.samples(units, turn)
            if self.shard_plan.of_samples
            else self.shard_plan.batches(units, turn)
        )


class Flat:
    """The samples of batches."""

    def __init__(self, batches: Iterable[Iterable[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.batches)


@dataclass(frozen=True, slots=True)
class OwnSource:
    """What `in_step` needs of a source that is this rank's own."""

    name: str
    before_reading: Callable[[], None]
    """Called before each batch is read."""
    any_batch: Callable[[], Any]
    """A batch to repeat, for a rank that has none left from the start."""


def in_step(batches: Iterator[Any], source: OwnSource, ranks: Ranks, turn: RankBatch) -> Iterator[Any]:
    """Batches of a source of this rank's own, as many as the rank with the most has; those that are missing
    are padding batches.

    Whether anybody has another one is asked before a batch is worked on and read afterwards, so nobody waits
    for the answer.
    """
    source.before_reading()
    newest = coming = next(batches, END)
    having = ranks.total([coming is not END])
    while count := having.read()[0]:
        turn.is_padding = coming is END
        turn.factor, turn.samples = (0.0 if turn.is_padding else ranks.world_size / count), None
        if not turn.is_padding:
            newest = coming
            source.before_reading()
            coming = next(batches, END)
        elif newest is END and (newest := source.any_batch()) is END:
            raise OptionError(
                f"The loader {source.name!r} of rank {ranks.rank} is empty, and those of others are not. "
                "Every rank needs one batch at least."
            )
        having = ranks.total([coming is not END])
        yield newest


# ---- What ranks must have in common before they share a source of batches


def agree_on(
    ranks: Ranks, name: str, source: Any, generators: Found, length: int | None, apart: bool
) -> list[int | None]:
    """The lengths of all ranks; an error if they share a source and do not have the same. Waits for all."""
    told = ranks.gather([length, type(source).__name__, apart, _digest(generators)])
    mine = told[ranks.rank]
    lengths = [each[0] for each in told]
    if any(each[2] != mine[2] for each in told):
        raise OptionError(
            f"The loader {name!r} shards itself on some ranks only: {_by_rank([each[2] for each in told])}."
        )
    if apart:
        return lengths
    shared = f"The loader {name!r} is shared by all ranks"
    hint = "A loader whose ranks have data of their own says so: loader.shards_itself = True."
    if len(set(lengths)) > 1:
        raise OptionError(
            f"{shared}, but each would get another number of batches from it: {_by_rank(lengths)}. {hint}"
        )
    if len({each[3] for each in told}) > 1:
        raise OptionError(
            f"{shared}, but its random generators ({', '.join(generators)}) stand differently on them, so "
            f"they would not agree on the order. Seed them alike on every rank. {hint}"
        )
    return lengths


def _digest(generators: Found) -> str:
    if not generators:
        return ""
    return hashlib.blake2b(
        repr([_plain(each) for each in states_of(generators).values()]).encode(), digest_size=8
    ).hexdigest()


def _plain(state: Any) -> Any:
    """Something whose text shows all of it; that of a tensor or an array is cut short."""
    if hasattr(state, "tolist"):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(each) for key, each in state.items()}
    return [_plain(each) for each in state] if isinstance(state, list | tuple) else state


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
