"""Metrics over ranks: all ranks see the same values, and they are those of one process that trains on all of the data."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from ranks import measured_script
from ranks.torchrun import torchrun

WORLD = 2
SCRIPT = (
    "import sys\nfrom pathlib import Path\nfrom ranks.measured_script import main\nmain(Path(sys.argv[1]))\n"
)
Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("measured")
    done = torchrun(SCRIPT, folder, str(folder), ranks=WORLD, deadline=300)
    assert done.code == 0, done.output
    return [
        dict(json.loads(line) for line in (folder / f"told-{rank}.jsonl").read_text().splitlines())
        for rank in range(WORLD)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with contextlib.chdir(
        tmp_path_factory.mktemp("alone")
    ):  # it is made before a test has a directory of its own
        return measured_script.all_ways(WORLD)


def of_all(values: dict[str, float]) -> dict[str, Any]:
    """Without what each rank logs for itself; near enough, because sums are made in another order."""
    return {name: pytest.approx(value, rel=1e-5) for name, value in values.items() if "rank" not in name}


def without_ranks(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if "rank" not in name}


def test_results_are_those_of_one_process_on_the_same_data(told: Told, alone: dict[str, Any]) -> None:
    assert without_ranks(told[0]["all ways"]["metrics"]) == of_all(alone["metrics"])


def test_every_row_is_that_of_one_process_under_the_same_step(told: Told, alone: dict[str, Any]) -> None:
    ours, theirs = (
        [(step, without_ranks(row)) for step, row in rows if without_ranks(row)]
        for rows in (told[0]["all ways"]["rows"], alone["rows"])
    )
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    for (_, row), (_, expected) in zip(ours, theirs, strict=True):
        assert row == of_all(expected)


def test_all_ranks_hear_the_same_at_every_event_that_decisions_are_made_at(
    told: Told, alone: dict[str, Any]
) -> None:
    first, second = (each["all ways"]["heard"] for each in told)
    assert first == second
    assert [event for event, _ in first] == [event for event, _ in alone["heard"]]
    for (_, ours), (_, theirs) in zip(first, alone["heard"], strict=True):
        assert without_ranks(ours) == of_all(theirs)


def test_only_rank_zero_writes_rows_and_names_of_other_ranks_are_in_them(told: Told) -> None:
    assert told[1]["all ways"]["rows"] == []
    last = told[0]["all ways"]["rows"][-1][1]
    assert (last["of_rank_0_epoch"], last["of_rank_1_epoch"]) == (0.0, 1.0)
    assert told[0]["all ways"]["metrics"]["of_rank_1"] == 1.0


def test_what_hooks_log_between_rows_is_reduced_and_belongs_to_its_step(told: Told) -> None:
    rows = [(step, row["rank"]) for step, row in told[0]["all ways"]["rows"] if "rank" in row]
    assert rows == [(step, 0.5) for step in range(1, 13)]


def test_a_hook_of_rank_zero_gets_the_loss_of_all_ranks(told: Told, alone: dict[str, Any]) -> None:
    losses = told[0]["listened"]["losses"]
    expected = {step: row["train/loss"] for step, row in alone["rows"] if "lr" in row}
    assert {step: losses[step - 1] for step in (2, 4, 6)} == {
        step: pytest.approx(expected[step], rel=1e-5) for step in (2, 4, 6)
    }
    assert [loss for loss, _ in told[0]["listened"]["ctx"]] == losses
    assert [tokens for _, tokens in told[0]["listened"]["ctx"]] == [16, 32, 48, 64, 80, 88], (
        "tokens of all ranks"
    )
    assert told[1]["listened"]["losses"] == []


def test_a_value_that_only_rank_zero_logs_reaches_all_and_makes_no_rank_wait(told: Told) -> None:
    assert [2, {"only_zero": 7.0}] in told[0]["listened"]["rows"]
    assert all(each["listened"]["newest"]["only_zero"] == 7.0 for each in told)


def test_a_listener_on_another_rank_hears_reduced_rows(told: Told) -> None:
    heard = told[1]["listened"]["heard"]
    assert heard == [row for _, row in told[0]["listened"]["rows"]]
    assert told[0]["listened"]["heard"] == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["", " with torchmetrics"])
def test_uneven_validation_measures_every_sample_once(strategy: str, kind: str, told: Told) -> None:
    if kind and measured_script.torchmetrics is None:
        pytest.skip("torchmetrics is not installed")
    for each in told:
        found = each[strategy + kind]
        assert (
            found["metrics"]["samples"],
            found["metrics"]["val/batches"],
            found["metrics"]["val/mean"],
        ) == (6.0, 3.0, 1.0)
        assert (found["validated"]["samples"], found["validated"]["val/mean"]) == (9.0, 4.0)
        assert math.isfinite(found["validated"]["val/loss"])
        assert found == told[0][strategy + kind]
    assert told[0]["ddp"]["metrics"]["val/loss"] == pytest.approx(told[0]["fsdp"]["metrics"]["val/loss"])


def test_one_rank_that_ends_a_test_ends_it_for_all_after_the_same_batch(told: Told) -> None:
    assert told[0]["stopped"] == told[1]["stopped"] == 2


def test_each_rank_predicts_its_own_samples(told: Told) -> None:
    assert [each["predicted"] for each in told] == [[2, 1], [2]]
