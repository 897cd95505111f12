"""Schedules that survive a killed rank to the bit, collections at the same steps, and a batch size that fits on all ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ranks.torchrun import torchrun

Found = dict[str, list[Any]]


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each case found, by rank, from one job that was started twice."""
    launcher = ("--standalone", "--max-restarts", "1")
    source = "from ranks.schedule_cases import main\nmain()\n"
    outcome = torchrun(source, tmp_path_factory.mktemp("job"), launcher=launcher)
    assert outcome.code == 0, outcome.output
    results: dict[str, dict[int, Any]] = {}
    for name, rank, value in map(json.loads, outcome.lines("CASE ")):
        results.setdefault(name, {})[rank] = value
    return {name: [by_rank[0], by_rank[1]] for name, by_rank in results.items()}


def test_a_job_that_is_killed_inside_a_window_makes_the_same_updates_to_the_bit(found: Found) -> None:
    for resumed, whole in zip(found["resumed"], found["whole"], strict=True):
        assert "error" not in resumed, resumed
        assert resumed["weights"] == whole["weights"]
        count = len(resumed["values"])
        assert 0 < count < len(whole["values"]) and whole["values"][-count:] == resumed["values"]
        # batches before each update: windows of 3, 3, 1, 1, then 4, 2, 2, then 2
        assert [each[1] for each in whole["values"]] == [2, 5, 6, 7, 11, 13, 15, 17, 19, 21, 23]
    assert found["whole"][0]["weights"] == found["whole"][1]["weights"]


def test_ranks_collect_garbage_after_the_same_steps(found: Found) -> None:
    zero, one = found["collected"]
    assert zero == one == [zero[0], True, True]
    steps = [each for each in zero[0] if each[1] == 1]
    assert steps == [[3, 1], [6, 1]] and [4, 2] in zero[0] and [8, 2] in zero[0] and [0, 2] in zero[0]


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_memory_that_is_exhausted_on_one_rank_limits_all_and_no_rank_waits(found: Found, where: str) -> None:
    tried = [[2, True], [4, True], [8, False]]
    assert found[f"found: {where}"] == [{"size": 4, "tried": tried}] * 2


def test_ranks_train_with_the_size_as_if_they_had_begun_with_it(found: Found) -> None:
    zero, one = found["trained"]
    assert zero["size"] == one["size"] == 5 and zero["far"] == one["far"] == 0.0
    assert set(zero["sizes"][:-1]) == set(one["sizes"][:-1]) == {5}
    assert zero["weights"] == one["weights"]


def test_a_strategy_whose_forward_communicates_is_refused(found: Found) -> None:
    for each in found["fsdp"]:
        assert each["error"] == "OptionError" and "the forward pass of FSDP does" in each["text"]
