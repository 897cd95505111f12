"""Readers of a source of batches from a position on: by index, by its own state, by reading it again, or as
a list.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hookline.data.exclusions import Cut
from hookline.data.fetch import ArrowRows, direct_batches, reads_directly, rows_of
from hookline.data.fingerprint import StateCheck
from hookline.data.libraries import (
    is_litdata,
    is_stateful_loader,
    omits_buffer,
    pipeline_generators,
    takes_sample_count,
)
from hookline.data.order import IndexOrder
from hookline.data.rng_exchange import OwnStream
from hookline.data.seeding import Generators, find_generators, put_back, states_of, with_generator
from hookline.data.sharding import END, ShardPlan
from hookline.data.sources import has_state, is_indexed
from hookline.data.workers import KeyedDataset, WorkerStart, end_workers, starting_workers

log = logging.getLogger("hookline")

LoaderState = dict[str, Any]


class Reader:
    """A way to read a source. `saved` is a result of `state`, of the pass that is opened if `in_pass`."""

    kind = ""
    how = ""
    """The text that `describe` returns."""
    caps = False
    """Whether it ends a pass at the limit itself."""
    is_sharded = False
    """Whether it reads only this rank's batches, not those of all ranks."""
    may_run_ahead = False
    """Whether a thread may prefetch its batches, because they do not use the process's random streams."""
    state_is_current = False
    """Whether its state is the source's current one, which includes prefetched batches."""

    def __init__(self) -> None:
        self.generators: Generators = {}
        """The generators that determine the batches of a pass."""
        self.begins: dict[str, Any] = {}

    def describe(self) -> str:
        """Return how it reads, in words."""
        return self.how

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Return a pass from a position on. passed_over: samples or batches of all ranks before it."""
        raise NotImplementedError

    def state(self, in_pass: bool, position: int) -> LoaderState:
        """Return the state for `open` to continue at the position, or without a pass, to start the next."""
        return {"generators": self.begins if in_pass else states_of(self.generators)}

    def checked(self, saved: LoaderState, position: int) -> LoaderState:
        """Mark a result of `state` that does not determine the position in the current pass."""
        return saved

    def keep_indices(self, keeps: bool) -> None:
        """Keep the indices of the next pass for `indices_of`, if the reader knows them."""

    def indices_of(self, batch: int) -> Any:
        """Return what the sampler returned for a batch of this pass; None if it is not known."""
        return None

    def pass_generators(self) -> dict[str, Any]:
        """Return the states of the generators at the start of the order of this pass, if it is by index."""
        return {}

    def pass_first(self) -> tuple[int, Any] | None:
        """Return the number and the indices of the first batch of this pass, if it is by index."""
        return None

    def leave_out(self, cuts: list[Cut]) -> None:
        """Leave these samples out of the next pass; only a reader by index can."""

    def any_batch(self, key: int) -> Any:
        """Return the first batch of another pass, for a rank without a batch in its pass."""
        return next(self.open(key, 0, 0, None, None), END)

    def close(self) -> None:
        """End the workers."""

    def _begin(self, saved: LoaderState | None) -> None:
        if saved is not None:
            put_back(self.generators, saved["generators"])
        self.begins = states_of(self.generators)


class ListReader(Reader):
    """A reader of a list of batches."""

    kind = "list"
    how = "as a list: its batches are used as they are"
    may_run_ahead = True

    def __init__(self, source: Iterable[Any]) -> None:
        super().__init__()
        self.source = source

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Return the batches from the position on."""
        return itertools.islice(self.source, passed_over, None)


