"""The step of one rank among several: an update is made by all ranks, or by none."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.strategy_cases import MAKERS
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]


@pytest.fixture
def found(from_strategy_cases: Found) -> Found:
    return from_strategy_cases


@pytest.mark.parametrize("name", [*MAKERS, "fsdp"])
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_by_all(found: Found, name: str) -> None:
    for far, steps, expected, heard in found[f"{name}: not finite"]:
        assert far < CLOSE and steps == expected == 5 and heard == [["nonfinite", 3]]


@pytest.mark.parametrize("name", [*MAKERS, "fsdp"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_left_out_by_all(found: Found, name: str) -> None:
    for far, steps, expected, heard in found[f"{name}: gradient not finite"]:
        assert far < CLOSE and steps == expected == 5 and heard == [["nonfinite", 3]]
    for is_finite, steps, heard in found[f"{name}: not finite by hand"]:
        assert is_finite and steps == 5 and heard == [["nonfinite", 3]]


@pytest.mark.parametrize("name", ["overflow, fsdp", "overflow, ddp"])
def test_an_overflow_on_one_rank_skips_the_update_on_all(found: Found, name: str) -> None:
    one, other = found[name]
    assert one == other
    assert one[3][0] == "nonfinite"


@pytest.mark.parametrize("name", [*MAKERS, "fsdp"])
def test_a_manual_step_may_update_several_times(found: Found, name: str) -> None:
    assert max(found[f"{name}: manual"]) < CLOSE
