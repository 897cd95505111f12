"""The loss of a step and its backward pass: what may be returned, what is refused, and what hooks may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor
from training.stepped import Returning, as_net, assert_same_weights, by_hand, twins

from hookline import Hook, LossError


def test_a_dictionary_with_a_loss_trains_as_the_loss_does() -> None:
    net, twin = twins(Returning(lambda loss, i: {"loss": loss, "index": float(i), "text": "no number"}))
    metrics = quiet().fit(net, batches())
    by_hand(as_net(twin), [[b] for b in batches()])
    assert_same_weights(net, twin)
    assert metrics["train/index"] == 1.5
    assert "train/text" not in metrics


def test_a_loss_of_shape_one_trains_as_a_scalar_does() -> None:
    net, twin = twins(Returning(lambda loss, i: loss.reshape(1)))
    metrics = quiet(accumulate_grad_batches=2).fit(net, batches())
    data = batches()
    by_hand(as_net(twin), [data[:2], data[2:]], planned=2)
    assert_same_weights(net, twin)
    assert metrics["train/loss"] > 0


def test_a_float_is_refused_as_a_loss() -> None:
    with pytest.raises(LossError, match="training_step returned float"):
        quiet().fit(Returning(lambda loss, i: loss.item()), batches())


def test_what_a_step_function_returns_is_refused_under_its_own_name() -> None:
    net = torch.nn.Linear(4, 2)
    with pytest.raises(LossError, match="^the function step= returned tuple"):
        quiet().fit(net, batches(), step=lambda model, batch: (model(batch[0]), 1), optimizer=torch.optim.SGD)


def test_a_detached_loss_is_refused() -> None:
    with pytest.raises(LossError, match=r"batch 0 cannot be differentiated: it was detached"):
        quiet().fit(Returning(lambda loss, i: loss.detach()), batches())
    with pytest.raises(LossError, match="no parameter of Linear requires a gradient"):
        frozen = torch.nn.Linear(4, 2).requires_grad_(False)
        quiet().fit(
            frozen, batches(), step=lambda net, batch: net(batch[0]).mean(), optimizer=torch.optim.SGD
        )
    with torch.no_grad(), pytest.raises(LossError, match=r"gradients are switched off \(torch.no_grad\)"):
        quiet().fit(Returning(lambda loss, i: loss), batches())


def test_a_dictionary_without_a_loss_is_refused_with_its_keys() -> None:
    with pytest.raises(LossError, match=r"without 'loss' \(keys: lost\)"):
        quiet().fit(Returning(lambda loss, i: {"lost": loss}), batches())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_vector_is_refused_with_its_shape(accumulate: int) -> None:
    with pytest.raises(LossError, match=r"one number, but has the shape \(3,\)"):
        quiet(accumulate_grad_batches=accumulate).fit(Returning(lambda loss, i: loss.expand(3)), batches())


def test_another_failure_in_backward_keeps_its_own_message() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            raise RuntimeError("my own backward")

    with pytest.raises(RuntimeError, match="my own backward"):
        quiet().fit(Returning(lambda loss, i: Failing.apply(loss)), batches())


def test_a_hook_can_replace_the_loss_before_backward() -> None:
    class Double(Hook):
        def on_before_backward(self, loss: Tensor) -> Tensor:
            assert loss.requires_grad
            return 2 * loss

    net, twin = twins()
    twin.lr = 0.2
    metrics = quiet(hooks=[Double()]).fit(net, batches(1))
    loss = twin.training_step(batches(1)[0], 0).item()
    by_hand(twin, [batches(1)])
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert metrics["train/loss"] == pytest.approx(2 * loss)


def test_replaced_losses_chain_from_hook_to_hook() -> None:
    seen: list[float] = []

    class Plus(Hook):
        def on_before_backward(self, loss: Tensor) -> Tensor:
            seen.append(loss.item())
            return loss + 1

    quiet(hooks=[Plus(), Plus()]).fit(Net(), batches(1))
    assert seen[1] == pytest.approx(seen[0] + 1)


@pytest.mark.parametrize(
    "give",
    [lambda loss: 0.5, lambda loss: loss.detach(), lambda loss: {"loss": loss}],
    ids=["float", "detached", "dict"],
)
def test_a_hook_that_returns_a_loss_that_cannot_be_differentiated_is_named(
    give: Callable[[Tensor], Any],
) -> None:
    class Good(Hook):
        def on_before_backward(self, loss: Tensor) -> Any:
            return loss * 2

    class Bad(Hook):
        def on_before_backward(self, loss: Tensor) -> Any:
            return give(loss)

    with pytest.raises(
        LossError, match=r"was returned as the loss, and cannot be differentiated\. Return a tensor"
    ) as failed:
        quiet(hooks=[Good(), Bad()]).fit(Net(), batches(1))
    assert any("raised by hook 'bad' in on_before_backward" in note for note in failed.value.__notes__)