class IndexReader(Reader):
    """A reader of a DataLoader over a map-style dataset: draws the order again without reading samples."""

    kind = "indices"

    is_sharded = True

    def __init__(self, loader: DataLoader[Any], shard_plan: ShardPlan, trains: bool) -> None:
        super().__init__()
        self.loader = loader
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        inner = getattr(loader.batch_sampler, "sampler", None)
        self.generators = find_generators(
            loader=loader, sampler=loader.sampler, batch_sampler=loader.batch_sampler, inner=inner
        )
        in_main = loader.num_workers == 0
        owners = (
            {"dataset": loader.dataset, "collate_fn": with_generator(loader.collate_fn)} if in_main else {}
        )
        self.current = find_generators(**owners)
        self.stateful: Any = loader.dataset if in_main and has_state(loader.dataset) else None
        self.state_is_current = bool(self.current) or self.stateful is not None
        ahead = 0 if in_main else loader.num_workers * (loader.prefetch_factor or 1)
        self.order = IndexOrder(sampler, self.generators, ahead, shard_plan, trains)
        self.caps = type(loader).__iter__ is DataLoader.__iter__
        self.copy = PrivateCopy(loader, self.order)
        # persistent workers have one iterator for all passes, which the thread of the last pass may still use
        is_reused = in_main or loader.persistent_workers
        self.may_run_ahead = (
            not is_reused and self.caps and self.order.draws_once and self.order.stateful is None
        )

    def describe(self) -> str:
        """Return how it reads the loader now; this may change with its dataset."""
        loader = self.loader
        if loader.num_workers:
            return f"by index, with torch's iterator and {loader.num_workers} workers"
        if not reads_directly(loader):
            return "by index, with the loader's own iterator"
        rows = rows_of(loader)
        if rows is None:
            return "by index: torch's fetcher is called directly"
        if isinstance(rows, ArrowRows):
            return "by batches, as the dataset reads them"
        return "in memory: one indexing operation for each tensor"

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Draw and skip the indices before the position."""
        by_reading = saved is not None and saved["in_pass"] and not saved["by_index"]
        first = (0, 0) if by_reading else (position, passed_over)
        self.order.begin(key, *first, limit if self.caps else None)
        if saved is not None:
            self._restore(saved, by_reading)
        with OwnStream(key):
            batches = self.copy.begin(key)
        return read_again(batches, position) if by_reading else batches

    def close(self) -> None:
        """End the workers."""
        self.copy.close()

    @property
    def in_order(self) -> bool:
        """Return whether the batches come in the order of the sampler."""
        return self.loader.num_workers == 0 or self.loader.in_order

    def keep_indices(self, keeps: bool) -> None:
        """Keep the indices, unless a user's __iter__ or the workers may return the batches otherwise."""
        self.order.kept = {} if keeps and self.caps and self.in_order else None

    def pass_generators(self) -> dict[str, Any]:
        """Return the states of the generators at the start of the order of this pass."""
        return self.order.begins or {}

    def pass_first(self) -> tuple[int, Any] | None:
        """Return the number and the indices of the first batch of this pass."""
        return self.order.first

    def leave_out(self, cuts: list[Cut]) -> None:
        """Leave these samples out of the order of the next pass."""
        self.order.cuts = cuts

    def indices_of(self, batch: int) -> Any:
        """Return the indices of a batch."""
        return self.order.indices_of(batch)

    def _restore(self, saved: LoaderState, by_reading: bool) -> None:
        put_back(self.current, saved["current"])
        if self.stateful is not None and "dataset" in saved:
            self.stateful.load_state_dict(saved["dataset"])
        if self.order.stateful is not None and "sampler" in saved and not by_reading:
            self.order.go_to(saved["sampler"], saved.get("is_stuck", False))
            if not saved.get("is_stuck", False):
                return
        # a new iterator also draws from the generators, except for persistent workers after the first pass;
        # in these cases `IndexOrder` restores the states at the first index
        if saved["in_pass"] or (saved["opened"] and self.loader.persistent_workers):
            self.order.begins = saved["generators"]
        else:
            put_back(self.generators, saved["generators"])

    def state(self, in_pass: bool, position: int) -> LoaderState:
        """Return the generators at the start of the order, and the current state of the dataset."""
        order, begins = self.order, self.order.begins
        saved: LoaderState = {
            "generators": begins if in_pass and begins is not None else states_of(self.generators),
            "current": states_of(self.current),
            "opened": self.copy.begun,
            # a user's __iter__ may not yield one batch per index; prefetching hides it near the end
            "by_index": self.caps or order.drawn == position + order.ahead,
        }
        if self.stateful is not None:
            saved["dataset"] = self.stateful.state_dict()
        if order.stateful is not None:
            saved["sampler"] = order.state_at(position) if in_pass else order.stateful.state_dict()
        return saved

    def checked(self, saved: LoaderState, position: int) -> LoaderState:
        """Mark the state of a sampler that does not advance; a resume then draws its order again."""
        check = self.order.check
        if check is None or "sampler" not in saved or not check.check(saved["sampler"], position):
            return saved
        return {**saved, "is_stuck": True}


