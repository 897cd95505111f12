"""Loaders: names, lengths, limits, and where in them a run is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hookline.errors import OptionError


@dataclass(slots=True)
class Loader:
    """One source of batches with its name and how much of it is used."""

    name: str
    source: Iterable[Any]
    length: int | None
    """Batches per pass after the limit, or None if the source cannot tell."""

    @property
    def is_exact(self) -> bool:
        """Whether the length is certain: a stream has none, and an iterable dataset may only have estimated it."""
        return length_of(self.source) is not None and not isinstance(getattr(self.source, "dataset", None), IterableDataset)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """One pass, shuffled anew by the epoch where the sampler knows how, from position `skip` on."""
        for sampler in (getattr(self.source, "sampler", None), getattr(self.source, "batch_sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        batches: Iterator[Any] = iter(self.source)
        if self.length is not None:
            batches = itertools.islice(batches, self.length)
        for _ in itertools.islice(batches, skip):
            pass
        return batches


    def generator_states(self) -> list[Any]:
        """The states of the random generators that the loader and its samplers have of their own."""
        return [generator.get_state() for generator in self._generators()]

    def set_generator_states(self, states: list[Any]) -> None:
        """Take them back."""
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def _generators(self) -> list[Any]:
        batch_sampler = getattr(self.source, "batch_sampler", None)
        owners = (self.source, getattr(self.source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(each): each for each in found if each is not None}.values())


def make_loaders(given: Any, limit: int | float, kind: str) -> list[Loader]:
    """Named loaders from what the user passed: one, a list, or a dictionary of names."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        named = {str(name): source for name, source in given.items()}
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
