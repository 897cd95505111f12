"""Loaders read as Lightning reads them: by their own iterators, with the random streams of the process.

A seeded program then gets the same batches from both trainers. A resume restores the streams from the start
of the epoch and reads up to the position.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hookline.data import seeding
from hookline.data.loaders import Loader, set_epoch
from hookline.data.readers import LoaderState, Reader, StateReader, read_again
from hookline.data.seeding import find_generators, put_back, rng_state, set_rng_state, states_of
from hookline.data.sharding import END
from hookline.data.sources import has_state
from hookline.data.workers import WorkerStart, end_workers, starting_workers
from hookline.interop.lightning.loaders import Turns
from hookline.interop.lightning.package import find

INSTEAD = (
    "this trainer reads a loader by its own iterator, as Lightning does. A loader with state_dict and "
    "load_state_dict continues immediately."
)


class SharedStreamReader(Reader):
    """A reader that calls the source's own iterator with the streams of the process."""

    kind = "stream"
    how = "by its own iterator, with the random streams of the process; a resume reads the epoch again"
    caps = True

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self.generators = find_generators(
            source=source,
            sampler=getattr(source, "sampler", None),
            batch_sampler=getattr(source, "batch_sampler", None),
            dataset=None if getattr(source, "num_workers", 0) else getattr(source, "dataset", None),
        )
        self.streams: dict[str, Any] = {}
        """The random streams of the process when the pass began."""
        self.loader: Any = None
        """The object that is iterated over: the source, or a copy whose workers are safe from signals."""
        self.batches: Iterator[Any] | None = None

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Return a new pass; a resumed one begins as it did before, and is read up to the position."""
        is_inside, now = saved is not None and saved["in_pass"], None
        if saved is not None:
            put_back(self.generators, saved["generators"])
            if is_inside and "streams" in saved:
                now = None if position else rng_state()
                set_rng_state(saved["streams"])
        self.begins, self.streams = states_of(self.generators), rng_state()
        # persistent workers belong to the object of the first pass
        if self.loader is None or not getattr(self.source, "persistent_workers", False):
            self.close()
            self.loader = with_safe_workers(self.source)
        with starting_workers(self.loader) if self.loader is not self.source else contextlib.nullcontext():
            self.batches = batches = iter(self.loader)
        if now is not None:  # a run that resumes before the first batch has restored its streams already
            set_rng_state(now)
        is_passed_over = position and (is_inside or saved is None)
        return read_again(batches, position, INSTEAD) if is_passed_over else batches

    def state(self, in_pass: bool, position: int) -> LoaderState:
        """Return the streams and generators at the start of the pass."""
        return {**super().state(in_pass, position), **({"streams": self.streams} if in_pass else {})}

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        for loader in parts_of(self.source):
            if isinstance(loader, DataLoader) and loader._iterator is not None:
                workers, loader._iterator = loader._iterator, None
                end_workers(workers)
        batches, self.batches, self.loader = self.batches, None, None
        end_workers(batches)


def with_safe_workers(source: Any) -> Any:
    """Return a copy of a loader whose workers ignore signals to the process group; others unchanged."""
    if not isinstance(source, DataLoader) or not source.num_workers:
        return source
    made = copy.copy(source)
    made.__dict__["_iterator"] = None
    made.__dict__["worker_init_fn"] = WorkerStart(source.worker_init_fn)
    return made


class SharedStateReader(StateReader):
    """The same for a source with a state of its own, which is restored instead of reading again."""

    def _start(self, key: int) -> Iterator[Any]:
        return iter(self.source)


class Ahead(Iterator[Any]):
    """An iterator that reads one batch ahead, to know the last one of a source without a length."""

    def __init__(self, batches: Iterator[Any], position: int, loader: Loader) -> None:
        self.batches, self.read, self.loader = batches, position, loader
        self.next = next(batches, END)

    def __next__(self) -> Any:
        batch, self.next = self.next, END
        if batch is END:
            raise StopIteration
        self.next = next(self.batches, END)
        self.read += 1
        if self.next is END:
            self.loader.length = self.read
        return batch


class SharedStreamLoader(Loader):
    """A loader of Lightning's trainer. With several processes it is Hookline's, which shards the data."""

    prepared: Iterator[Any] | None = None
    """The first pass of a training loader, which Lightning opens when it has the loader."""

    @property
    def reader(self) -> Reader:
        """Return the reader of this source; create it on first use."""
        if not self.sharding.ranks.alone:
            return super().reader
        if self._reader is None:
            self._reader = (
                SharedStateReader(self.source, self.source, self.shard_plan, self.sharding.trains)
                if has_state(self.source)
                else SharedStreamReader(self.source)
            )
        return self._reader

    def prepare(self) -> None:
        """Open the first pass."""
        if self.sharding.ranks.alone and self.length != 0:
            self.prepared = self._read(0, None)
            self._epoch = 0  # a checkpoint before its first batch is in this pass

    def open(self, epoch: int, position: int = 0, seed: int | None = None) -> Iterator[Any]:
        """Return the batches of an epoch from a position on."""
        if not self.sharding.ranks.alone:
            return super().open(epoch, position, seed)
        for part in parts_of(self.source):
            set_epoch(part, epoch if self.sampler_epoch is None else self.sampler_epoch)
        saved, self._restored, prepared, self.prepared = self._restored, None, self.prepared, None
        self.length, self._pass_start, self._epoch = self._whole, (position, position), epoch
        is_first = prepared is not None and saved is None and epoch == position == 0
        return prepared if prepared is not None and is_first else self._read(position, saved)

    def batches(self, epoch: int = 0) -> Iterator[Any]:
        """Return a pass for an evaluation; generators advance."""
        return self.open(epoch) if self.sharding.ranks.alone else super().batches(epoch)

    def _read(self, position: int, saved: LoaderState | None) -> Iterator[Any]:
        seed_workers(self.source)
        batches = self.reader.open(0, position, position, self.length, saved)
        if isinstance(self.source, Turns):
            self.source.loader = self
            return batches
        if self.length is None:
            return Ahead(batches, position, self)
        return itertools.islice(batches, max(0, self.length - position))


def parts_of(source: Any) -> list[Any]:
    """Return the loaders that a source consists of; of most sources, the source itself."""
    combined = getattr(source, "combined", source)
    parts = getattr(combined, "flattened", getattr(combined, "loaders", None))
    return list(parts) if isinstance(parts, list) else [source]


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch, with Lightning's arguments, and return the seed.

    seed: None takes PL_GLOBAL_SEED of the environment, or 0. workers, verbose: for Lightning's own function,
    which is called if the program has imported the package; torch seeds the workers of loaders without it.
    """
    if (theirs := find("", "seed_everything")) is not None:
        return int(theirs(seed, workers=workers, verbose=verbose))
    chosen = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
    seeding.seed_everything(chosen)
    return chosen


