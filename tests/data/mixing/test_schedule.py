"""Mixtures of loaders: what each setting draws, what is refused, what is said about it before the run."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from hookline import OptionError
from hookline.data.mixing import (
    Mixture,
    check_mixture,
    describe_mixture,
    epoch_batches,
    planned,
    proportions,
    schedule,
)

Lengths = dict[str, int | None]


def picks(mixture: Mixture, lengths: Lengths, epoch: int = 0, position: int = 0) -> str:
    names = list(lengths)
    return "".join(names[pick.loader] for pick in schedule(mixture, lengths, epoch, position))


def refused(*args: Any, lengths: Lengths | None = None, names: list[str] | None = None, **kwargs: Any) -> str:
    lengths = {"web": 5, "code": 3} if lengths is None else lengths
    with pytest.raises(OptionError) as error:
        check_mixture(Mixture(*args, **kwargs), names or list(lengths), lengths)
    return str(error.value)


# ---- the orders ------------------------------------------------------------------------------------------------------


def test_by_default_loaders_take_turns_and_every_batch_comes_once() -> None:
    assert picks(Mixture(), {"a": 4, "b": 2}) == "ababaa"


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({"order": "sequential"}, "aaaabb"),
        ({"order": "sequential", "epoch_length": 9}, "aaaabbaaa"),
        ({"order": "sequential", "epoch_length": 9, "when_exhausted": "end"}, "aaaabb"),
        ({"order": "sequential", "epoch_length": "max"}, "aaaa"),
        ({"order": "round_robin", "when_exhausted": "cycle"}, "ababab"),
        ({"order": "round_robin", "burst": 2}, "aabbaa"),
        ({"order": "round_robin", "burst": 3}, "aaabba"),
        ({"order": "round_robin", "epoch_length": "min"}, "ab"),
        ({"order": "round_robin", "epoch_length": "max"}, "abab"),
        ({"order": "alternating", "pattern": ["b", "a", "a"]}, "baabaa"),
        ({"order": "alternating", "pattern": ["b", "a", "a"], "burst": 2}, "bbaaaa"),
        ({"order": "alternating", "pattern": ["a"]}, "aaaa"),
        ({"order": "weighted", "weights": {"a": 1, "b": 1}}, "ababab"),
        ({"order": "weighted", "weights": {"a": 2, "b": 1}}, "aabaab"),
        ({"order": "weighted", "weights": {"a": 0, "b": 1}}, "bbbbbb"),
        ({"order": "weighted", "weights": {"a": 1, "b": 1}, "when_exhausted": "end"}, "aabaab"),
        ({"order": "weighted", "weights": {"a": 2, "b": 1}, "epoch_length": 12, "burst": 2}, "aaaabbaaaabb"),
    ],
)
def test_what_a_mixture_of_four_and_two_batches_draws(settings: dict[str, Any], drawn: str) -> None:
    assert picks(Mixture(**settings), {"a": 4, "b": 2}) == drawn


def test_a_weighted_mixture_spreads_a_rare_loader_over_the_epoch() -> None:
    drawn = picks(Mixture("weighted", {"a": 9, "b": 1}, epoch_length=30), {"a": 10, "b": 10})
    assert [drawn[at : at + 10].count("b") for at in (0, 10, 20)] == [1, 1, 1]


def test_many_rare_loaders_do_not_come_in_one_lump() -> None:
    """Ordering batches by their ideal times would put fifty loaders with one batch each in a row."""
    names = [f"rare{number}" for number in range(50)]
    mixture = Mixture("weighted", {"big": 50, **dict.fromkeys(names, 1)}, epoch_length=100)
    drawn = [pick.loader == 0 for pick in schedule(mixture, {"big": 100, **dict.fromkeys(names, 5)})]
    assert drawn == [True, False] * 50


def test_equal_remainders_take_turns_from_epoch_to_epoch() -> None:
    mixture = Mixture("weighted", {"a": 1, "b": 1}, epoch_length=3)
    assert [planned(mixture, {"a": 9, "b": 9}, epoch) for epoch in range(3)] == [
        {"a": 2, "b": 1},
        {"a": 1, "b": 2},
        {"a": 2, "b": 1},
    ]


def test_a_random_mixture_follows_its_seed_and_the_epoch_alone() -> None:
    lengths: Lengths = {"a": 10, "b": 10}
    mixture = Mixture("random", {"a": 3, "b": 1}, epoch_length=200)
    random.seed(1)
    first, before = picks(mixture, lengths), random.getstate()
    random.seed(2)
    assert picks(mixture, lengths) == first
    random.seed(1)
    picks(mixture, lengths)
    assert random.getstate() == before, "the user's random numbers are left alone"
    assert picks(mixture, lengths, epoch=1) != first
    assert picks(Mixture("random", {"a": 3, "b": 1}, epoch_length=200, seed=1), lengths) != first
    assert 130 < first.count("a") < 170


def test_the_random_picks_of_a_seed_stay_the_same_from_version_to_version() -> None:
    """A run is resumed by drawing them again, perhaps by a later version."""
    assert (
        picks(Mixture("random", epoch_length=24, seed=7), {"a": 9, "b": 9, "c": 9})
        == "accbcccccccacbaccbabbcab"
    )


def test_random_without_weights_uses_every_batch_once() -> None:
    drawn = picks(Mixture("random"), {"a": 40, "b": 160, "c": 1})
    assert Counter(drawn) == {"a": 40, "b": 160, "c": 1}


def test_a_pick_says_when_its_loader_starts_again() -> None:
    drawn = list(schedule(Mixture("round_robin", epoch_length=8), {"a": 2, "b": None}))
    assert [pick.restart for pick in drawn if pick.loader == 0] == [False, False, True, False]
    assert not any(pick.restart for pick in drawn if pick.loader == 1)
    later = list(schedule(Mixture("round_robin", epoch_length=8), {"a": 2, "b": None}, position=4))
    assert later == drawn[4:]


@pytest.mark.parametrize("order", ["sequential", "round_robin", "weighted", "random"])
def test_a_fixed_number_of_batches_works_with_an_endless_loader(order: Any) -> None:
    weights = {"a": 1.0, "b": 1.0} if order == "weighted" else {}
    assert len(picks(Mixture(order, weights, epoch_length=50), {"a": 3, "b": None})) == 50


def test_the_shortest_of_the_finite_loaders_sets_the_length_beside_an_endless_one() -> None:
    assert epoch_batches(Mixture(epoch_length="min"), {"a": 5, "stream": None, "b": 7}) == 5


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_loaders_that_cannot_be_mixed_are_refused_by_name() -> None:
    assert "no loader to draw from" in refused(lengths={})
    assert "the loader 'code' is empty (0 batches)" in refused(lengths={"web": 5, "code": 0})
    assert "2 loaders are named 'web'" in refused(names=["web", "code", "web"])


@pytest.mark.parametrize("length", ["sum", "max"])
def test_an_endless_loader_needs_a_length_of_epoch_that_exists(length: Any) -> None:
    text = refused(epoch_length=length, lengths={"web": 5, "code": None, "math": None})
    assert (
        f"epoch_length={length!r}, but 'code', 'math' have no length; give a number of batches, or 'min'"
        in text
    )
    assert "'web' has no length; give a number of batches." in refused(
        epoch_length="min", lengths={"web": None}
    )


def test_a_sequence_must_get_past_every_loader() -> None:
    text = refused("sequential", epoch_length=10, lengths={"web": None, "code": 3})
    assert "order='sequential' would never get past 'web'" in text
    check_mixture(Mixture("sequential", epoch_length=10), ["code", "web"], {"code": 3, "web": None})


def test_what_may_not_be_meant_is_reported_not_refused() -> None:
    lengths: Lengths = {"web": 100, "code": 100}
    names = list(lengths)
    assert check_mixture(Mixture("weighted", {"web": 0.9, "code": 0.1}), names, lengths) == []
    (never,) = check_mixture(
        Mixture("weighted", {"web": 0.999, "code": 0.001}, epoch_length=20), names, lengths
    )
    assert "contains no batch of 'code'" in never
    (never,) = check_mixture(Mixture("sequential", epoch_length="min"), names, lengths)
    assert "contains no batch of 'code'" in never
    (shorter,) = check_mixture(Mixture(epoch_length=500, when_exhausted="end"), names, lengths)
    assert "200 batches, not 500" in shorter
    (moot,) = check_mixture(
        Mixture("weighted", {"web": 0.9, "code": 0.1}, when_exhausted="end"), names, lengths
    )
    assert "The weights cannot be met" in moot and "'web' 50.0% instead of 90.0%" in moot


def test_a_weight_of_nothing_is_a_loader_left_out_on_purpose() -> None:
    assert check_mixture(Mixture("weighted", {"a": 1, "b": 0}), ["a", "b"], {"a": 3, "b": 3}) == []


# ---- words -----------------------------------------------------------------------------------------------------------


def test_an_epoch_is_described_before_it_runs() -> None:
    mixture = Mixture("weighted", {"web": 3, "code": 1}, epoch_length=40)
    assert describe_mixture(mixture, {"web": 50, "code": 4}).splitlines() == [
        "weighted: 40 batches an epoch; exhausted loaders start again",
        "  web    75.0%  30 batches of 50",
        "  code   25.0%  10 batches, 2.5 times all 4",
        "  begins: web web web code web web web code web web web code web web web code web web web code ...",
    ]
    assert describe_mixture(Mixture(burst=2), {"a": 2, "b": 2}).splitlines() == [
        "round_robin, 2 in a row: 4 batches an epoch (sum); exhausted loaders end",
        "  a  2 batches, all of them once",
        "  b  2 batches, all of them once",
        "  begins: a a b b",
    ]


def test_a_random_epoch_is_described_as_an_expectation_with_its_real_beginning() -> None:
    mixture, lengths = Mixture("random", {"a": 1, "b": 0}, epoch_length=30, seed=3), {"a": None, "b": 4}
    lines = describe_mixture(mixture, lengths, picks=3).splitlines()
    assert lines[0].startswith("random, seed 3: 30 batches")
    assert lines[1].endswith("about 30 batches of an endless loader")
    assert lines[2].endswith("0 batches of 4, left out")
    assert lines[3] == "  begins: a a a ..."


def test_describing_and_checking_a_huge_epoch_draws_next_to_nothing() -> None:
    lengths: Lengths = {"a": 10**12, "b": 10**11, "c": 7}
    for mixture in (
        Mixture(),
        Mixture("sequential", epoch_length=10**13),
        Mixture("weighted", {"a": 1, "b": 1, "c": 1}),
    ):
        check_mixture(mixture, list(lengths), lengths)
        assert describe_mixture(mixture, lengths)
        assert sum(planned(mixture, lengths).values()) == epoch_batches(mixture, lengths)


def test_what_was_reached_stands_beside_what_was_asked() -> None:
    parts = proportions({"web": 30, "code": 10}, {"web": 1, "code": 1})
    assert parts["web"] == (0.75, 0.5) and parts["code"].reached == 0.25 and parts["code"].asked == 0.5
    assert proportions({"web": 0}, {"web": 1, "new": 1})["new"] == (0.0, 0.5)
