"""Samples that are left out of an order, from a place on."""

from __future__ import annotations

from hookline.data.exclusions import Exclusions, without


def test_a_cut_counts_what_was_read_before_it() -> None:
    assert list(without(range(8), [(0, frozenset({1}))])) == [0, 2, 3, 4, 5, 6, 7]
    assert list(without(range(8), [(3, frozenset({1, 4}))])) == [0, 1, 2, 3, 5, 6, 7]
    assert list(without(range(8), [(0, frozenset({0})), (2, frozenset({5}))])) == [1, 2, 3, 4, 6, 7]
    assert list(without([[0, 1], [1], [2, 1]], [(0, frozenset({1}))])) == [[0], [2]]


def test_they_take_effect_where_the_data_is_opened_next() -> None:
    found = Exclusions()
    assert not found and found.add([4, 2]) == {2, 4} and found.add([2]) == set()
    found.open(0, 0)
    found.add([7])
    assert found.cuts(0) == [(0, frozenset({2, 4}))], "the pass is open"
    saved = found.state_dict(0)
    assert saved == {"exclusions": [[[2, 4], 0, 0], [[7], 1, 0]]}
    found.open(1, 0)
    assert found.cuts(1) == [(0, frozenset({2, 4})), (0, frozenset({7}))] and found.samples == {2, 4, 7}


def test_what_was_added_after_a_checkpoint_holds_from_its_position_on() -> None:
    found = Exclusions()
    found.add([2])
    found.open(0, 0)
    saved = found.state_dict(0)
    found.add([5])
    found.load_state_dict(saved)
    found.open(0, 6)
    assert found.cuts(0) == [(0, frozenset({2})), (6, frozenset({5}))]
    assert found.cuts(1) == [(0, frozenset({2})), (0, frozenset({5}))]