def seed_workers(source: Any) -> None:
    """Seed the workers after `seed_everything(seed, workers=True)`, as Lightning does."""
    if not int(os.environ.get("PL_SEED_WORKERS", "0")):
        return
    seed = find("seed", "pl_worker_init_function", "lightning.fabric.utilities")
    for part in parts_of(source):
        if seed is not None and getattr(part, "worker_init_fn", part) is None:
            part.worker_init_fn = partial(seed, rank=int(os.environ.get("RANK", "0")))


def is_in_sequence(loader: Any) -> bool:
    """Return whether a loader reads in the dataset's order, or has no sampler."""
    return isinstance(getattr(loader, "sampler", None), SequentialSampler | None)


def in_sequence(loader: Any) -> Any:
    """Return a DataLoader that does not shuffle, for `overfit_batches`; another source unchanged."""
    if not hasattr(loader, "dataset") or is_in_sequence(loader):
        return loader
    update = find("utilities.data", "_update_dataloader")
    if update is not None:
        return update(loader, SequentialSampler(loader.dataset))
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return loader
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    }
    order = BatchSampler(SequentialSampler(loader.dataset), loader.batch_size or 1, loader.drop_last)  # type: ignore[arg-type]
    return DataLoader(loader.dataset, batch_sampler=order, **options)
