"""Where batches come from: lists, other iterables, DataLoaders with and without workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, TensorDataset
from work import Batch


@dataclass(frozen=True)
class Data:
    """What one training reads: the batches of an epoch, how many steps it takes at least, and in how many
    epochs.
    """

    batches: Any
    steps: int
    epochs: int = 1


Source = Callable[[int], Data]
"""Makes the data of one training from the number of its steps."""


class Stream:
    """An iterable that is neither a list nor a DataLoader, and does not know its length."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def listed(batch: Callable[[], Batch]) -> Source:
    """Return a list of prebuilt batches, so that fetching costs nothing."""

    def make(steps: int) -> Data:
        few = [batch() for _ in range(20)]
        return Data([few[index % len(few)] for index in range(steps)], steps)

    return make


def streamed(batch: Callable[[], Batch]) -> Source:
    """Return the same list behind an object that can only be iterated."""
    made = listed(batch)
    return lambda steps: Data(Stream(made(steps).batches), steps)


def loaded(batch: Callable[[int], Batch], size: int, workers: int = 0) -> Source:
    """Return a DataLoader over a TensorDataset, in order. One epoch lasts for the whole measurement."""

    def make(steps: int) -> Data:
        return Data(DataLoader(TensorDataset(*batch(steps * size)), size, num_workers=workers), steps)

    return make


def shuffled(batch: Callable[[int], Batch], samples: int, size: int) -> Source:
    """Return a DataLoader that shuffles a TensorDataset, for as many epochs as needed. All trainings read the
    same tensors.
    """
    made: list[TensorDataset] = []

    def make(steps: int) -> Data:
        if not made:
            made.append(TensorDataset(*batch(samples)))
        loader = DataLoader(made[0], size, shuffle=True)
        return Data(loader, steps, math.ceil(steps / len(loader)))

    return make
