"""Loaders: names, lengths, limits, and where in them a run is."""

from __future__ import annotations

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
from hookline.data.resuming import changes, facts_of
from hookline.errors import OptionError
from hookline.seeding import key_of

log = logging.getLogger("hookline")

EVALUATION = 0
"""The seed of every evaluation: what is measured does not change with the training's."""


@dataclass(slots=True)
class Loader:
    """One source of batches with its name and how much of it is used.

    What a pass yields follows from the seed, the epoch and the position: it can begin at any batch, in another process too.
    """

    name: str
    source: Iterable[Any]
    length: int | None
    """Batches per pass after the limit, or None if the source cannot tell."""
    ahead: int = 0
    """Batches that a thread fetches in advance, where that changes nothing of what is trained."""
    move: Callable[[Any], Any] | None = None
    """What it does to them: the way to the device."""
    seed: int | None = field(default=None, init=False)
    """What the order comes from; known when the first pass is opened, and kept in checkpoints."""
    _reader: Reader | None = field(default=None, init=False, repr=False)
    _epoch: int = field(default=-1, init=False, repr=False)
    _fetching: Generator[Any, None, None] | None = field(default=None, init=False, repr=False)
    _restored: Saved | None = field(default=None, init=False, repr=False)

    @property
    def is_exact(self) -> bool:
        """Whether the length is certain: a stream has none, and an iterable dataset may only have estimated it."""
        return length_of(self.source) is not None and not isinstance(getattr(self.source, "dataset", None), IterableDataset)

    @property
    def reader(self) -> Reader:
        """How this source is read; found out when it is first needed."""
        if self._reader is None:
            self._reader = reader_for(self.source)
        return self._reader

    def open(self, epoch: int, position: int = 0, seed: int | None = None) -> Iterator[Any]:
        """An epoch's batches from the position on. The random streams of the main process are not moved by it.

        Without a seed one is drawn from torch's stream, once for all epochs. The one in a checkpoint goes before any other.
        """
        reader = self.reader
        tell_epoch(self.source, epoch)
        if self.seed is None and not isinstance(reader, ListReader):
            self.seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
        saved, self._restored, self._epoch = self._restored, None, epoch
        limit = None if self.length == length_of(self.source) else self.length
        batches = reader.open(key_of(self.seed or 0, epoch, self.name), position, limit, saved)
        if self.length is not None and not reader.caps:
            batches = itertools.islice(batches, max(0, self.length - position))
        if self.ahead and reader.may_run_ahead:
            self._fetching = batches = ahead(batches, self.ahead, self.move)
        return batches

    def batches(self, epoch: int = 0) -> Iterator[Any]:
        """A pass for an evaluation: always in the same order, and generators of the loader's own are left as they were."""
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
        facts = facts_of(self.source, self.length)
        return {"seed": self.seed, "kind": self.reader.kind, "in_pass": in_pass, "facts": facts,
                **self.reader.state(in_pass, position)}  # fmt: skip

    def load_state_dict(self, saved: Saved) -> None:
        """The next pass that is opened begins where this was saved. What has changed since is said."""
        self.seed = saved["seed"]
        for change in changes(saved, self.reader.kind, facts_of(self.source, self.length)):
            log.warning("The %s loader %s", self.name, change)
        if saved["kind"] == self.reader.kind:
            self._restored = saved


def tell_epoch(source: Any, epoch: int) -> None:
    """Samplers and datasets that shuffle by the epoch are told which one it is."""
    batch_sampler = getattr(source, "batch_sampler", None)
    owners: tuple[Any, ...] = (getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None),
                               getattr(source, "dataset", None))  # fmt: skip
    for owner in {id(each): each for each in owners}.values():
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def make_loaders(given: Any, limit: int | float, kind: str) -> list[Loader]:
    """Named loaders from what the user passed: one, a list, or a dictionary of names."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        named = {str(name): source for name, source in given.items()}
        if len(named) < len(given):
            raise OptionError(f"Two {kind} loaders have the same name as text: {', '.join(map(repr, given))}.")
    elif isinstance(given, list | tuple) and len(given) == 1 and _is_loader(given[0]):
        named = {kind: given[0]}
    elif isinstance(given, list | tuple) and given and all(_is_loader(each) for each in given):
        named = {f"dl{index}": source for index, source in enumerate(given)}
    else:
        named = {kind: given}
    for name, source in named.items():
        if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            raise OptionError(f"The {kind} loader {name!r} is a dataset ({type(source).__name__}), which yields single samples. "
                              "Pass torch.utils.data.DataLoader(dataset, batch_size=...).")  # fmt: skip
        if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            raise OptionError(f"The {kind} loader {name!r} is a {type(source).__name__}, which cannot be iterated over. "
                              "Pass a DataLoader or any iterable of batches.")  # fmt: skip
    return [Loader(name, source, limited(length_of(source), limit, kind)) for name, source in named.items()]


def _is_loader(value: Any) -> bool:
    """A list of loaders, not a list of batches: its members yield batches and are no arrays."""
    if hasattr(value, "shape") or isinstance(value, list | tuple | Mapping | str | bytes):
        return False
    return hasattr(value, "__iter__")


def length_of(source: Any) -> int | None:
    """`len`, or None where there is none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def limited(length: int | None, limit: int | float, kind: str) -> int | None:
    """Apply `limit_*_batches`: a whole number of batches or a fraction of them."""
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if limit == 1.0 or limit == 0.0:
        return length if limit else 0
    if length is None:
        raise OptionError(f"limit_{kind}_batches={limit}: a fraction needs a loader with a length; pass a whole number.")
    if length and not int(length * limit):
        raise OptionError(f"limit_{kind}_batches={limit} of {length} batches is none; pass more, or 0 if you mean none.")
    return int(length * limit)
