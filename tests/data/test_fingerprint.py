"""Fingerprints tell batches apart, stay the same where only rounding differs, and never touch an accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.data.fingerprint import difference, digest, fingerprint


@dataclass
class Pair:
    ids: Tensor
    text: list[str]


def batch(shift: float = 0.0) -> Any:
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1)) + shift
    return {
        "image": images,
        "label": torch.arange(8),
        "more": [Pair(torch.arange(4), ["a", "b"]), np.ones(3), 1.5, None],
    }


def between(one: Any, other: Any) -> str:
    return difference(fingerprint(one), fingerprint(other))


def test_the_same_batch_made_again_has_the_same_fingerprint() -> None:
    assert fingerprint(batch()) == fingerprint(batch())
    assert between(batch(), batch()) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["label"].add_(1),
        lambda b: b["more"][0].text.__setitem__(0, "x"),
        lambda b: b["more"][0].ids.zero_(),
    ],
    ids=["labels", "text", "a dataclass's tensor"],
)
def test_other_integers_or_text_are_another_batch(change: Any) -> None:
    other = batch()
    change(other)
    assert between(batch(), other) == "its integers or text differ"


@pytest.mark.parametrize(
    "other",
    [
        lambda b: {**b, "image": b["image"].flip(0)},
        lambda b: {**b, "image": b["image"] * 1.01},
        lambda b: {**b, "more": [b["more"][0], np.ones(3), 1.6, None]},
    ],
    ids=["another order", "other pixels", "a number"],
)
def test_other_floating_point_numbers_are_said_to_be_all_that_differs(other: Any) -> None:
    assert (
        between(batch(), other(batch()))
        == "its integers and text are the same, but its floating-point numbers differ"
    )
    assert between(batch()["image"], batch()["image"].flip(0)) == "its floating-point numbers differ"


def test_another_shape_type_or_key_is_said() -> None:
    for other in (
        {**batch(), "label": torch.arange(7)},
        {**batch(), "label": torch.arange(8).int()},
        {"image": 1},
    ):
        assert between(batch(), other) == "its structure, shapes or types differ"


def test_rounding_of_another_processor_is_the_same_batch() -> None:
    noise = 1 + 1e-6 * torch.randn(8, 3, 16, 16)
    assert between(batch(), {**batch(), "image": batch()["image"] * noise}) == ""


def test_values_that_are_not_finite_and_rare_types_have_a_fingerprint() -> None:
    odd = [
        torch.tensor([float("nan"), float("inf")]),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.complex64),
        torch.empty(0),
        torch.zeros(3, 3).to_sparse(),
        np.array(["a"]),
        np.array([object()]),
        2**80,
        b"x",
        {1, 2},
    ]
    assert between(odd, list(odd)) == ""


def test_tensors_of_an_accelerator_count_by_shape_and_type_alone() -> None:
    one = torch.zeros(3, device="meta")  # whatever reads a number from it fails
    assert between([one], [torch.zeros(3, device="meta")]) == ""
    assert between([one], [torch.zeros(4, device="meta")]) != ""


def test_a_large_batch_is_looked_at_in_samples_from_all_of_it() -> None:
    large = torch.zeros(64, 100_000)
    other = large.clone()
    other[-1] = 1
    assert between(large, other) != ""
    assert len(str(fingerprint(large))) < 500


def test_states_are_compared_as_a_whole() -> None:
    state = {"at": 3, "rng": torch.arange(5000), "left": [1, 2], "name": "x", "numbers": np.arange(3)}
    assert digest(state) == digest({**state, "rng": torch.arange(5000)})
    changed = torch.arange(5000)
    changed[4321] = 0
    for other in ({**state, "at": 4}, {**state, "rng": changed}, {**state, "left": [1]}):
        assert digest(state) != digest(other)


def test_a_state_that_cannot_be_compared_is_not() -> None:
    assert digest({"a": object()}) is None
    assert digest({"a": torch.zeros(1_000_000)}) is None
