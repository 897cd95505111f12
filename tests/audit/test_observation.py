"""Observations of tensors, optimizers and streams, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hookline.audit.observation import Observation, Tensors, unique_modules


def state(module: Any = None, optimizers: Any = (), batch: Any = None) -> Any:
    return SimpleNamespace(module=module, optimizers=optimizers, batch=batch, device=torch.device("cpu"))


def test_the_same_moment_twice_has_no_changes() -> None:
    layer = nn.Linear(2, 2)
    s = state(layer, [torch.optim.Adam(layer.parameters())], {"x": torch.ones(1), "more": ["a", 1]})
    assert Observation(s).changes(Observation(s), set()) == []


def test_before_a_run_has_a_module_there_is_nothing_to_change() -> None:
    assert Observation(state()).changes(Observation(state()), set()) == []


def test_a_replaced_gradient_with_the_same_values_is_another_tensor() -> None:
    layer = nn.Linear(1, 1)
    layer(torch.ones(1)).backward()
    before = Observation(state(layer))
    layer.weight.grad = None
    layer.weight.grad = torch.ones(1, 1)  # it may get the address of the one before, which is still held
    assert ("gradients", "weight") in before.changes(Observation(state(layer)), set())


def test_shared_and_nested_modules_are_seen_once_in_their_order() -> None:
    shared = nn.Linear(1, 1)
    model = nn.Sequential(nn.Sequential(shared), shared, nn.ReLU())
    assert [type(each).__name__ for each in unique_modules(model)] == [
        "Sequential",
        "Sequential",
        "Linear",
        "ReLU",
    ]


@pytest.mark.parametrize("device", ["meta"])
def test_a_tensor_without_data_is_observed_too(device: str) -> None:
    tensor = torch.ones(2, device=device)
    before = Tensors([("x", tensor)])
    tensor.add_(1)
    assert list(before.changed(Tensors([("x", tensor)]))) == ["x"]


def test_a_tensor_of_the_inference_mode_has_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    before = Tensors([("x", tensor)])
    assert before.is_like(Tensors([("x", tensor)]))


def test_a_lazy_module_is_observed_before_and_after_its_first_forward() -> None:
    layer = nn.LazyLinear(2)
    before = Observation(state(layer))
    assert before.changes(Observation(state(layer)), {1}) == []
    layer(torch.ones(1, 3))
    assert ("parameters", "weight") in before.changes(Observation(state(layer)), set())


@dataclass
class Pair:
    x: torch.Tensor
    more: list[Any]


def test_the_parts_of_a_dataclass_are_parts_of_the_batch() -> None:
    batch = Pair(torch.ones(1), [torch.ones(1), 1])
    before = Observation(state(batch=batch))
    assert before.changes(Observation(state(batch=batch)), set()) == []
    batch.x.add_(1)
    batch.more[1] = 2
    assert before.changes(Observation(state(batch=batch)), set()) == [
        ("the batch", "batch.x"),
        ("the batch", "batch.more[1]"),
    ]
