"""Mistakes in the updates of a loop written by hand, each of which is reported once, with its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dialects.looped import net_and_sgd
from tiny import batches
from torch import nn
from torch.nn import functional as F

from hookline import Line, LossError

ORDER = "The order in a batch: optimizer.zero_grad(), line.backward(loss), line.clip_gradients(1.0)"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, and that it names this file."""
    said = [each for each in caplog.messages if "test_loop_checks.py:" in each]
    assert len(said) == len(caplog.messages)
    return said


@pytest.mark.parametrize("of_model", [True, False])
def test_an_optimizer_that_the_line_was_not_given_is_reported_at_its_updates(
    of_model: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nets = nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Linear(4, 2)})
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in nets.values())
    with Line(nets if of_model else nets["one"], first) as line:
        for x, y in line.epoch(batches(3)):
            for net, optimizer in zip(nets.values(), (first, second), strict=True):
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
    (said,) = warnings_of(caplog)
    if of_model:
        assert "updates two.weight, two.bias of ModuleDict" in said and "do not have its state" in said
        assert "Line(model, [optimizer, ...])" in said
    else:
        assert "updates 2 parameters that are not of Linear" in said
        assert "do not have its state or these parameters, so a resume is not exact" in said


class Averaging(torch.optim.Optimizer):
    """An optimizer around another one, as SAM and Lookahead are."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_optimizers_that_the_line_need_not_have_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    net, sgd = net_and_sgd()
    with Line(net, around := Averaging(sgd)) as line:
        for x, y in line.epoch(batches(3)):
            line.backward(F.mse_loss(net(x), y))
            around.step()
            around.zero_grad()
            attacked = x.clone().requires_grad_()
            other, inner = net_and_sgd()  # for this batch only, as in meta-learning
            for optimizer in (torch.optim.SGD([attacked], lr=0.1), inner):
                for _ in range(2):
                    F.mse_loss(other(attacked), y).backward()
                    optimizer.step()
            with Line(other, inner) as own:
                own.backward(F.mse_loss(other(x), y))
                inner.step()
    assert not caplog.messages


@pytest.mark.parametrize("wrong", ["step first", "clip last", "clip last of two", ""])
def test_calls_in_another_order_are_reported_once(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    nets = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in nets]
    with Line(nets, optimizers) as line:
        for x, y in line.epoch(batches(3)):
            if wrong == "step first":
                optimizers[0].step()
            line.backward(F.mse_loss(nets[0](x), y) + F.mse_loss(nets[1](x), y))
            for optimizer in optimizers:  # clip, step, clip, step
                if wrong != "clip last":
                    line.clip_gradients(1.0, optimizer)
                if wrong != "step first" or optimizer is optimizers[1]:
                    optimizer.step()
            if wrong.startswith("clip last"):
                line.clip_gradients(1.0, *optimizers[1:] if wrong.endswith("two") else ())
            for optimizer in optimizers:
                optimizer.zero_grad()
    said = warnings_of(caplog)
    assert len(said) == bool(wrong) and all(ORDER in each for each in said)
    if wrong == "step first":
        assert "SGD.step() at " in said[0]
        assert "updates nothing: none of its 2 parameters has a gradient" in said[0]
    elif wrong:
        assert "comes after the update with these gradients, so it has no effect" in said[0]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (0.5, r"takes the loss as a tensor with its graph, not 0\.5\. Pass it without \.item\(\)"),
        (torch.ones(3, requires_grad=True), r"one number; this one has the shape \(3,\)\. .*loss\.mean\(\)"),
        (torch.ones(()), "this one was detached"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, text: str) -> None:
    net, sgd = net_and_sgd()
    with pytest.raises(LossError, match=text), Line(net, sgd) as line:
        line.backward(loss)


@pytest.mark.parametrize("way", ["before_backward", "scaled", "not scaled"])
def test_a_gradient_scaler_whose_loss_goes_through_the_line_s_backward_is_reported(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    (net, sgd), scaler = net_and_sgd(), torch.amp.GradScaler("cpu", init_scale=8.0)
    with Line(net, sgd) as line:
        for x, y in line.epoch(batches(2)):
            loss = F.mse_loss(net(x), y)
            if way == "before_backward":
                scaler.scale(line.before_backward(loss)).backward()
                line.after_backward()
            else:
                line.backward(scaler.scale(loss) if way == "scaled" else scaler.scale(loss) / 8)
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()
    said = warnings_of(caplog)
    assert len(said) == (way != "before_backward")
    assert all("loss = line.before_backward(loss); scaler.scale(loss).backward()" in each for each in said)
