"""Loaders: names, lengths, limits, and where in them a run is."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hookline.data.generators import put_back, states_of
from hookline.data.prefetch import ahead
from hookline.data.readers import ListReader, Reader, Saved, reader_for
from hookline.data.seeding import key_of
from hookline.data.sharding import (
    OwnSource,
    RankSharding,
    ShardPlan,
    agree_on,
    in_step,
    is_apart,
    rank_batches,
    shard_plan_for,
    units_of,
)
from hookline.data.sources import as_saved_now, changes, facts_of, length_of
from hookline.util.errors import OptionError

log = logging.getLogger("hookline")

EVALUATION = 0
"""The seed of every evaluation: what is measured does not change with the training's."""


@dataclass(slots=True)
class Loader:
    """One source of batches with its name and how much of it is used.

    What a pass yields follows from the seed, the epoch and the position: it can begin at any batch, in
    another process too.
    """

    name: str
    source: Iterable[Any]
    length: int | None
    """Batches of this rank in the present pass, after the limit; None if the source cannot tell."""
    ahead: int = 0
    """Batches that a thread fetches in advance, where that changes nothing of what is trained."""
    move: Callable[[Any], Any] | None = None
    """What it does to them: the way to the device."""
    sharding: RankSharding = field(default_factory=RankSharding)
    """Whose batches they are."""
    seed: int | None = field(default=None, init=False)
    """What the order comes from; known when the first pass is opened, and kept in checkpoints."""
    shard_plan: ShardPlan = field(init=False, repr=False)
    _whole: int | None = field(init=False, repr=False)
    """Batches of this rank in a pass that began at its beginning."""
    _in_step: bool = field(default=False, init=False, repr=False)
    """Whether each rank has a source of its own, and they do not end together."""
    _is_agreed: bool = field(default=False, init=False, repr=False)
    _began: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    """Where the present pass was begun in this process: this rank's batches, and the units of all ranks,
    before it.
    """
    _reader: Reader | None = field(default=None, init=False, repr=False)
    _epoch: int = field(default=-1, init=False, repr=False)
    _fetching: Generator[Any, None, None] | None = field(default=None, init=False, repr=False)
    _restored: Saved | None = field(default=None, init=False, repr=False)
    is_as_saved: bool = field(default=True, init=False)
    """Whether it makes the same batches as the loader that the checkpoint was made with."""
    _before_newest: Saved | None = field(default=None, init=False, repr=False)
    """Its state before the batch that was read to see whether there is one."""

    def __post_init__(self) -> None:
        self._whole = self.length
        self.shard_plan = shard_plan_for(self.source, self.sharding)

    @property
    def is_exact(self) -> bool:
        """Whether the length is certain: a stream has none, and an iterable dataset may only have estimated
        it.
        """
        return length_of(self.source) is not None and not isinstance(
            getattr(self.source, "dataset", None), IterableDataset
        )

    @property
    def reader(self) -> Reader:
        """How this source is read; found out when it is first needed."""
        if self._reader is None:
            self._reader = reader_for(
                self.source, self.shard_plan, self.sharding.trains, self.sharding.ranks.world_size
            )
        return self._reader

    def agree(self) -> None:
        """See that all ranks have the same source, or one of their own each, before anything is read from it.
        Waits for all.
        """
        if self._is_agreed or self.sharding.ranks.alone:
            return
        self._is_agreed = True
        apart = is_apart(self.source, self.sharding)
        lengths = agree_on(
            self.sharding.ranks, self.name, self.source, self.reader.generators, self.length, apart
        )
        if apart:
            known = [each for each in lengths if each is not None]
            self._in_step = len(known) < len(lengths) or len(set(known)) > 1 or not self.is_exact
            self.length = self._whole = max(known) if len(known) == len(lengths) else None

    def open(self, epoch: int, position: int = 0, seed: int | None = None) -> Iterator[Any]:
        """An epoch's batches from the position on. The random streams of the main process are not moved by
        it.

        Without a seed one is drawn from torch's stream, once for all epochs. The one in a checkpoint goes
        before any other.
        """
        self.agree()
        reader = self.reader
        tell_epoch(self.source, epoch)
        if self.seed is None and not isinstance(reader, ListReader):
            drawn = int(torch.randint(2**62, ()).item()) if seed is None else seed
            self.seed = self.sharding.ranks.from_zero(drawn)
        saved, self._restored, self._epoch, self._before_newest = self._restored, None, epoch, None
        self._begin(position, saved)
        natural = rank_batches(self.source, self.shard_plan, self.sharding.trains)
        limit = None if self.length == natural or self._whole == natural else self.length
        batches = reader.open(
            key_of(self.seed or 0, epoch, self.name), position, self._began[1], limit, saved
        )
        if self.shard_plan.world_size > 1 and not reader.is_sharded:
            self.shard_plan.short.clear()
            batches = self.shard_plan.batches(batches, position)
        if self.length is not None and not reader.caps:
            batches = itertools.islice(batches, max(0, self.length - position))
        if self.ahead and reader.may_run_ahead:
            self._fetching = batches = ahead(batches, self.ahead, self.move)
        return batches if self.sharding.ranks.alone else self._in_turns(batches, position)

    def _begin(self, position: int, saved: Saved | None) -> None:
        """Where the pass begins, in units of all ranks: another number of ranks, or other batches, go on with
        the next one.
        """
        passed_over = position * self.shard_plan.per_turn
        if saved is not None and saved["in_pass"] and saved["of_samples"] == self.shard_plan.of_samples:
            per_batch = (saved["facts"]["batch_size"] or 1) if self.shard_plan.of_samples else 1
            passed_over = position * per_batch if saved["passed_over"] is None else saved["passed_over"]
        self._began, self.length = (position, passed_over), self._whole
        units = units_of(self.source, self.shard_plan, self.sharding.trains)
        if (
            passed_over != position * self.shard_plan.per_turn
            and units is not None
            and self._whole is not None
        ):
            rest = position + self.shard_plan.turns(max(0, units - passed_over))
            is_limited = self._whole != rank_batches(self.source, self.shard_plan, self.sharding.trains)
            self.length = min(rest, self._whole) if is_limited else rest

    def _in_turns(self, batches: Iterator[Any], position: int) -> Iterator[Any]:
        """The same batches; before each one it is said what it is among those of all ranks."""
        turn, shard_plan = self.sharding.rank_batch, self.shard_plan
        if self._in_step:
            keep = (
                functools.partial(self._keep_state, itertools.count(position))
                if self.reader.moves_on
                else _nothing
            )
            source = OwnSource(
                self.name, keep, lambda: self.reader.any_batch(key_of(self.seed or 0, self.name))
            )
            yield from in_step(batches, source, self.sharding.ranks, turn)
        elif shard_plan.world_size == 1:
            turn.is_padding, turn.factor, turn.samples = False, 1.0, None
            yield from batches
        else:
            for number, batch in enumerate(batches, position):
                shard_plan.describe(number, turn)
                yield batch

    def _keep_state(self, positions: Iterator[int]) -> None:
        self._before_newest = self.reader.state(True, next(positions))

    def batches(self, epoch: int = 0) -> Iterator[Any]:
        """A pass for an evaluation: always in the same order, and generators of the loader's own are left as
        they were.
        """
        return self._undone(epoch) if self.reader.generators else self.open(epoch, 0, EVALUATION)

    def _undone(self, epoch: int) -> Iterator[Any]:
        before = states_of(self.reader.generators)
        try:
            yield from self.open(epoch, 0, EVALUATION)
        finally:
            put_back(self.reader.generators, before)

    def close(self) -> None:
        """End the threads and workers that are still there."""
        if self._fetching is not None:
            self._fetching.close()
        if self._reader is not None:
            self._reader.close()

    def state_dict(self, epoch: int, position: int) -> Saved:
        """What another process needs to go on with this batch of this epoch, as plain data and tensors."""
        if self._restored is not None:
            return self._restored  # nothing was read since
        in_pass = self._epoch == epoch
        first, passed_over = self._began
        passed_over += (position - first) * self.shard_plan.per_turn
        own = self.reader.state(in_pass, position) if self._before_newest is None else self._before_newest
        own = self.reader.checked(own, position) if in_pass else own
        return {
            "seed": self.seed,
            "kind": self.reader.kind,
            "in_pass": in_pass,
            "facts": self._facts(),
            "of_samples": self.shard_plan.of_samples,
            "passed_over": passed_over if in_pass else 0,
            **own,
        }

    def is_cut_otherwise(self, saved: Saved) -> bool:
        """Whether other batches are made of the same data than when this was saved."""
        now = self._facts()
        was = as_saved_now(saved, now, self.shard_plan.of_samples)["facts"]
        return any(was[name] != now[name] for name in ("batch_size", "world_size"))

    def left_of(self, saved: Saved) -> int | None:
        """Batches that this rank has left of the pass in which this was saved."""
        units = units_of(self.source, self.shard_plan, self.sharding.trains)
        if (
            units is None
            or saved.get("of_samples") != self.shard_plan.of_samples
            or saved["passed_over"] is None
        ):
            return None
        return self.shard_plan.turns(max(0, units - saved["passed_over"]))

    def _facts(self) -> dict[str, int | None]:
        apart = is_apart(self.source, self.sharding)
        units = units_of(self.source, self.shard_plan, self.sharding.trains)
        return facts_of(self.source, self._whole, units, self.sharding.ranks.world_size, apart)

    def load_state_dict(self, saved: Saved) -> None:
        """The next pass that is opened begins where this was saved. What has changed since is said."""
        self.seed = saved["seed"]
        saved = as_saved_now(saved, self._facts(), self.shard_plan.of_samples)
        self.is_as_saved = saved["kind"] == self.reader.kind and saved["facts"] == self._facts()
        for change in changes(saved, self.reader.kind, self._facts()):
            log.warning("The %s loader %s", self.name, change)
        if saved["kind"] == self.reader.kind:
            self._restored = saved


