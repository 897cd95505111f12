"""Strategies of several ranks: ranks that differ do not hang and train what one process would; options do what they say."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.strategy_cases import VARIANTS, names
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]


@pytest.fixture
def found(from_strategy_cases: Found) -> Found:
    return from_strategy_cases


@pytest.mark.parametrize("name", names("frozen", "fsdp"))
def test_layers_may_be_frozen_and_thawed_in_the_middle(found: Found, name: str) -> None:
    assert max(found[f"{name}: frozen"]) < CLOSE


@pytest.mark.parametrize("name", names("again", "fsdp"))
def test_a_module_can_be_trained_again_and_measured_in_between(found: Found, name: str) -> None:
    for far, measured in found[f"{name}: again"]:
        assert far < CLOSE and measured < CLOSE


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_averaged_weights_are_those_of_one_process(found: Found, name: str) -> None:
    for far, measured in found[f"averaged, {name}"]:
        assert far < CLOSE and measured < CLOSE


@pytest.mark.parametrize(
    ("name", "wrapper", "optimizer"),
    [
        ("ddp", "DistributedDataParallel", "AdamW"),
        ("accelerate", "DistributedDataParallel", "AcceleratedOptimizer"),
        ("fsdp", "FSDPStepModule", "AdamW"),
    ],
)
def test_hooks_see_what_the_strategy_prepared(found: Found, name: str, wrapper: str, optimizer: str) -> None:
    for rank, each in enumerate(found[f"{name}: facts"]):
        assert each == [rank, 2, rank, wrapper, optimizer, "Deep", [1, 2]]


@pytest.mark.parametrize("name", VARIANTS)
def test_options_change_how_but_not_what_is_trained(found: Found, name: str) -> None:
    assert max(found[f"variant: {name}"]) < CLOSE


def test_an_optimizer_that_searches_along_a_line_decides_alike_on_every_rank(found: Found) -> None:
    (far, weights), (_, other_weights) = found["line search"]
    assert weights == other_weights and far < CLOSE


def test_each_rank_draws_its_own_numbers_the_same_ones_for_the_same_seed(found: Found) -> None:
    unseeded, seeded, again = found["draws"][0]
    assert unseeded[0] != unseeded[1] and seeded[0] != seeded[1]
    assert seeded == again


def test_other_hooks_on_another_rank_are_an_error_that_names_hook_and_ranks(found: Found) -> None:
    for each in found["other hooks"]:
        assert each["error"] == "HookError"
        assert "hook 'extra' (Extra) listens to on_step_end on rank 1, not on rank 0" in each["text"]
    for each in found["other options"]:
        assert "accumulate_grad_batches is 1 on rank 0, 2 on rank 1" in each["text"]
    assert found["hook for zero"] == [6, 6]


def test_sharded_training_in_half_precision_comes_close(found: Found) -> None:
    for far, moved in found["half precision"]:
        assert 0 < far < 0.05 * moved  # bfloat16 has 8 bits: each of a few roundings is at most 0.4%


def test_a_second_precision_for_accelerate_is_refused_in_words(found: Found) -> None:
    for each in found["second precision of accelerate"]:
        assert each["error"] == "OptionError" and "Pass the existing Accelerator" in each["text"]
