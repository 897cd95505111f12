"""Strategies of several ranks: ranks that differ do not hang and train what one process would; options do what they say."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.strategy_cases import MAKERS, VARIANTS
from ranks.torchrun import cases
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each case found, by rank, from one launch."""
    return cases("ranks.strategy_cases", tmp_path_factory.mktemp("job"), 300)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "case", ["no loss on the last batch", "no loss in a window", "skipped", "skipped, no window"]
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


@pytest.mark.parametrize("name", [*MAKERS, "fsdp"])
def test_a_window_that_ends_early_brings_its_gradients_together(found: Found, name: str) -> None:
    for far, steps, expected in found[f"{name}: short window"]:
        assert far < CLOSE and steps == expected == 2


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


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_names_it(found: Found) -> None:
    for each in (
        *found["stops"],
        *found["stops at the end"],
    ):  # noticed in the next window, or before the run is over
        assert each["error"] == "NonFiniteLoss" and "not finite on rank 1" in each["text"]


@pytest.mark.parametrize("name", ["overflow, fsdp", "overflow, ddp"])
def test_an_overflow_on_one_rank_skips_the_update_on_all(found: Found, name: str) -> None:
    one, other = found[name]
    assert one == other
    assert one[3][0] == "nonfinite"


@pytest.mark.parametrize("name", [*MAKERS, "fsdp"])
def test_layers_may_be_frozen_and_thawed_in_the_middle(found: Found, name: str) -> None:
    assert max(found[f"{name}: frozen"]) < CLOSE


@pytest.mark.parametrize("name", [*MAKERS, "fsdp"])
def test_a_manual_step_may_update_several_times(found: Found, name: str) -> None:
    assert max(found[f"{name}: manual"]) < CLOSE


@pytest.mark.parametrize("name", [*MAKERS, "fsdp"])
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


def test_a_static_graph_is_learnt_also_where_gradients_are_accumulated(found: Found) -> None:
    for far, steps, expected in found["static graph, windows"]:
        assert far < CLOSE and steps == expected == 2


@pytest.mark.parametrize("name", ["ddp", "single"])
def test_a_module_that_stays_sharded_is_refused_where_it_has_to_be_whole(found: Found, name: str) -> None:
    for each in found[f"sharded before, {name}"]:
        assert each["error"] == "OptionError" and "Deep was sharded by FSDP in an earlier run" in each["text"]


def test_a_parameter_that_two_layers_share_is_named_if_they_are_gathered_apart(found: Found) -> None:
    for each in found["tied"]:
        assert (
            each["error"] == "OptionError"
            and "blocks.0.weight and blocks.1.weight are the same parameter" in each["text"]
        )
    assert max(found["tied, together"]) < CLOSE


def test_an_optimizer_that_searches_along_a_line_decides_alike_on_every_rank(found: Found) -> None:
    (far, weights), (_, other_weights) = found["line search"]
    assert weights == other_weights and far < CLOSE


def test_a_part_to_wrap_that_is_not_there_is_an_error_with_the_nearest_name(found: Found) -> None:
    for each in found["wrong wrap"]:
        assert each["error"] == "OptionError" and "Did you mean 'blocks." in each["text"]


def test_a_mesh_that_does_not_cover_the_world_is_refused_when_the_strategy_is_made(found: Found) -> None:
    for each in found["mesh of some ranks"]:
        assert (
            each["error"] == "OptionError" and "covers rank 0 of 2 ranks, and must cover all" in each["text"]
        )
        assert "init_device_mesh('cpu', (2,))" in each["text"]
    for each in found["mesh of too many dimensions"]:
        assert each["error"] == "OptionError" and "must have one dimension (shards) or two" in each["text"]


def test_a_layers_weight_used_outside_of_it_is_an_error_that_says_what_to_do(found: Found) -> None:
    for each in found["outside"]:
        assert each["error"] == "RuntimeError" and "leave that layer out of wrap" in each["notes"]


def test_a_model_made_without_memory_gets_its_weights_when_it_is_sharded(found: Found) -> None:
    one, other = found["from meta"]
    assert one == other
    assert all(abs(each) < 100 for each in one[0]) and one[2] == "DTensor"


def test_each_rank_draws_its_own_numbers_the_same_ones_for_the_same_seed(found: Found) -> None:
    unseeded, seeded, again = found["draws"][0]
    assert unseeded[0] != unseeded[1] and seeded[0] != seeded[1]
    assert seeded == again


def test_all_ranks_begin_with_the_weights_of_rank_zero(found: Found) -> None:
    one, other = found["started alike"]
    assert one == other
    assert one[0] == pytest.approx(one[2]) and one[1] == pytest.approx(one[2])


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
