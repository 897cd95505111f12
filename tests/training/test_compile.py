"""torch.compile: the same weights, and hooks put on layers later still fire."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

EAGER = {"backend": "eager"}  # traces and guards like the real thing, without a compiler


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = before


class WithForward(Net):
    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize("cls", [Net, WithForward])
def test_compiled_training_ends_at_the_same_weights(cls: type[Net]) -> None:
    net = cls()
    twin = copy.deepcopy(net)
    quiet(compile=EAGER).fit(net, batches())
    quiet().fit(twin, batches())
    assert torch.equal(net.layer.weight, twin.layer.weight)


@pytest.mark.parametrize("cls", [Net, WithForward])
def test_a_forward_hook_added_after_the_first_step_still_fires(cls: type[Net]) -> None:
    fired: list[int] = []

    def add(module: Any, step: int) -> None:
        if step == 1:
            module.layer.register_forward_hook(lambda *_: fired.append(1))

    net = cls()
    trainer = quiet(compile=EAGER)
    trainer.on("step_end")(add)
    trainer.fit(net, batches(4))
    assert len(fired) == 3


def test_the_model_really_is_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    quiet(compile={"backend": backend}).fit(WithForward(), batches(2))
    assert graphs


def test_the_names_in_the_state_dict_do_not_change() -> None:
    net = WithForward()
    before = list(net.state_dict())
    quiet(compile=EAGER).fit(net, batches(2))
    assert list(net.state_dict()) == before