def _nothing() -> None:
    """What need not be kept."""


def tell_epoch(source: Any, epoch: int) -> None:
    """Samplers and datasets that shuffle by the epoch are told which one it is."""
    batch_sampler = getattr(source, "batch_sampler", None)
    owners: tuple[Any, ...] = (
        getattr(source, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(source, "dataset", None),
    )
    for owner in {id(each): each for each in owners}.values():
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def make_loaders(
    given: Any, limit: int | float, kind: str, sharding: RankSharding | None = None
) -> list[Loader]:
    """Named loaders from what the user passed: one, a list, or a dictionary of names."""
    sharding = sharding or RankSharding()
    if given is None:
        return []
    if isinstance(given, Mapping):
        named = {str(name): source for name, source in given.items()}
        if len(named) < len(given):
            raise OptionError(
                f"Two {kind} loaders have the same name as text: {', '.join(map(repr, given))}."
            )
    elif isinstance(given, list | tuple) and len(given) == 1 and _is_loader(given[0]):
        named = {kind: given[0]}
    elif isinstance(given, list | tuple) and given and all(_is_loader(each) for each in given):
        named = {f"dl{index}": source for index, source in enumerate(given)}
    else:
        named = {kind: given}
    for name, source in named.items():
        if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            raise OptionError(
                f"The {kind} loader {name!r} is a dataset ({type(source).__name__}), which yields single "
                "samples. Pass torch.utils.data.DataLoader(dataset, batch_size=...)."
            )
        if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            raise OptionError(
                f"The {kind} loader {name!r} is a {type(source).__name__}, which cannot be iterated over. "
                "Pass a DataLoader or any iterable of batches."
            )
    lengths = {
        name: rank_batches(source, shard_plan_for(source, sharding), sharding.trains)
        for name, source in named.items()
    }
    return [
        Loader(name, source, limited(lengths[name], limit, kind), sharding=sharding)
        for name, source in named.items()
    ]


def _is_loader(value: Any) -> bool:
    """A list of loaders, not a list of batches: its members yield batches and are no arrays."""
    if hasattr(value, "shape") or isinstance(value, list | tuple | Mapping | str | bytes):
        return False
    return hasattr(value, "__iter__")


def limited(length: int | None, limit: int | float, kind: str) -> int | None:
    """Apply `limit_*_batches`: a whole number of batches or a fraction of them."""
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if limit == 1.0 or limit == 0.0:
        return length if limit else 0
    if length is None:
        raise OptionError(
            f"limit_{kind}_batches={limit}: a fraction needs a loader with a length; pass a whole number."
        )
    if length and not int(length * limit):
        raise OptionError(
            f"limit_{kind}_batches={limit} of {length} batches is none; pass more, or 0 if you mean none."
        )
    return int(length * limit)
