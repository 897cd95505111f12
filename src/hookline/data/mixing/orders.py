"""The five orders as plain arithmetic: who comes next, and how many batches in a row.

Each order yields bursts, `(index, batches)`. `left` says how many batches a loader may still give; None means
it never ends.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

Burst = tuple[int, int]
AT_ONCE = 100
LONGEST_ROUND = 10_000  # batches of a round that are kept
ENDLESS = 1 << 62  # more batches than a run can draw; a number, so that it divides like one


def apportion(
    weights: Mapping[int, float], total: int, left: Mapping[int, int | None], turn: int = 0
) -> dict[int, int]:
    """Divide `total` batches by weight: whole numbers, each within one of its exact share, by the largest
    remainders.

    A loader whose share is more than it has left gives what it has, and the others divide the rest. Equal
    remainders take turns, by `turn` (the epoch), so that no loader is favoured in every epoch because it was
    named first.
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
    """The exact shares of those that can meet theirs, and what the others have."""
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
    """Spread each loader's quota evenly over the epoch; what has been given so far says where in it to go on.

    Quotas with a common divisor make a schedule that repeats itself, which is worked out once: 700 and 300
    are 7 and 3.
    """
    common = math.gcd(*quotas.values())
    rounds = common // burst if common % burst == 0 else 1  # a round of whole bursts, so that none is cut
    if rounds <= 1 or sum(quotas.values()) > rounds * LONGEST_ROUND:
        return _spread(quotas, burst, given)
    a_round = {index: quota // rounds for index, quota in quotas.items()}
    past = sum(given.values()) // sum(a_round.values())
    begun = {index: given[index] - past * each for index, each in a_round.items()}
    whole = list(_spread(a_round, burst, dict.fromkeys(a_round, 0)))
    later = itertools.chain.from_iterable(itertools.repeat(whole, rounds - past - 1))
    return itertools.chain(_spread(a_round, burst, begun), later)


def _spread(quotas: Mapping[int, int], burst: int, given: Mapping[int, int]) -> Iterator[Burst]:
    """Who is due first among those whose turn may come.

    Every burst has a window in which an even flow would give it: it may begin once that has begun (to the
    nearest burst), and is due at its end. Among those that may begin, the one due first is taken. For single
    batches this is the classic schedule of fair shares on one machine (earliest deadline first): after any
    number of picks each loader's count is its exact share, rounded up or down. Whole numbers only, so that
    the same settings give the same picks everywhere.
    """
    loaders = [index for index, quota in quotas.items() if quota]
    quota_of, done_of = [quotas[index] for index in loaders], [given[index] for index in loaders]
    total, at = sum(quota_of), sum(done_of)
    for one, quota in enumerate(quota_of):
        begun = done_of[one] % burst
        if begun and done_of[one] < quota:  # broken off in the middle of this one's burst
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
        place = 0
        while may_begin[queue[place][1]] > at:  # rarely more than one step, however many loaders there are
            place += 1
        one = queue.pop(place)[1]
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
    """Round after round of the same turns; a loader that has nothing left is passed over."""
    rest = _rest(left, turns)
    live = list(turns)
    while live := [(index, run) for index, run in live if rest[index]]:
        a_round = _per_round(live)
        rounds = min(rest[index] // each for index, each in a_round.items())
        yield from itertools.chain.from_iterable(itertools.repeat(live, rounds))
        for index, each in a_round.items():
            rest[index] -= rounds * each
        for index, run in live:  # the round in which somebody ends
            if batches := min(run, rest[index]):
                rest[index] -= batches
                yield index, batches


def count_turns(turns: Sequence[Burst], left: Mapping[int, int | None], total: int) -> dict[int, int]:
    """How often `take_turns` takes each loader in `total` batches, without going through them."""
    rest = _rest(left, turns)
    counts = dict.fromkeys(rest, 0)
    live = list(turns)
    while total > 0 and (live := [(index, run) for index, run in live if rest[index]]):
        a_round = _per_round(live)
        rounds = min(
            total // sum(a_round.values()), *(rest[index] // each for index, each in a_round.items())
        )
        whole = [(index, rounds * each) for index, each in a_round.items()]
        for index, run in (
            *whole,
            *live,
        ):  # whole rounds, then the one in which somebody ends, or the epoch does
            batches = min(run, rest[index], total)
            counts[index] += batches
            rest[index] -= batches
            total -= batches
    return counts


def draw(
    weights: Mapping[int, float], left: Mapping[int, int | None], burst: int, key: str
) -> Iterator[Burst]:
    """By chance, from a generator of its own that starts from `key`."""
    rng = random.Random(key)  # a text is hashed by random itself, the same in every process
    rest = _rest(left, weights.items())
    while live := [index for index, weight in weights.items() if weight > 0 and rest[index]]:
        largest = max(weights[index] for index in live)  # so that no sum overflows
        chances = list(itertools.accumulate(weights[index] / largest for index in live))
        while min(rest[index] for index in live) >= AT_ONCE * burst:  # nobody can end
            chosen = rng.choices(live, cum_weights=chances, k=AT_ONCE)
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
