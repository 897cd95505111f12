"""Data over ranks: every sample once, in one order for all of them, whatever loader the user brought; no rank waits in vain."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.dealt_script import Seen, shuffled, train
from ranks.torchrun import torchrun

SCRIPT = (
    "import sys\nfrom pathlib import Path\nfrom ranks.dealt_script import main\nmain(Path(sys.argv[1]))\n"
)
Told = dict[str, list[dict[str, Any]]]


def told_by(world: int, folder: Path) -> Told:
    """What each rank of a job saw, by the names of the runs."""
    done = torchrun(SCRIPT, folder, str(folder), ranks=world, deadline=300)
    assert done.code == 0, done.output
    by_rank = [
        [json.loads(line) for line in (folder / f"told-{world}-{rank}.jsonl").read_text().splitlines()]
        for rank in range(world)
    ]
    return {name: [dict(lines)[name] for lines in by_rank] for name, _ in by_rank[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dealt")


@pytest.fixture(scope="module")
def began(folder: Path) -> dict[str, Any]:
    """A run of one process, of which there is a checkpoint after three batches."""
    with contextlib.chdir(
        folder
    ):  # a fixture of the whole file is made before a test has a directory of its own
        return train(shuffled(23), Seen(3, folder / "cut-1"), max_epochs=2)


@pytest.fixture(scope="module")
def two(folder: Path, began: dict[str, Any]) -> Told:
    return told_by(2, folder)


@pytest.fixture(scope="module")
def three(folder: Path, two: Told) -> Told:
    return told_by(3, folder)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest, two: Told, three: Told) -> tuple[int, Told]:
    return request.param, two if request.param == 2 else three


def global_batches(by_rank: list[dict[str, Any]], epoch: int = 0) -> list[list[int]]:
    """The samples of all ranks by turn, in the order in which they were dealt."""
    turns = [[each[2] for each in told["turns"] if each[0] == epoch] for told in by_rank]
    assert len({len(each) for each in turns}) == 1, "every rank has as many turns"
    longest = [max(map(len, batches)) for batches in zip(*turns, strict=True)]
    return [
        [batch[place] for place in range(n) for batch in batches if place < len(batch)]
        for n, batches in zip(longest, zip(*turns, strict=True), strict=True)
    ]


def alone(*given: Any, **options: Any) -> dict[str, Any]:
    """The same on one process."""
    return train(*given, **options)


# ---- every sample once -------------------------------------------------------------------------------------------


def test_the_batches_of_all_ranks_are_those_of_one_process_with_large_batches(
    ranks: tuple[int, Told],
) -> None:
    world, told = ranks
    single = alone(shuffled(batch_size=2 * world), max_epochs=2)
    for epoch in (0, 1):
        expected = [each[2] for each in single["turns"] if each[0] == epoch]
        assert global_batches(told["shuffled"], epoch) == expected
        assert sorted(sum(expected, [])) == list(range(11))
    assert global_batches(told["shuffled"], 0) != global_batches(told["shuffled"], 1), (
        "each epoch has its own order"
    )


def test_a_short_last_batch_trains_as_it_would_on_one_process(ranks: tuple[int, Told]) -> None:
    world, told = ranks
    single = alone(shuffled(batch_size=2 * world), max_epochs=2)
    for each in told["shuffled"]:
        torch.testing.assert_close(each["weights"], single["weights"])


def test_workers_and_prefetching_change_nothing(ranks: tuple[int, Told]) -> None:
    _, told = ranks
    assert global_batches(told["workers"]) == global_batches(told["shuffled"])


def test_batches_of_a_sampler_of_the_users_own_are_dealt_whole(ranks: tuple[int, Told]) -> None:
    world, told = ranks
    first = [each["turns"][0][2] for each in told["batch sampler"]]
    assert first == [[2 * rank, 2 * rank + 1] for rank in range(world)]


@pytest.mark.parametrize(("run", "count"), [("whole batches", 3), ("stream", 1)])
def test_a_rank_without_a_batch_at_the_end_takes_part_and_counts_for_nothing(
    run: str, count: int, ranks: tuple[int, Told]
) -> None:
    world, told = ranks
    assert len({len(each["turns"]) for each in told[run]}) == 1
    assert len({tuple(each["weights"]) for each in told[run]}) == 1
    last = told[run][0]["turns"][-1]
    assert (
        last[3]
        == told[run][0]["samples"]
        == (3 * (2 * world + 1) if run == "whole batches" else 4 * world + 1)
    )
    assert len(last[2]) == count


def test_drop_last_leaves_out_what_is_not_enough_for_all_ranks(ranks: tuple[int, Told]) -> None:
    world, told = ranks
    assert [len(each) for each in global_batches(told["dropped"])] == [2 * world] * (11 // (2 * world))
    assert told["dropped"][0]["metrics"]["samples"] == 6.0, (
        "a validation measures what it does on one process"
    )


def test_a_limit_counts_the_batches_of_each_rank(ranks: tuple[int, Told]) -> None:
    world, told = ranks
    assert [len(each) for each in global_batches(told["limited"])] == [2 * world] * 3


def test_a_distributed_sampler_is_left_alone_and_told_the_epoch(two: Told) -> None:
    first, second = global_batches(two["sampler"], 0), global_batches(two["sampler"], 1)
    assert first != second
    assert set(sum(first, [])) == set(sum(second, [])) == set(range(11))
    assert len(sum(first, [])) == 12, "it pads, as it does everywhere"


def test_sources_of_the_ranks_own_may_have_other_lengths(ranks: tuple[int, Told]) -> None:
    world, told = ranks
    longest = 3 + 2 * (world - 1)
    assert all(len(each["turns"]) == longest for each in told["own parts"])
    assert told["own parts"][0]["samples"] == sum(3 + 2 * rank for rank in range(world))
    assert told["own parts"][-1]["turns"][-1][2] == [20 * (world - 1) + longest - 1]
    assert len({tuple(each["weights"]) for each in told["own parts"]}) == 1
    assert told["own parts"][0]["metrics"]["samples"] == sum(1 + 2 * rank for rank in range(world)), (
        "validated once each"
    )


def test_loaders_that_differ_between_ranks_are_refused_with_the_reason(ranks: tuple[int, Told]) -> None:
    world, told = ranks
    for each in told["other lengths"]:
        # a list cannot have the attribute shards_itself, so it is not advised
        assert "rank 0: 4, rank 1: 5" in each["error"] and "shards_itself" not in each["error"]
    assert all(
        "Seed them with the same value on every rank" in each["error"] for each in told["other generators"]
    )


# ---- counts ------------------------------------------------------------------------------------------------------


def test_samples_and_tokens_are_those_of_all_ranks(ranks: tuple[int, Told]) -> None:
    world, told = ranks
    assert (
        [turn[3] for turn in told["shuffled"][-1]["turns"]][:2] == [2 * world, 4 * world]
        if world == 2
        else [6, 11]
    )
    for each in told["tokens"]:
        assert (each["samples"], each["tokens"]) == (3 * (2 * world + 1), 12 * (2 * world + 1))


def test_a_mixture_draws_from_each_loader_as_it_should_and_counts_over_ranks(ranks: tuple[int, Told]) -> None:
    _, told = ranks
    seen = sum(global_batches(told["mixed"]), [])
    assert {each for each in seen if each < 100} == set(range(15)) and {
        each for each in seen if each >= 100
    } == set(range(100, 105))
    for each in told["mixed"]:
        assert each["samples"] == 25
        assert (
            each["metrics"]["train/dl_web/samples_seen"],
            each["metrics"]["train/dl_code/samples_seen"],
        ) == (15.0, 10.0)
        assert each["metrics"]["train/dl_web/tokens_seen"] == 60.0


# ---- resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["cut", "own parts", "mixed"])
def test_a_resumed_run_continues_exactly(run: str, ranks: tuple[int, Told]) -> None:
    _, told = ranks
    for whole, rest in zip(told[run], told[f"{run}, resumed"], strict=True):
        done = len(whole["turns"]) - len(rest["turns"])
        assert done > 0
        assert rest["turns"] == whole["turns"][done:]
        assert rest["weights"] == whole["weights"]
        assert (rest["samples"], rest["tokens"]) == (whole["samples"], whole["tokens"])


def samples_of(by_rank: list[dict[str, Any]], turns: slice = slice(None)) -> list[int]:
    """Those of the first epoch."""
    return [sample for told in by_rank for turn in told["turns"][turns] if turn[0] == 0 for sample in turn[2]]


@pytest.mark.parametrize("kind", ["", ", stream", ", mixed"])
def test_on_more_ranks_no_sample_is_lost_or_comes_twice(kind: str, two: Told, three: Told) -> None:
    run = {"": "cut", ", stream": "cut stream", ", mixed": "mixed"}[kind]
    before, after = samples_of(two[run], slice(2)), samples_of(three[f"more ranks{kind}"])
    assert before and after
    assert sorted({*before, *after}) == sorted(set(samples_of(two[run])))
    if not kind:
        assert sorted(before + after) == list(range(23))
        assert all(each["samples"] == 46 for each in three["more ranks"])
    assert not set(before) & set(after)


@pytest.mark.parametrize("size", [2, 3])
def test_on_one_process_no_sample_is_lost_or_comes_twice(size: int, two: Told, folder: Path) -> None:
    rest = alone(shuffled(23, batch_size=size), max_epochs=2, resume=folder / "cut-2")
    assert sorted(samples_of(two["cut"], slice(2)) + samples_of([rest])) == list(range(23))
    assert rest["samples"] == 46


def test_what_one_process_began_is_finished_by_two(two: Told, began: dict[str, Any]) -> None:
    assert sorted(samples_of([began], slice(3)) + samples_of(two["from one"])) == list(range(23))
    assert all(each["samples"] == 46 for each in two["from one"])
