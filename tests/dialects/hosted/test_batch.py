"""A batch, an epoch and a validation of a loop written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dialects.looped import Facts, net_and_sgd, recorder
from tiny import batches
from torch.nn import functional as F

import hookline
from hookline import Hook, Line


def test_a_validation_left_by_a_break_is_over_before_the_next_batch() -> None:
    heard = recorder(["on_train_batch_start", "on_validation_end", "on_train_epoch_end"], detail=True)
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    with line:
        for index, _ in enumerate(line.epoch(list(range(3)))):
            for _ in line.validation([0, 1]) if index == 1 else ():
                break
    assert [(name, batch) for name, _, batch, _ in heard.seen] == [
        ("on_train_batch_start", 0),
        ("on_train_batch_start", 1),
        ("on_validation_end", 0),
        ("on_train_batch_start", 2),
        ("on_train_epoch_end", 2),
    ]


def test_a_validation_inside_a_validation_is_refused() -> None:
    net, sgd = net_and_sgd()
    with (
        pytest.raises(hookline.HooklineError, match="started inside this validation"),
        Line(net, sgd) as line,
    ):
        for _ in line.validation([0, 1]):
            for _ in line.validation([0]):
                pass


def test_a_validation_before_the_update_in_the_body_leaves_the_batch_open() -> None:
    events = ("on_train_batch_start", "on_validation_end", "on_train_batch_end", "on_step_end")
    hook = recorder(events)
    facts, (net, sgd) = Facts(), net_and_sgd()
    losses: list[float] = []
    line = Line(net, sgd, hooks=[hook, facts])
    with line:
        for index, (x, y) in enumerate(line.epoch(batches(2))):
            if index == 0:
                for a, b in line.validation(batches(1)):
                    line.log("val/loss", F.mse_loss(net(a), b).detach())
            sgd.zero_grad()
            loss = F.mse_loss(net(x), y)
            line.backward(loss)
            sgd.step()
            losses.append(loss.item())
    start, validated, end, step = events
    assert hook.seen == [start, validated, end, step, start, end, step]
    assert [loss for loss, _ in facts.steps] == pytest.approx(losses)


def test_two_epochs_at_once_are_refused() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd)
    with pytest.raises(hookline.HooklineError, match=r"line.epoch\(zip\(one, two\)\)"), line:
        for _ in zip(line.epoch(batches(2)), line.epoch(batches(2)), strict=True):
            pass


def test_a_hook_can_leave_a_batch_out_or_end_the_epoch() -> None:
    class Picks(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return {1: hookline.SKIP_BATCH, 3: hookline.END_EPOCH}.get(batch_idx)

    heard = recorder(["on_train_batch_end", "on_train_epoch_end"], detail=True)
    net, sgd = net_and_sgd()
    line, seen = Line(net, sgd, hooks=[Picks(), heard]), []
    with line:
        for batch in line.epoch(list(range(6))):
            seen.append(batch)
    assert seen == [0, 2]
    assert [(name, index) for name, _, index, _ in heard.seen] == [
        ("on_train_batch_end", 0),
        ("on_train_batch_end", 2),
        ("on_train_epoch_end", 3),
    ]
    assert line.state.epochs_seen == 1


def test_a_hook_can_replace_the_loss() -> None:
    class Doubles(Hook):
        def on_before_backward(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 2

    grads = []
    for hooks in ([], [Doubles()]):
        net, sgd = net_and_sgd()
        line = Line(net, sgd, hooks=hooks)
        with line:
            for x, y in line.epoch(batches(1)):
                line.backward(F.mse_loss(net(x), y))
        grads.append(net.weight.grad)
    assert torch.allclose(grads[0] * 2, grads[1])


def test_a_loop_that_breaks_ends_its_batch_and_its_validation() -> None:
    heard = recorder(
        [
            "on_train_batch_end",
            "on_step_end",
            "on_validation_batch_end",
            "on_validation_end",
            "on_train_epoch_end",
        ]
    )
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    with line:
        for x, y in line.epoch(batches(5)):
            line.backward(F.mse_loss(net(x), y))
            sgd.step()
            break
        for _ in line.validation(batches(5)):
            line.log("val/loss", 3.0)
            break
    assert heard.seen == ["on_train_batch_end", "on_step_end", "on_validation_end", "on_train_epoch_end"]
    assert line.metrics["val/loss"] == 3.0
    assert line.state.epochs_seen == 1
