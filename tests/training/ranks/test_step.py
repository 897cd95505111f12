"""The step of one rank among several: an update is made by all ranks, or by none."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.strategy_cases import names
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]


@pytest.fixture
def found(from_strategy_cases: Found) -> Found:
    return from_strategy_cases


@pytest.mark.parametrize("name", names("not finite", "fsdp"))
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_by_all(found: Found, name: str) -> None:
    for far, steps, expected, heard in found[f"{name}: not finite"]:
        assert far < CLOSE and steps == expected == 5 and heard == [["nonfinite", 3]]


@pytest.mark.parametrize("name", names("gradient not finite", "fsdp"))
def test_a_gradient_that_is_not_finite_on_one_rank_is_left_out_by_all(found: Found, name: str) -> None:
    for far, steps, expected, heard in found[f"{name}: gradient not finite"]:
        assert far < CLOSE and steps == expected == 5 and heard == [["nonfinite", 3]]
    for is_finite, steps, heard in found[f"{name}: not finite by hand"]:
        assert is_finite and steps == 5 and heard == [["nonfinite", 3]]


@pytest.mark.parametrize("name", names("spoiled buffers", "fsdp"))
def test_a_nan_of_one_rank_leaves_no_trace_in_the_buffers_of_any(found: Found, name: str) -> None:
    assert found[f"{name}: spoiled buffers"] == [[True, 4, [True, True]]] * 2


@pytest.mark.parametrize("name", ["overflow, fsdp", "overflow, ddp"])
def test_an_overflow_on_one_rank_skips_the_update_on_all(found: Found, name: str) -> None:
    one, other = found[name]
    assert one == other
    assert one[3][0] == "nonfinite"


@pytest.mark.parametrize("name", names("manual", "fsdp"))
def test_a_manual_step_may_update_several_times(found: Found, name: str) -> None:
    assert max(found[f"{name}: manual"]) < CLOSE


# ---- Gradients are averaged once per window on all ranks, also where a rank has no loss


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for case in ("no loss on the last batch", "no loss in a window", "skipped", "skipped, no window")
        for name in names(case)
    ],
)
def test_a_rank_without_a_loss_takes_part_and_the_update_is_that_of_the_losses_there_were(
    found: Found, name: str, case: str
) -> None:
    for far, steps, expected in found[f"{name}: {case}"]:
        assert far < CLOSE and steps == expected > 2


@pytest.mark.parametrize("case", [f"{what}, {n}" for what in ("no loss", "skipped") for n in (1, 2, 3)])
def test_where_layers_are_sharded_a_batch_left_out_by_one_rank_is_left_out_by_all(
    found: Found, case: str
) -> None:
    for far, steps, expected in found[f"fsdp: {case}"]:
        assert far < CLOSE and steps == expected > 1


@pytest.mark.parametrize("name", names("short window", "fsdp"))
def test_a_window_that_ends_early_brings_its_gradients_together(found: Found, name: str) -> None:
    for far, steps, expected in found[f"{name}: short window"]:
        assert far < CLOSE and steps == expected == 2


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_names_it(found: Found) -> None:
    for each in (
        *found["stops"],
        *found["stops at the end"],
    ):  # noticed in the next window, or before the run is over
        assert each["error"] == "NonFiniteLoss" and "not finite on rank 1" in each["text"]
