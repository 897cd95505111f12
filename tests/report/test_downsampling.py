"""A picture of a million values shows what all of them would show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.report.downsampling import columns, in_order, min_max, strongest

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.integers(10, 60), st.integers(1, 7))
def test_what_is_drawn_are_true_points_with_both_extremes_and_both_ends(
    values: list[float], most: int, apart: int
) -> None:
    steps, given_values = np.arange(len(values), dtype=float) * apart, np.array(values)
    x, y, means = min_max(steps, given_values, most)
    assert len(x) <= most
    assert set(zip(x, y, strict=True)) <= set(zip(steps, given_values, strict=True))
    assert np.all(np.diff(x) > 0)
    assert (y.min(), y.max()) == (given_values.min(), given_values.max())
    assert (x[0], x[-1]) == (steps[0], steps[-1])
    assert (means is None) == (len(values) <= most)


def test_a_single_spike_among_a_million_is_kept() -> None:
    values = np.zeros(1_000_000)
    values[654_321] = 7.0
    x, y, means = min_max(np.arange(1_000_000.0), values, 500)
    assert 654_321 in x[y == 7.0] and len(x) <= 500
    assert means is not None and means.max() == pytest.approx(7.0 * 249 / 1_000_000, rel=0.01)


def test_smoothing_starts_from_means_not_from_the_middle_of_the_extremes() -> None:
    values = np.where(np.arange(10_000) % 10 == 0, 10.0, 0.0)
    steps = np.arange(10_000.0)
    steps[5_000:] += 50_000  # with a gap, in which buckets are empty
    _, _, means = min_max(steps, values, 102)
    assert means is not None and np.median(means) == pytest.approx(1.0, rel=0.1)


def test_many_values_under_one_step_do_not_break_it() -> None:
    x, y, means = min_max(np.full(1000, 5.0), np.arange(1000.0), 100)
    assert set(x) == {5.0} and {0.0, 999.0} <= set(y)


def test_steps_that_go_back_are_put_in_order_and_what_is_not_finite_is_left_out() -> None:
    steps, values = in_order(np.array([3.0, 1, 2, 4]), np.array([30.0, 10, np.nan, np.inf]))
    assert steps.tolist() == [1, 3] and values.tolist() == [10, 30]


def test_a_column_of_a_heat_map_shows_its_strongest_value() -> None:
    firsts, place = columns(np.arange(10.0), 5)
    assert firsts.tolist() == [0, 2, 4, 6, 8]
    found = strongest(place, np.array([1, 2, -9, 3, np.nan, 1e9, 0, 0, 5, 4]), 5)
    assert found.tolist() == [2, -9, np.inf, 0, 5]


def test_steps_that_a_layer_has_no_value_for_stay_empty() -> None:
    firsts, place = columns(np.array([0.0, 10, 20]), 100)
    assert np.isnan(strongest(place[:2], np.array([1.0, 2.0]), firsts.size)).tolist() == [False, False, True]