_OWN_KEYS = ("state", "generators", "is_left", "stands_at")
"""What a StateReader saves."""


class StateReader(Reader):
    """A reader of a loader with a state_dict, or without workers, of a dataset with one."""

    kind = "state"
    how = "by its own state, which is saved with the run"
    caps = True
    state_is_current = True

    def __init__(self, source: Any, owner: Any, shard_plan: ShardPlan, trains: bool) -> None:
        super().__init__()
        self.shard_plan = shard_plan
        self.source, self.owner = source, owner
        self.copy = None if owner is source else PrivateCopy(source)
        self.may_be_spent = False
        """Whether it has loaded a state that may be that of a finished pass."""
        self.check = StateCheck(owner, trains)
        self.stands_at = 0
        """The batch that the state belongs to, if it does not advance."""
        self.is_over = True
        """Whether the current pass was read to its end."""
        self.unread: LoaderState | None = None
        """A loaded state from which no batch was read yet."""
        self.restarts = is_stateful_loader(source) or is_litdata(source)
        """Whether a state between two passes may be that of a pass that was left before its end."""
        # torchdata restores the sampler's generator to the start of the pass, but not what followed
        is_torchdata = is_stateful_loader(source) and not source.num_workers
        self.generators = find_generators(loader=source) if is_torchdata else {}

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Continue from the state; if it does not advance, read the batches before the position again."""
        loaded = saved if saved is not None and "state" in saved else None
        self.unread = loaded
        is_stuck = loaded is not None and "stands_at" in loaded
        self.stands_at = 0
        if loaded is None:
            if not self.is_over and is_litdata(self.source):
                self._leave(key)
            batches = self._start(key)
        else:
            # a copy: LitData changes the state that it has loaded
            self.owner.load_state_dict(copy.deepcopy(loaded["state"]))
            self.may_be_spent = True
            self.stands_at = loaded["stands_at"] if is_stuck else position
            if position and is_litdata(self.source) and not self.source.restore:
                return iter(())  # the pass was read to its end; an iterator would start the next one
            batches = self._continue(key, loaded)
        self.check.open(position, is_stuck, None if loaded is None else loaded["state"])
        if self.may_be_spent:
            batches = self._not_spent(batches, key, position)
        if is_stuck and position > self.stands_at:
            batches = read_again(batches, (position - self.stands_at) * self.shard_plan.per_turn)
        self.is_over = False
        batches = itertools.chain(self._first(batches), batches, self._end())
        # without a limit, read to the end, where the source may reset itself
        return (
            batches
            if limit is None
            else itertools.islice(batches, (limit - position) * self.shard_plan.per_turn)
        )

    def _first(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the first batch, and check the state when the next one is requested."""
        batch = next(batches, END)
        self.unread = None
        if batch is not END:
            yield batch
            self.check.after_first()

    def _continue(self, key: int, loaded: LoaderState) -> Iterator[Any]:
        """Start an iterator after a state was loaded, and restore the generators that torchdata omits."""
        if loaded.get("is_left", False):
            self._leave(key)
            put_back(self.generators, loaded.get("generators", {}))
            return self._start(key)
        batches = self._start(key)
        put_back(self.generators, loaded.get("generators", {}))
        return batches

    def _leave(self, key: int) -> None:
        """Make the next iterator start a new pass, not the rest of an unfinished one."""
        if is_litdata(self.source):
            self.source.restore = False  # it stays set until a restored pass was read to its end
        else:
            next(self._start(key), None)

    def _end(self) -> Iterator[Any]:
        self.is_over = True
        yield from ()

    def any_batch(self, key: int) -> Any:
        """Return the first batch of another pass and restore the state."""
        before = copy.deepcopy(self.state(True, 0)["state"])
        batch = super().any_batch(key)
        self.owner.load_state_dict(before)
        self.may_be_spent = True
        return batch

    def _start(self, key: int) -> Iterator[Any]:
        with OwnStream(key):
            return iter(self.source) if self.copy is None else self.copy.begin(key)

    def _not_spent(self, batches: Iterator[Any], key: int, position: int) -> Iterator[Any]:
        """Yield a pass; start it again if it is empty because the state was that of a finished pass."""
        for batch in batches:
            self.may_be_spent = False
            yield batch
        if self.may_be_spent and position == 0:
            self.may_be_spent = False
            yield from self._start(key)

    def state(self, in_pass: bool, position: int) -> LoaderState:
        """Return the source's own state; the loaded one if nothing was read since.

        LitData's loader spoils a state that it has loaded, if it is asked for another one before the first
        batch. It also returns an object that it changes later.
        """
        if self.unread is not None:
            return {name: self.unread[name] for name in _OWN_KEYS if name in self.unread}
        saved: LoaderState = {"state": copy.deepcopy(self.owner.state_dict())}
        if self.generators:
            saved["generators"] = states_of(self.generators)
        if self.restarts and not in_pass and (self.generators or not self.is_over):
            saved["is_left"] = True
        return saved

    def checked(self, saved: LoaderState, position: int) -> LoaderState:
        """Add the position of a state that does not advance."""
        return {**saved, "stands_at": self.stands_at} if self.check.check(saved["state"], position) else saved


