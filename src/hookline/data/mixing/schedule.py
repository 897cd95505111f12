"""The five orders of a mixture as pure functions: the next loader, and its number of batches in a row.

Each order yields bursts, `(index, batches)`. `left` is the number of batches that a loader has left; None
means that it is endless.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from hookline.data.mixing.settings import Mixture

Burst = tuple[int, int]
DRAWS_AT_ONCE = 100
MAX_ROUND = 10_000  # batches of a round that are stored
ENDLESS = 1 << 62  # more batches than a run can draw; an integer, so that it can be divided


def apportion(
    weights: Mapping[int, float], total: int, left: Mapping[int, int | None], turn: int = 0
) -> dict[int, int]:
    """Divide `total` batches by weight into integers, by the largest remainders.

    A loader with too few batches left yields all of them, and the others divide the rest. `turn` (the epoch)
    rotates equal remainders, so that the first loader is not favoured in every epoch.
    """
    if total <= 0:
        return dict.fromkeys(weights, 0)
    shares, quotas = _shares(weights, total, left)
    quotas |= {index: math.floor(share) for index, share in shares.items()}
    spare = total - sum(quotas.values())
    order = list(shares)
    first = turn % len(order) if order else 0
    in_turn = order[first:] + order[:first]
    for index in sorted(in_turn, key=lambda index: quotas[index] - shares[index])[:spare]:
        quotas[index] += 1
    return {index: quotas.get(index, 0) for index in weights}


def _shares(
    weights: Mapping[int, float], total: int, left: Mapping[int, int | None]
) -> tuple[dict[int, Fraction], dict[int, int]]:
    """Return the exact shares of the loaders with enough batches, and the batches of the others."""
    open_ = {index: Fraction(weight) for index, weight in weights.items() if weight > 0}
    short: dict[int, int] = {}
    while True:
        rest, sum_ = total - sum(short.values()), sum(open_.values())
        shares = {index: rest * weight / sum_ for index, weight in open_.items()}
        over = {
            index: most
            for index, share in shares.items()
            if (most := left[index]) is not None and share > most
        }
        if not over:
            return shares, short
        short |= over
        open_ = {index: weight for index, weight in open_.items() if index not in over}


def interleave(quotas: Mapping[int, int], burst: int, given: Mapping[int, int]) -> Iterator[Burst]:
    """Spread each loader's quota evenly over the epoch; continue after the batches in `given`.

    Quotas with a common divisor give a schedule that repeats and is computed once: 700 and 300 are 7 and 3.
    """
    common = math.gcd(*quotas.values())
    rounds = common // burst if common % burst == 0 else 1  # a round of complete bursts
    if rounds <= 1 or sum(quotas.values()) > rounds * MAX_ROUND:
        return _spread(quotas, burst, given)
    a_round = {index: quota // rounds for index, quota in quotas.items()}
    past = sum(given.values()) // sum(a_round.values())
    begun = {index: given[index] - past * each for index, each in a_round.items()}
    whole = list(_spread(a_round, burst, dict.fromkeys(a_round, 0)))
    later = itertools.chain.from_iterable(itertools.repeat(whole, rounds - past - 1))
    return itertools.chain(_spread(a_round, burst, begun), later)


def _spread(quotas: Mapping[int, int], burst: int, given: Mapping[int, int]) -> Iterator[Burst]:
    """Yield bursts by earliest deadline first.

    Every burst has a window in which an even flow would yield it: it may start once the window has started
    (to the nearest burst), and is due at its end. Among those that may start, the one due first is taken. For
    single batches, after any number of picks each loader's count is its exact share, rounded up or down. Only
    integers are used, so that the picks are the same on every machine.
    """
    loaders = [index for index, quota in quotas.items() if quota]
    quota_of, done_of = [quotas[index] for index in loaders], [given[index] for index in loaders]
    total, at = sum(quota_of), sum(done_of)
    for one, quota in enumerate(quota_of):
        begun = done_of[one] % burst
        if begun and done_of[one] < quota:  # finish an interrupted burst
            run = min(burst - begun, quota - done_of[one])
            yield loaders[one], run
            at += run
            done_of[one] += run
    may_begin = [done * total // quota - burst + 1 for done, quota in zip(done_of, quota_of, strict=True)]
    queue = sorted(
        (-(-min(done + burst, quota) * total // quota), one)
        for one, (done, quota) in enumerate(zip(done_of, quota_of, strict=True))
        if done < quota
    )
    while queue:
        first = 0
        while may_begin[queue[first][1]] > at:  # rarely more than one step, even with many loaders
            first += 1
        one = queue.pop(first)[1]
        quota, done = quota_of[one], done_of[one]
        run = burst if quota - done > burst else quota - done
        yield loaders[one], run
        at += run
        done_of[one] = done = done + run
        if done < quota:
            may_begin[one] = done * total // quota - burst + 1
            after = done + burst if done + burst < quota else quota
            insort(queue, (-(-after * total // quota), one))


def take_turns(turns: Sequence[Burst], left: Mapping[int, int | None]) -> Iterator[Burst]:
    """Repeat the turns in rounds; skip a loader that has nothing left."""
    rest = _rest(left, turns)
    live = list(turns)
    while live := [(index, run) for index, run in live if rest[index]]:
        a_round = _per_round(live)
        rounds = min(rest[index] // each for index, each in a_round.items())
        yield from itertools.chain.from_iterable(itertools.repeat(live, rounds))
        for index, batches in a_round.items():
            rest[index] -= rounds * batches
        for index, run in live:  # the round in which a loader ends
            if batches := min(run, rest[index]):
                rest[index] -= batches
                yield index, batches


def count_turns(turns: Sequence[Burst], left: Mapping[int, int | None], total: int) -> dict[int, int]:
    """Return the number of batches of each loader in `total` batches of `take_turns`, without iterating."""
    rest = _rest(left, turns)
    counts = dict.fromkeys(rest, 0)
    live = list(turns)
    while total > 0 and (live := [(index, run) for index, run in live if rest[index]]):
        a_round = _per_round(live)
        rounds = min(
            total // sum(a_round.values()), *(rest[index] // each for index, each in a_round.items())
        )
        whole = [(index, rounds * each) for index, each in a_round.items()]
        for index, run in (*whole, *live):  # whole rounds, then the one in which a loader or the epoch ends
            batches = min(run, rest[index], total)
            counts[index] += batches
            rest[index] -= batches
            total -= batches
    return counts


def draw(
    weights: Mapping[int, float], left: Mapping[int, int | None], burst: int, key: str
) -> Iterator[Burst]:
    """Draw loaders at random, from a separate generator with the seed `key`."""
    rng = random.Random(key)  # `random` hashes text itself, the same in every process
    rest = _rest(left, weights.items())
    while live := [index for index, weight in weights.items() if weight > 0 and rest[index]]:
        largest = max(weights[index] for index in live)  # scaled, so that the sum cannot overflow
        chances = list(itertools.accumulate(weights[index] / largest for index in live))
        while min(rest[index] for index in live) >= DRAWS_AT_ONCE * burst:  # no loader can end
            chosen = rng.choices(live, cum_weights=chances, k=DRAWS_AT_ONCE)
            yield from zip(chosen, itertools.repeat(burst))
            for index in live:
                rest[index] -= burst * chosen.count(index)
        while all(rest[index] for index in live):
            index = rng.choices(live, cum_weights=chances)[0]
            batches = min(burst, rest[index])
            rest[index] -= batches
            yield index, batches


def _rest(left: Mapping[int, int | None], taking_part: Iterable[tuple[int, float]]) -> dict[int, int]:
    return {index: ENDLESS if (most := left[index]) is None else most for index, _ in taking_part}


def _per_round(turns: Iterable[Burst]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for index, run in turns:
        counts[index] = counts.get(index, 0) + run
    return counts


# ---- the schedule ------------------------------------------------------------------------------------------


class Pick(NamedTuple):
    """One batch of the schedule."""

    loader: int
    """The index of the loader in the list of names."""

    restart: bool
    """Whether the loader is exhausted and must be started again for this batch."""


def epoch_batches(mixture: Mixture, lengths: Mapping[str, int | None]) -> int:
    """Return the number of batches in the epoch."""
    return Stretch.begin(mixture, lengths).end


def planned(mixture: Mixture, lengths: Mapping[str, int | None], epoch: int = 0) -> dict[str, int]:
    """Return the number of batches of each loader in an epoch; with order='random', the expected number."""
    stretch = Stretch.begin(mixture, lengths)
    counts = stretch.planned(epoch)
    return {name: counts.get(index, 0) for index, name in enumerate(lengths)}


def schedule(
    mixture: Mixture, lengths: Mapping[str, int | None], epoch: int = 0, position: int = 0
) -> Iterator[Pick]:
    """Yield the picks of an epoch from a position on.

    mixture: how the loaders are mixed. lengths: batches of each loader by name; None: no length. epoch: the
    epoch, from 0. position: batches that are done.
    """
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
    """A part of an epoch with one mixture: the whole epoch, or the part after a change."""

    mixture: Mixture
    names: Sequence[str]
    """The names by index. Removed loaders keep their index."""
    lengths: Mapping[str, int | None]
    """The lengths of the loaders in the mixture."""
    start: int
    counts: Sequence[int]
    """The batches of each loader in this epoch before the start."""
    asked: int
    """The requested number of batches in the whole epoch."""

    @classmethod
    def begin(cls, mixture: Mixture, lengths: Mapping[str, int | None]) -> Stretch:
        """Return a stretch of a whole epoch."""
        names = tuple(lengths)
        return cls(mixture, names, dict(lengths), 0, (0,) * len(names), asked_batches(mixture, lengths))

    @property
    def left(self) -> dict[int, int | None]:
        """Return the batches that each loader has left in this epoch; None for an endless loader."""
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
        """Return the position at which the epoch ends."""
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
        """Yield the loader index of each batch, from the start or from the position with these counts."""
        total = self.end - self.start
        given = [now - before for now, before in zip(counts or self.counts, self.counts, strict=True)]
        flat = itertools.chain.from_iterable(
            itertools.starmap(itertools.repeat, self._bursts(epoch, total, given))
        )
        if self.mixture.order == "weighted":  # `interleave` continues from the counts
            return itertools.islice(flat, total - sum(given))
        return itertools.islice(flat, sum(given), total)

    def planned(self, epoch: int) -> dict[int, int]:
        """Return the number of picks of each loader without iterating over them."""
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
        """Return one round of bursts."""
        index_of = {name: index for index, name in enumerate(self.names) if name in self.lengths}
        if self.mixture.order == "sequential":
            return [(index, self._whole(name)) for name, index in index_of.items()]
        return [(index_of[name], self.mixture.burst) for name in self.mixture.pattern or index_of]

    def _unfinished(self) -> list[Burst]:
        """Return the rest of the current round in sequence: a whole round unless the mixture has changed."""
        given = {index: self.counts[index] for index, _ in self._turns()}
        rounds = min(given[index] // length for index, length in self._turns())
        return [
            (index, rest)
            for index, length in self._turns()
            if (rest := (rounds + 1) * length - given[index]) > 0
        ]

    def _whole(self, name: str) -> int:
        length = self.lengths[name]
        return max(self.asked, 1) if length is None else length  # an endless loader fills the epoch


def asked_batches(mixture: Mixture, lengths: Mapping[str, int | None], taken_out: int = 0) -> int:
    """Return the number of batches for `epoch_length`; `taken_out`: batches of removed loaders, for a sum."""
    if not isinstance(mixture.epoch_length, str):
        return mixture.epoch_length
    finite = [length for length in lengths.values() if length is not None]
    if mixture.epoch_length == "sum":
        return sum(finite) + taken_out
    return max(finite) if mixture.epoch_length == "max" else min(finite)


# ---- description -------------------------------------------------------------------------------------------


class Proportion(NamedTuple):
    """A loader's part of the batches, from 0 to 1."""

    reached: float
    asked: float


