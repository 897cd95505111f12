"""Hooks that come, go, fail or ask on one rank only: no rank waits for ever, and the ranks' weights stay the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from ranks.hook_cases import STRATEGIES
from ranks.torchrun import torchrun
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]
both = pytest.mark.parametrize("name", STRATEGIES)


@pytest.fixture(name="found")
def _found(from_hook_cases: Found) -> Found:
    """What each case found, by rank, from one launch."""
    return from_hook_cases


def same(cases: list[Any], step: int = 8) -> list[list[Any]]:
    """What the hooks saw on each rank, if both ended at the same place."""
    assert all("error" not in each for each in cases), cases
    assert [each["step"] for each in cases] == [step, step] and cases[0]["weights"] == cases[1]["weights"]
    return [each["seen"] for each in cases]


@both
def test_a_hook_added_on_one_rank_makes_no_rank_wait_and_soon_gets_its_facts(found: Found, name: str) -> None:
    _, (seen,) = same(found[f"{name}: comes"])
    assert [step for step, _, _ in seen] == [*range(2, 9)]
    assert all(math.isfinite(value) for each in seen[3:] for value in each)


@both
def test_a_hook_that_is_switched_off_on_one_rank_continues_on_the_other(found: Found, name: str) -> None:
    (zero,), (one,) = same(found[f"{name}: goes"])
    assert [step for step, _, _ in zero] == [*range(1, 9)] and [step for step, _, _ in one] == [1]


@both
def test_a_hook_that_fails_on_one_rank_is_switched_off_on_all(found: Found, name: str) -> None:
    (zero,), (one,) = same(found[f"{name}: fails"])
    assert one == [[1]] and 2 <= len(zero) <= 4
    assert all("fails" not in each["on"] for each in found[f"{name}: fails"])


@both
def test_a_hook_for_rank_zero_may_be_registered_there_alone_and_reads_what_takes_all_ranks(
    found: Found, name: str
) -> None:
    (seen,), _ = same(found[f"{name}: on zero"])
    assert len(seen) == 8 and all(math.isfinite(value) for each in seen for value in each)


@both
def test_an_update_that_a_hook_of_one_rank_skips_is_skipped_by_all_also_if_it_came_late(
    found: Found, name: str
) -> None:
    same(found[f"{name}: skips"], 5)


@both
def test_a_range_test_finds_one_curve_for_all_ranks(found: Found, name: str) -> None:
    zero, one = found[f"{name}: range test"]
    assert zero == one and len(zero[1]) > 5


def test_a_guard_looks_at_shards_of_which_some_are_empty(found: Found) -> None:
    same(found["guard"])


def test_a_norm_of_shards_that_was_not_requested_is_an_error_that_says_how_to_request_it(
    found: Found,
) -> None:
    for each in found["reads"]:
        assert each["error"] == "HooklineError" and "def on_step_end(self, grad_norm)" in each["text"]


def test_rank_zero_alone_can_ask_for_the_norm_of_a_manual_update(found: Found) -> None:
    (seen,), _ = same(found["manual"])
    assert all(norm > 0 for _, _, norm in seen)


def test_batch_norm_trains_alike_with_shards_and_copies_in_half_precision_too(found: Found) -> None:
    for rank in found["batch norm"]:
        (exact, _), (half, _) = rank
        assert exact < CLOSE and half < 1e-2


def test_every_rank_measures_with_the_averages_that_are_saved(found: Found) -> None:
    zero, one = found["batch norm"]
    assert [averages for _, averages in zero] == [averages for _, averages in one]


def test_a_validation_that_all_ranks_ask_for_inside_a_hook_is_of_all_their_data(found: Found) -> None:
    zero, one = found["validate on all"]
    assert zero == one and math.isfinite(zero[0]["val/loss"])


def test_what_ranks_agree_on_after_a_batch_is_read_one_batch_later(found: Found) -> None:
    for order in found["questions"]:
        assert order and [kind for kind, _ in order] == ["asks", "reads"] * (len(order) // 2)
        assert all(read == asked - 1 for (_, asked), (_, read) in zip(order[::2], order[1::2], strict=True))


def test_a_validation_that_one_rank_asks_for_alone_is_an_error_that_names_the_other(found: Found) -> None:
    zero, one = found["validate on one"]
    assert zero["error"] == "HooklineError" and "on rank 0, but not on rank 1" in zero["text"]
    assert "Rank 0 has failed: HooklineError: validate()" in one["text"] + one["notes"]


def test_a_tracker_gets_the_checkpoint_of_all_ranks_from_rank_zero(found: Found) -> None:
    for case in found["logged"][0]:
        assert [(name, step) for name, _, step in case] == [("step=4", 4), ("step=8", 8)]
        assert all({"manifest.json", "rank-1.safetensors"} <= set(files) for _, files, _ in case)


REDUCES = """
import sys
from tiny import Net, batches, quiet
from hookline import Hook


class Means(Hook):
    def on_train_start(self, trainer, rank):
        trainer.strategy.barrier()
        sys.stdout.write(f"MEAN {trainer.strategy.reduce(float(rank))}\\n")
        sys.stdout.flush()


class OnZero(Means):
    ranks = "zero"


quiet(hooks=[Means()]).fit(Net(), batches(2))
quiet(hooks=[OnZero()]).fit(Net(), batches(2))
"""


def test_a_hook_of_rank_zero_that_calls_what_takes_all_ranks_is_refused_and_does_not_hang(
    tmp_path: Path,
) -> None:
    outcome = torchrun(REDUCES, tmp_path, deadline=120)
    assert outcome.lines("MEAN") == ["0.5", "0.5"], outcome.output
    assert (
        "HookError: strategy.barrier() needs all ranks, and hook 'on_zero' has ranks='zero'" in outcome.output
    )