class CountReader(StateReader):
    """A reader of MosaicML's StreamingDataset, whose state_dict takes the number of samples read."""

    state_is_current = False  # the position determines the state

    def __init__(self, loader: DataLoader[Any], shard_plan: ShardPlan, world_size: int) -> None:
        # trains=False skips the check of the state, which advances because the position determines it
        super().__init__(loader, loader.dataset, shard_plan, trains=False)
        replication = getattr(loader.dataset, "replication", None)
        self.samples = (
            (loader.batch_size or 1) * world_size // (replication if isinstance(replication, int) else 1)
        )
        """Samples in one batch of all ranks."""

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Continue at the sample of the state, or at the next epoch if a restored pass had nothing left."""
        if saved is None and self.unread is not None:
            state = self.unread["state"]
            state = {**state, "epoch": state["epoch"] + 1, "sample_in_epoch": 0}
            saved = {"state": state}
        return super().open(key, position, passed_over, limit, saved)

    def _first(self, batches: Iterator[Any]) -> Iterator[Any]:
        batch = next(batches, END)
        self.unread = None
        if batch is not END:
            yield batch

    def state(self, in_pass: bool, position: int) -> LoaderState:
        """Return the state at the position, or at the start of the next pass."""
        state = self.owner.state_dict(num_samples=position * self.samples, from_beginning=True)
        return {"state": state if in_pass else {**state, "epoch": state["epoch"] + 1}}


class StreamReader(Reader):
    """A reader of any other iterable: reads it again up to the position, with separate random streams."""

    kind = "stream"
    how = "as an iterable, with separate random streams; a resume reads the epoch again"

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self.workers = source.num_workers if isinstance(source, DataLoader) else 0
        self.generators = find_generators(
            source=source,
            dataset=None if self.workers else getattr(source, "dataset", None),
            collate_fn=None if self.workers else with_generator(getattr(source, "collate_fn", None)),
        )
        self.generators |= pipeline_generators(source)
        self.copy = PrivateCopy(source) if isinstance(source, DataLoader) else None

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Open a pass with separate random streams, so that the same batches can be read again."""
        self._begin(saved)
        stream = OwnStream(key)
        with stream:
            batches = iter(self.source) if self.copy is None else self.copy.begin(key)
        if not self.workers:
            batches = with_stream(stream, batches)
        return read_again(batches, passed_over) if passed_over else batches

    def close(self) -> None:
        """End the workers."""
        if self.copy is not None:
            self.copy.close()


