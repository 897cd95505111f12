"""A running reduction of one value: exact, bounded in memory, and nothing read from the device."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics.reads import CountReads

from hookline.metrics.accumulator import FOLD_AFTER, Accumulator

numbers = st.floats(-1e6, 1e6, allow_nan=False)


weighted = st.lists(st.tuples(numbers, st.integers(1, 512)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(weighted, st.integers(1, 7), st.booleans())
def test_a_weighted_mean_is_exact_however_it_was_folded(
    values: list[tuple[float, int]], fold_every: int, as_tensor: bool
) -> None:
    total = Accumulator("mean")
    for index, (value, weight) in enumerate(values):
        total.add(torch.tensor(value, dtype=torch.float64) if as_tensor else value, weight)
        if index % fold_every == 0:
            total.fold()
    expected = math.fsum(v * w for v, w in values) / sum(w for _, w in values)
    assert float(total.compute()) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.lists(numbers, min_size=1, max_size=20), st.integers(1, 5), st.booleans())
def test_sum_min_max_and_last_do_not_depend_on_folding(
    values: list[float], fold_every: int, as_tensor: bool
) -> None:
    expected = {"sum": math.fsum(values), "min": min(values), "max": max(values), "last": values[-1]}
    for reduce, wanted in expected.items():
        total = Accumulator(reduce)
        for index, value in enumerate(values):
            total.add(torch.tensor(value, dtype=torch.float64) if as_tensor else value, 3)
            if index % fold_every == 0:
                total.fold()
        assert float(total.compute()) == pytest.approx(wanted, rel=1e-9, abs=1e-6)


def test_a_mean_over_many_float32_values_keeps_its_digits() -> None:
    total = Accumulator()
    for _ in range(20_000):
        total.add(torch.tensor(0.1), 1)
    assert float(total.compute()) == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


def test_memory_stays_bounded_without_reading_anything() -> None:
    total = Accumulator()
    with CountReads() as counter:
        for _ in range(3 * FOLD_AFTER):
            total.add(torch.tensor(1.0), 1)
        assert len(total.values) < FOLD_AFTER
    assert counter.reads == []


def test_numbers_and_tensors_of_one_element_may_be_mixed() -> None:
    total = Accumulator()
    for value in (1.0, torch.tensor(2.0), torch.tensor([3.0]), torch.tensor(4)):
        total.add(value, 1)
    assert float(total.compute()) == 2.5


def test_nothing_logged_gives_nothing() -> None:
    assert Accumulator().compute() is None
