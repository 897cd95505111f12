"""The schedule: a pure function of the mixture, the loaders' lengths and the epoch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hookline.data.mixing.orders import Burst, apportion, count_turns, draw, interleave, take_turns
from hookline.data.mixing.settings import Mixture


class Pick(NamedTuple):
    """One batch of the schedule."""

    loader: int
    """Which loader: its place among the names."""

    restart: bool
    """Whether the loader has just given its last batch and must be started again for this one."""


def epoch_batches(mixture: Mixture, lengths: Mapping[str, int | None]) -> int:
    """How many batches the epoch has."""
    return Stretch.begin(mixture, lengths).end


def planned(mixture: Mixture, lengths: Mapping[str, int | None], epoch: int = 0) -> dict[str, int]:
    """How many batches each loader gives in an epoch; with order='random' that is the expectation."""
    stretch = Stretch.begin(mixture, lengths)
    counts = stretch.planned(epoch)
    return {name: counts.get(index, 0) for index, name in enumerate(lengths)}


def schedule(
    mixture: Mixture, lengths: Mapping[str, int | None], epoch: int = 0, position: int = 0
) -> Iterator[Pick]:
    """The picks of an epoch from a position on: the same picks as from the start."""
    stretch = Stretch.begin(mixture, lengths)
    picks = stretch.picks(epoch)
    counts = Counter(itertools.islice(picks, max(position, 0)))
    known = list(lengths.values())
    for index in picks:
        length = known[index]
        yield Pick(index, length is not None and counts[index] > 0 and counts[index] % length == 0)
        counts[index] += 1


@dataclass(frozen=True)
class Stretch:
    """A part of an epoch that is drawn with one mixture: the whole of it, or what follows a change."""

    mixture: Mixture
    names: Sequence[str]
    """By index. Loaders that were taken out keep theirs."""
    lengths: Mapping[str, int | None]
    """Of the loaders that take part."""
    start: int
    counts: Sequence[int]
    """Batches that each loader has given in this epoch before the start."""
    asked: int
    """Batches the whole epoch should have, if the loaders have as many."""

    @classmethod
    def begin(cls, mixture: Mixture, lengths: Mapping[str, int | None]) -> Stretch:
        """A whole epoch."""
        names = tuple(lengths)
        return cls(mixture, names, dict(lengths), 0, (0,) * len(names), asked_batches(mixture, lengths))

    @property
    def left(self) -> dict[int, int | None]:
        """How many batches each loader may still give in this epoch; None is without end."""
        counts = zip(self.names, self.counts, strict=True)
        return {
            index: None
            if (length := self.lengths[name]) is None or self.mixture.cycles
            else max(length - count, 0)
            for index, (name, count) in enumerate(counts)
            if name in self.lengths
        }

    @property
    def end(self) -> int:
        """The position at which the epoch is over."""
        left, available = self.left, 0
        taking_part = {
            index for index, part in (self._weights().items() if self._by_weight else self._turns()) if part
        }
        for index in taking_part:
            most = left[index]
            if most is None:
                return max(self.asked, self.start)
            available += most
        return max(min(self.asked, self.start + available), self.start)

    def picks(self, epoch: int, counts: Sequence[int] | None = None) -> Iterator[int]:
        """The loaders' indices to the end of the epoch, one a batch: from the start, or from where these
        counts are reached.
        """
        total = self.end - self.start
        given = [now - before for now, before in zip(counts or self.counts, self.counts, strict=True)]
        flat = itertools.chain.from_iterable(
            itertools.starmap(itertools.repeat, self._bursts(epoch, total, given))
        )
        if self.mixture.order == "weighted":  # goes on from the counts by itself
            return itertools.islice(flat, total - sum(given))
        return itertools.islice(flat, sum(given), total)

    def planned(self, epoch: int) -> dict[int, int]:
        """How many of them are whose, without going through them."""
        total = self.end - self.start
        if self._by_weight:
            return apportion(self._weights(), total, self.left, epoch)
        if self.mixture.order != "sequential":
            return count_turns(self._turns(), self.left, total)
        counts = dict.fromkeys(self.left, 0)
        for index, run in self._unfinished():
            counts[index] += min(run, total)
            total -= min(run, total)
        more = count_turns(self._turns(), self.left, total) if self.mixture.cycles else {}
        return {index: count + more.get(index, 0) for index, count in counts.items()}

    def _bursts(self, epoch: int, total: int, given: Sequence[int]) -> Iterator[Burst]:
        mixture = self.mixture
        if mixture.order == "weighted":
            quotas = apportion(self._weights(), total, self.left, epoch)
            return interleave(quotas, mixture.burst, {index: given[index] for index in quotas})
        if mixture.order == "random":
            return draw(self._weights(), self.left, mixture.burst, f"{mixture.seed}/{epoch}/{self.start}")
        if mixture.order == "sequential":
            again = take_turns(self._turns(), self.left) if mixture.cycles else iter(())
            return itertools.chain(self._unfinished(), again)
        return take_turns(self._turns(), self.left)

    @property
    def _by_weight(self) -> bool:
        return self.mixture.order in ("weighted", "random")

    def _weights(self) -> dict[int, float]:
        weights = self.mixture.weights or dict.fromkeys(self.lengths, 1.0)
        return {index: weights[name] for index, name in enumerate(self.names) if name in self.lengths}

    def _turns(self) -> list[Burst]:
        """One round: who, and how many in a row."""
        index_of = {name: index for index, name in enumerate(self.names) if name in self.lengths}
        if self.mixture.order == "sequential":
            return [(index, self._whole(name)) for name, index in index_of.items()]
        return [(index_of[name], self.mixture.burst) for name in self.mixture.pattern or index_of]

    def _unfinished(self) -> list[Burst]:
        """In sequence: what is left of the round under way, which is all of the first one unless the mixture
        was changed.
        """
        given = {index: self.counts[index] for index, _ in self._turns()}
        rounds = min(given[index] // length for index, length in self._turns())
        return [
            (index, rest)
            for index, length in self._turns()
            if (rest := (rounds + 1) * length - given[index]) > 0
        ]

    def _whole(self, name: str) -> int:
        length = self.lengths[name]
        return (
            max(self.asked, 1) if length is None else length
        )  # one without end takes all that is left of the epoch


def asked_batches(mixture: Mixture, lengths: Mapping[str, int | None], taken_out: int = 0) -> int:
    """What `epoch_length` comes to; a sum counts the batches of loaders that were taken out after they had
    given some.
    """
    if not isinstance(mixture.epoch_length, str):
        return mixture.epoch_length
    finite = [length for length in lengths.values() if length is not None]
    if mixture.epoch_length == "sum":
        return sum(finite) + taken_out
    return max(finite) if mixture.epoch_length == "max" else min(finite)