def with_stream(stream: OwnStream, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, each read with these random streams instead of the main ones."""
    while True:
        with stream:
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


def read_again(
    batches: Iterator[Any],
    count: int,
    instead: str = "the loader cannot start at a position. A loader with state_dict and load_state_dict, or "
    "a map-style dataset, continues immediately.",
) -> Iterator[Any]:
    """Skip the first batches and log how long it took. instead: why, and what would be faster."""
    began = time.monotonic()
    read = sum(1 for _ in itertools.islice(batches, count))
    log.warning(
        "To continue at the saved position, %s read again, which took %.1f s: %s",
        "1 batch was" if read == 1 else f"{read} batches were",
        time.monotonic() - began,
        instead,
    )
    return batches


class PrivateCopy:
    """A copy of the user's loader with our order, and with workers that are seeded for each batch."""

    def __init__(self, loader: DataLoader[Any], order: IndexOrder | None = None) -> None:
        self.loader, self.order = loader, order
        self.begun = False
        self.made: DataLoader[Any] | None = None
        self.batches: Iterator[Any] | None = None

    def begin(self, key: int) -> Iterator[Any]:
        """Iterate over a new copy with the user's latest changes; with persistent workers, over the same."""
        self.begun = True
        if self.made is not None and self.loader.persistent_workers:
            self.batches = iter(self.made)
            return self.batches
        self.close()  # end the workers of an unfinished pass before new ones start
        self.made = self._make(key)
        if self.order is not None and reads_directly(self.made):
            self.batches = direct_batches(self.made)
            return self.batches
        with starting_workers(self.loader) if self.loader.num_workers else contextlib.nullcontext():
            self.batches = iter(self.made)
        return self.batches

    def _make(self, key: int) -> DataLoader[Any]:
        loader, order = self.loader, self.order
        made = copy.copy(loader)
        attributes = made.__dict__  # a DataLoader refuses assignment
        attributes["_iterator"] = None
        if order is not None:
            attributes["sampler" if loader.batch_sampler is None else "batch_sampler"] = order
        if loader.generator is None:  # an iterator would draw the workers' seed from the main stream
            attributes["generator"] = torch.Generator().manual_seed(key)
        if loader.num_workers:
            attributes["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
            if order is not None:
                attributes["dataset"] = KeyedDataset(loader.dataset)
        return made

    def close(self) -> None:
        """End the workers now, because the garbage collector would wait five seconds for each."""
        batches, self.made, self.batches = self.batches, None, None
        if batches is not None:
            end_workers(batches)


def reader_for(source: Any, shard_plan: ShardPlan, trains: bool, world_size: int = 1) -> Reader:
    """Return the best reader for a source."""
    if isinstance(source, list | tuple):
        return ListReader(source)
    if isinstance(source, DataLoader) and takes_sample_count(source.dataset):
        return CountReader(source, shard_plan, world_size)
    if omits_buffer(source):  # a resume by the state would lose samples; reading the epoch again does not
        return StreamReader(source)
    if has_state(source):
        return StateReader(source, source, shard_plan, trains)
    if is_indexed(source):
        return IndexReader(source, shard_plan, trains)
    if isinstance(source, DataLoader) and source.num_workers == 0 and has_state(source.dataset):
        return StateReader(source, source.dataset, shard_plan, trains)
    return StreamReader(source)