def proportions(counts: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, Proportion]:
    """Return the reached and requested proportion of each loader, by batches, samples or tokens."""
    given, asked = sum(counts.values()), sum(weights.values())
    return {
        name: Proportion(
            counts.get(name, 0) / given if given else 0.0, weights.get(name, 0) / asked if asked else 0.0
        )
        for name in dict.fromkeys([*counts, *weights])
    }


def describe_mixture(
    mixture: Mixture, lengths: Mapping[str, int | None], epoch: int = 0, picks: int = 20
) -> str:
    """Return a few lines of text: the order, each loader's part of an epoch, and the first picks."""
    total = epoch_batches(mixture, lengths)
    width = max(map(len, lengths), default=0)
    lines = [_headline(mixture, total)]
    about = "about " if mixture.order == "random" else ""
    for name, batches in planned(mixture, lengths, epoch).items():
        weights = mixture.weights
        weight = f"{weights[name] / sum(weights.values()):6.1%}  " if weights else ""
        lines.append(f"  {name:<{width}}  {weight}{about}{batches} batches{_use(batches, lengths[name])}")
    names = list(lengths)
    shown = [names[pick.loader] for pick in itertools.islice(schedule(mixture, lengths, epoch), picks)]
    more = " ..." if total > picks else ""
    lines.append(f"  begins: {' '.join(shown)}{more}")
    return "\n".join(lines)


def _headline(mixture: Mixture, total: int) -> str:
    burst = f", {mixture.burst} in a row" if mixture.burst > 1 else ""
    pattern = f" ({' '.join(mixture.pattern)})" if mixture.pattern else ""
    seed = f", seed {mixture.seed}" if mixture.order == "random" else ""
    rule = "" if not isinstance(mixture.epoch_length, str) else f" ({mixture.epoch_length})"
    ends = "start again" if mixture.cycles else "end"
    return f"{mixture.order}{pattern}{burst}{seed}: {total} batches an epoch{rule}; exhausted loaders {ends}"


def _use(batches: int, length: int | None) -> str:
    if length is None:
        return " of an endless loader" if batches else ", left out"
    if not batches:
        return f" of {length}, left out"
    if batches == length:
        return ", all of them once"
    return f" of {length}" if batches < length else f", {batches / length:.3g} times all {length}"
