"""How runs of several ranks begin: what differs is named before anything is trained, and what takes one rank is done by one."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.start_cases import STRATEGIES
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]
both = pytest.mark.parametrize("name", STRATEGIES)


def test_ranks_that_call_different_verbs_are_told_so_at_once(from_hook_cases: Found) -> None:
    for each in from_hook_cases["another verb"]:
        assert (
            each["error"] == "OptionError"
            and "the stage is fit on rank 0, validate on rank 1" in each["text"]
        )


def test_validation_data_that_one_rank_alone_has_is_refused_at_once(from_hook_cases: Found) -> None:
    for each in from_hook_cases["other data"]:
        assert "the data that is passed is train and val on rank 0, train on rank 1" in each["text"], each


def test_ranks_that_would_begin_at_different_checkpoints_are_told_so_at_once(from_hook_cases: Found) -> None:
    for each in from_hook_cases["another start"]:
        assert each["error"] == "OptionError" and "resume= is auto on rank 0, None on rank 1" in each["text"]
    for each in from_hook_cases["other weights"]:
        assert (
            each["error"] == "OptionError" and "checkpoint= is None on rank 0, best on rank 1" in each["text"]
        )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another lr", "lr of group 1 of optimizer 0 (SGD) is 0.1 on rank 0, 0.2 on rank 1"),
        (
            "other betas",
            "betas of group 0 of optimizer 0 (Adam) is [0.9, 0.999] on rank 0, [0.8, 0.99] on rank 1",
        ),
        ("another optimizer", "different optimizers: optimizer 0 is SGD on rank 0, Adam on rank 1. Their"),
        ("another group", "lr of group 1 of optimizer 0 (SGD) is 0.001 on rank 0, nothing on rank 1"),
    ],
)
def test_ranks_whose_optimizers_differ_are_refused_before_the_first_step(
    from_hook_cases: Found, case: str, words: str
) -> None:
    for each in from_hook_cases[case]:
        assert each["error"] == "OptionError" and words in each["text"], each
    assert from_hook_cases["after other optimizers"] == [None, None]


def test_built_in_hooks_with_other_arguments_on_other_ranks_are_refused(from_hook_cases: Found) -> None:
    for each in from_hook_cases["other arguments"]:
        words = (
            "hooks with other arguments: warmup of lr_schedule (LRSchedule) is 2 on rank 0, 3 on rank 1. Pass"
        )
        assert each["error"] == "HookError" and words in each["text"], each


def test_own_hooks_with_other_arguments_on_other_ranks_are_warned_of_once(from_hook_cases: Found) -> None:
    zero, one = from_hook_cases["other arguments of an own hook"]
    assert len(zero) == 1 and one == []
    assert (
        "on other ranks: limit of watches (Watches) is 0.5 on rank 0, 1.5 on rank 1. If the hooks" in zero[0]
    )


def test_datasets_of_different_lengths_are_refused_though_they_have_as_many_batches(
    from_hook_cases: Found,
) -> None:
    for each in from_hook_cases["other datasets"]:
        assert "the length of its dataset differs: rank 0: 8, rank 1: 7." in each["text"], each
        assert "set loader.shards_itself = True" in each["text"]


def test_different_batch_sizes_are_named_also_if_the_number_of_batches_is_the_same(
    from_hook_cases: Found,
) -> None:
    for each in from_hook_cases["other batch sizes"]:
        assert "its batch_size differs: rank 0: 4, rank 1: 5. Make it the same" in each["text"], each


def test_advice_that_a_list_cannot_follow_is_left_out(from_hook_cases: Found) -> None:
    for each in from_hook_cases["other lists"]:
        assert "number of batches differs" in each["text"] and "shards_itself" not in each["text"], each


def test_one_rank_alone_may_look_at_the_plan_before_a_run_and_between_two(from_hook_cases: Found) -> None:
    (step, loss, looks), (other_step, other_loss, _) = from_hook_cases["explained on zero"]
    assert (step, loss) == (other_step, other_loss) and step == 6
    assert looks == [True, True]


def test_data_is_prepared_once_on_a_machine_and_all_ranks_wait_for_it(from_hook_cases: Found) -> None:
    assert from_hook_cases["downloads"] == [["downloads", True], [True]]


def test_a_preparation_that_fails_is_told_to_the_ranks_that_wait_for_it(from_hook_cases: Found) -> None:
    zero, one = from_hook_cases["download fails"]
    assert zero["error"] == "OSError"
    assert one["error"] == "PeerError" and "Rank 0 has failed: OSError: no space left" in one["text"]
    assert from_hook_cases["after it"] == [
        6,
        6,
    ]  # no rank was left waiting for an answer, so the next run can begin


def test_ranks_wait_for_each_other_as_long_as_the_strategy_says(from_hook_cases: Found) -> None:
    assert from_hook_cases["timeouts"] == [[777.0, 777.0]] * 2


@both
def test_a_batch_that_is_repeated_to_take_part_is_in_no_metric_and_in_no_average(
    from_hook_cases: Found, name: str
) -> None:
    zero, one = from_hook_cases[f"{name}: shared data counted"]
    assert zero[0] + one[0] == 13
    zero, one = from_hook_cases[f"{name}: own data counted"]
    assert zero[:2] == [6, 2] and one[0] == 15
    assert zero[2] == one[2] == 5  # what is done after an update is done on all ranks, and stays


@both
def test_the_loss_of_a_window_that_ends_in_a_short_batch_is_that_of_one_process(
    from_hook_cases: Found, name: str
) -> None:
    for many, alone in from_hook_cases[f"{name}: losses of a window"]:
        assert len(alone) == 8 and many == pytest.approx(alone, rel=CLOSE)
