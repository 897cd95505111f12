"""The figures of a fit as shares, a line and a record."""

from __future__ import annotations

import dataclasses

import pytest

from hookline.run.timings import ENOUGH_SAMPLES, TIMED_PARTS, Timings

MEASURED = Timings(
    62.0, 11.0, 4.0, 2.0, 1.0, batches=500, forward=14.0, backward=20.0, optimizer=4.0, sampled_batches=10
)


def test_the_parts_add_up_to_the_total() -> None:
    assert sum(getattr(MEASURED, part) for part in TIMED_PARTS) == pytest.approx(MEASURED.total)
    assert sum(MEASURED.share(part) for part in TIMED_PARTS) == pytest.approx(1.0)


def test_the_line_says_where_the_time_went() -> None:
    assert str(MEASURED) == (
        "62.0 s = 71% training (forward 23%, backward 32%, optimizer 6%), 18% waiting for data, "
        "6% validation, 3% saving, 2% hooks outside validation and saving"
    )


def test_the_line_leaves_out_what_was_not_measured_or_did_not_happen() -> None:
    assert str(Timings(2.0, 0.001, 0.0, 0.0, None)) == "2.0 s = 100% training, <1% waiting for data"


def test_the_line_names_the_rank_that_waited_longest_if_it_waited_longer() -> None:
    uneven = dataclasses.replace(MEASURED, longest_wait=31.0, longest_wait_rank=3)
    assert ", 18% waiting for data (rank 3: 50%), 6% validation" in str(uneven)
    assert uneven.record()["longest_wait_rank"] == 3
    assert str(dataclasses.replace(MEASURED, longest_wait=12.0, longest_wait_rank=3)) == str(MEASURED)


def test_the_line_says_which_hooks_count_as_hooks() -> None:
    assert str(Timings(10.0, 1.0, 2.0, 0.0, 0.0)).endswith(
        ", 20% validation, 0% hooks outside validation and saving"
    )
    assert str(Timings(10.0, 1.0, 0.0, 0.0, 3.0)).endswith(", 10% waiting for data, 30% hooks")
    assert "hooks" not in str(Timings(10.0, 1.0, 2.0, 0.0, None)) and "hooks" not in str(
        Timings(10.0, 1.0, 0.0, 0.0, 0.0)
    )


@pytest.mark.parametrize(("sampled", "is_shown"), [(ENOUGH_SAMPLES - 1, False), (ENOUGH_SAMPLES, True)])
def test_shares_of_a_few_samples_are_in_the_record_but_not_in_the_line(sampled: int, is_shown: bool) -> None:
    timings = dataclasses.replace(MEASURED, sampled_batches=sampled)
    assert ("forward" in str(timings)) is is_shown
    assert timings.record()["forward"] == 14.0 and timings.record()["sampled_batches"] == sampled


def test_the_record_holds_every_figure() -> None:
    assert MEASURED.record() == {
        "total": 62.0,
        "training": 44.0,
        "data": 11.0,
        "validation": 4.0,
        "saving": 2.0,
        "hooks": 1.0,
        "forward": 14.0,
        "backward": 20.0,
        "optimizer": 4.0,
        "batches": 500,
        "sampled_batches": 10,
    }


def test_nothing_is_divided_by_a_total_of_zero() -> None:
    empty = Timings(0.0, 0.0, 0.0, 0.0, 0.0)
    assert empty.training == 0.0 and empty.share("data") == 0.0 and "0%" in str(empty)
