"""What holds for every mixture that passes its check, over settings and loaders that nobody has thought of."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hookline import OptionError
from hookline.data.mixing import Mixture, MixtureCursor, check_mixture, epoch_batches, planned, schedule
from hookline.data.mixing.schedule import _spread, interleave

Lengths = dict[str, int | None]
unhurried = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # never fails because the machine is busy
weight = st.one_of(st.integers(0, 20), st.floats(0, 1e3), st.sampled_from([1e-300, 1e300]))


@st.composite
def loaders(draw: st.DrawFn, endless: bool = True) -> Lengths:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True))
    length = st.integers(1, 40)
    return {name: draw(st.one_of(length, st.none()) if endless else length) for name in names}


@st.composite
def mixtures(
    draw: st.DrawFn,
    names: list[str],
    orders: Any = ("sequential", "round_robin", "weighted", "random", "alternating"),
) -> Mixture:
    order = draw(st.sampled_from(orders))
    asks = order == "weighted" or (order == "random" and draw(st.booleans()))
    weights = {name: draw(weight) for name in names} if asks else {}
    assume(not asks or any(weights.values()))
    return Mixture(
        order,
        weights,
        pattern=draw(st.lists(st.sampled_from(names), min_size=1, max_size=6))
        if order == "alternating"
        else (),
        burst=1 if order == "sequential" else draw(st.integers(1, 5)),
        epoch_length=draw(st.one_of(st.sampled_from(["sum", "max", "min"]), st.integers(1, 120))),
        when_exhausted=draw(st.sampled_from([None, "cycle", "end"])),
        seed=draw(st.integers(0, 5)),
        window=draw(st.integers(1, 30)),
    )


@st.composite
def fitting(draw: st.DrawFn) -> tuple[Mixture, Lengths]:
    """A mixture that passes the check."""
    lengths = draw(loaders())
    mixture = draw(mixtures(list(lengths)))
    try:
        check_mixture(mixture, list(lengths), lengths)
    except OptionError:
        assume(False)
    return mixture, lengths


@unhurried
@given(fitting(), st.integers(0, 3))
def test_an_epoch_ends_and_is_as_long_as_it_says(case: tuple[Mixture, Lengths], epoch: int) -> None:
    mixture, lengths = case
    total = epoch_batches(mixture, lengths)
    drawn = [pick.loader for pick in itertools.islice(schedule(mixture, lengths, epoch), total + 1)]
    assert 0 < len(drawn) == total
    counts = Counter(drawn)
    if mixture.order != "random":
        assert {name: counts[index] for index, name in enumerate(lengths)} == planned(mixture, lengths, epoch)
    for index, length in enumerate(lengths.values()):
        assert mixture.cycles or length is None or counts[index] <= length


@unhurried
@given(fitting(), st.integers(0, 3), st.data())
def test_the_middle_of_a_schedule_is_the_same_from_anywhere(
    case: tuple[Mixture, Lengths], epoch: int, data: st.DataObject
) -> None:
    whole = list(schedule(*case, epoch))
    position = data.draw(st.integers(0, len(whole)))
    assert list(schedule(*case, epoch, position)) == whole[position:]


@unhurried
@given(loaders(endless=False), st.data(), st.integers(1, 300), st.integers(0, 3))
def test_quotas_sum_to_the_epoch_and_are_within_one_of_the_exact_share(
    lengths: Lengths, data: st.DataObject, total: int, epoch: int
) -> None:
    mixture = replace(
        data.draw(mixtures(list(lengths), ["weighted"])), epoch_length=total, when_exhausted="cycle"
    )
    quotas, sum_ = planned(mixture, lengths, epoch), sum(map(Fraction, mixture.weights.values()))
    assert sum(quotas.values()) == total
    for name, quota in quotas.items():
        assert abs(quota - total * Fraction(mixture.weights[name]) / sum_) < 1


@unhurried
@given(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 200)), min_size=1, max_size=8), st.integers(1, 7))
def test_every_beginning_of_a_weighted_epoch_is_within_one_burst_of_its_share(
    parts: list[int], burst: int
) -> None:
    """For single batches that is: the exact share, rounded up or down, at every moment. So no loader waits for long, either."""
    lengths: Lengths = {str(number): None for number in range(len(parts))}
    total = sum(parts)
    mixture = Mixture(
        "weighted", dict(zip(lengths, map(float, parts), strict=True)), burst=burst, epoch_length=total
    )
    counts, last = [0] * len(parts), [0] * len(parts)
    for at, pick in enumerate(schedule(mixture, lengths), 1):
        counts[pick.loader] += 1
        assert at - last[pick.loader] <= 2 * burst * math.ceil(total / parts[pick.loader])
        last[pick.loader] = at
        for count, part in zip(counts, parts, strict=True):
            assert abs(count * total - part * at) < burst * total
    assert counts == parts


@unhurried
@given(loaders(endless=False), st.data())
def test_an_epoch_that_is_the_sum_uses_every_batch_once(lengths: Lengths, data: st.DataObject) -> None:
    mixture = data.draw(mixtures(list(lengths)))
    mixture = replace(
        mixture, epoch_length="sum", when_exhausted=None if mixture.order == "sequential" else "end"
    )
    taking_part = set(mixture.pattern) or {name for name in lengths if mixture.weights.get(name, 1)}
    counts = Counter(list(lengths)[pick.loader] for pick in schedule(mixture, lengths))
    assert counts == {name: length for name, length in lengths.items() if name in taking_part}


@unhurried
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 4), st.integers(2, 12), st.data())
def test_a_schedule_that_repeats_itself_is_the_one_worked_out_in_full(
    parts: list[int], burst: int, times: int, data: st.DataObject
) -> None:
    quotas = {index: part * times for index, part in enumerate(parts)}
    in_full = [index for index, run in _spread(quotas, burst, dict.fromkeys(quotas, 0)) for _ in range(run)]
    position = data.draw(st.integers(0, len(in_full) - 1))
    counts = Counter(in_full[:position])
    again = interleave(quotas, burst, {index: counts[index] for index in quotas})
    assert [index for index, run in again for _ in range(run)] == in_full[position:]


# ---- the cursor ------------------------------------------------------------------------------------------------------


def through_json(cursor: MixtureCursor) -> Any:
    return json.loads(json.dumps(cursor.state_dict()))


@unhurried
@given(fitting(), st.integers(0, 3))
def test_a_cursor_draws_the_schedule(case: tuple[Mixture, Lengths], epoch: int) -> None:
    cursor = MixtureCursor(*case, epoch)
    drawn = list(cursor)
    assert drawn == [pick.loader for pick in schedule(*case, epoch)]
    assert cursor.position == cursor.total == len(drawn)
    assert list(cursor.counts.values()) == [drawn.count(index) for index in range(len(case[1]))]
    assert next(cursor, None) is None, "the end stays the end"


class Story:
    """A run with changes on the way, told to a cursor step by step; the same from any step on."""

    def __init__(
        self, cursor: MixtureCursor, changes: dict[int, tuple[Mixture, Lengths]], real: dict[str, int]
    ) -> None:
        self.cursor, self.changes, self.real = cursor, changes, real
        self.drawn: list[tuple[int, int]] = []

    def step(self, number: int) -> None:
        """One batch, from loaders that turn out to have `real` batches a pass where nobody knew."""
        cursor = self.cursor
        if number in self.changes:
            cursor.revise(*self.changes[number])
        while True:
            index = next(cursor, None)
            if index is None:
                self.drawn.append((-1, cursor.epoch))
                cursor.begin(cursor.epoch + 1)
                return
            _, read = cursor.reading(index)
            if read - 1 < self.real.get(cursor.names[index], 10**9) or cursor.ended(index):
                self.drawn.append((index, cursor.reading(index)[0]))
                return


@unhurried
@given(st.data())
def test_a_cursor_saved_at_any_batch_continues_as_if_it_had_not_stopped(data: st.DataObject) -> None:
    mixture, lengths = data.draw(fitting())
    changes = {step: data.draw(fitting()) for step in data.draw(st.sets(st.integers(0, 60), max_size=3))}
    everything: Lengths = {
        name: length for _, each in ((mixture, lengths), *changes.values()) for name, length in each.items()
    }
    changes = {
        step: (new, {name: everything[name] for name in each}) for step, (new, each) in changes.items()
    }
    lengths = {name: everything[name] for name in lengths}
    for new, each in ((mixture, lengths), *changes.values()):
        try:
            check_mixture(new, list(each), each)
        except OptionError:
            assume(False)
    real = {
        name: data.draw(st.integers(1, 12))
        for name, length in everything.items()
        if length is None and data.draw(st.booleans())
    }
    saved_at = data.draw(st.integers(0, 80))

    told = Story(MixtureCursor(mixture, lengths), changes, real)
    for number in range(100):
        if number == saved_at:
            state, before, counts = through_json(told.cursor), len(told.drawn), told.cursor.counts
        told.step(number)

    again = Story(MixtureCursor(mixture, lengths), changes, real)
    again.cursor.revise(Mixture(epoch_length=1), everything)  # the loaders that were added are there again
    again.cursor.load_state_dict(state)
    assert again.cursor.counts == counts
    assert through_json(again.cursor) == state
    for number in range(saved_at, 100):
        again.step(number)
    assert again.drawn == told.drawn[before:]
    assert through_json(again.cursor) == through_json(told.cursor)


@unhurried
@given(fitting(), st.data())
def test_fetching_ahead_sees_what_will_be_drawn_whatever_is_changed_meanwhile(
    case: tuple[Mixture, Lengths], data: st.DataObject
) -> None:
    cursor = MixtureCursor(*case)
    for _ in range(data.draw(st.integers(0, cursor.total - 1))):
        next(cursor)
    ahead = cursor._window[cursor._at :]
    names = list(case[1])
    cursor.revise(
        Mixture("alternating", pattern=names[:1], epoch_length=cursor.total + 50, when_exhausted="cycle")
    )
    assert [next(cursor) for _ in ahead] == ahead
    if cursor.position < cursor.total:
        assert next(cursor) == 0
