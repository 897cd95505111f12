"""Precision, activation checkpointing and compiled blocks on two ranks train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.memory_cases import MAKERS, VARIANTS
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]


@pytest.fixture
def found(from_strategy_cases: Found) -> Found:
    return from_strategy_cases


@pytest.mark.parametrize("name", VARIANTS)
def test_recomputed_activations_and_compiled_blocks_change_no_weights(found: Found, name: str) -> None:
    assert max(found[f"memory: {name}"]) < CLOSE


@pytest.mark.parametrize("name", MAKERS)
def test_float32_models_and_data_train_in_float64(found: Found, name: str) -> None:
    for far, kind, _ in found[f"memory: {name}, 64"]:
        assert far < CLOSE and kind == "torch.float64"


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_bfloat16_comes_close_resumes_exactly_and_is_converted(found: Found, name: str) -> None:
    for far, moved, kinds, resumed, converted, _ in found[f"memory: {name}, bf16-true"]:
        assert 0 < far < 0.2 * moved
        assert kinds == ["torch.bfloat16"]
        assert resumed == 0.0
        assert converted == "torch.float64"
    one, other = found[f"memory: {name}, bf16-true"]
    assert one[-1] == other[-1]  # both ranks have the same weights


def test_inference_mode_measures_the_same_with_ddp_and_is_refused_with_fsdp(found: Found) -> None:
    assert max(found["memory: inference mode, ddp"]) == 0.0
    for each in found["memory: inference mode, fsdp"]:
        assert each["error"] == "OptionError" and "inference_mode" in each["text"]
