"""Gradient accumulation: windows of several batches make the updates of a loop written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import batches, quiet
from torch import Tensor
from training.stepped import (
    AtBatchStart,
    Returning,
    Skipped,
    Stream,
    as_net,
    assert_same_weights,
    by_hand,
    twins,
)

from hookline import END_EPOCH, SKIP_BATCH, Hook


def test_accumulation_equals_a_loop_written_by_hand() -> None:
    net, twin = twins()
    quiet(accumulate_grad_batches=2).fit(net, batches(4))
    data = batches(4)
    by_hand(twin, [data[:2], data[2:]], planned=2)
    assert_same_weights(net, twin)


def test_a_short_last_window_is_divided_by_its_real_length() -> None:
    net, twin = twins()
    quiet(accumulate_grad_batches=3).fit(net, batches(5))
    data = batches(5)
    optimizer = twin.configure_optimizers()
    for window in (data[:3], data[3:]):
        optimizer.zero_grad()
        for batch in window:
            (twin.training_step(batch, 0) / len(window)).backward()
        optimizer.step()
    assert_same_weights(net, twin)


def test_a_short_last_window_of_a_loader_without_length_is_rescaled() -> None:
    net, twin = twins()
    quiet(accumulate_grad_batches=3).fit(net, Stream(batches(5)))
    data = batches(5)
    by_hand(twin, [data[:3], data[3:]], planned=3)
    assert_same_weights(net, twin)


def test_a_window_does_not_reach_into_the_next_epoch() -> None:
    net, twin = twins()
    trainer = quiet(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(net, Stream(batches(3)))
    data = batches(3)
    by_hand(twin, [data[:2], data[2:]] * 2, planned=2)
    assert_same_weights(net, twin)
    assert trainer.global_step == 4


@pytest.mark.parametrize("skipped_batch", [0, 1])
def test_a_window_with_a_skipped_batch_steps_on_the_others(skipped_batch: int) -> None:
    net, twin = twins()
    trainer = quiet(accumulate_grad_batches=2, hooks=[AtBatchStart({skipped_batch: SKIP_BATCH})])
    trainer.fit(net, batches(4))
    data = batches(4)
    by_hand(twin, [[data[1 - skipped_batch]], data[2:]], planned=2)
    assert_same_weights(net, twin)
    assert trainer.global_step == 2


@pytest.mark.parametrize("none_batch", [0, 1])
def test_a_window_with_a_batch_without_loss_steps_on_the_others(none_batch: int) -> None:
    net, twin = twins(Returning(lambda loss, i: None if i == none_batch else loss))
    skipped = Skipped()
    quiet(accumulate_grad_batches=2, hooks=[skipped]).fit(net, batches(4))
    data = batches(4)
    by_hand(as_net(twin), [[data[1 - none_batch]], data[2:]], planned=2)
    assert_same_weights(net, twin)
    assert skipped.reasons == []


def test_a_window_without_any_loss_is_skipped_once() -> None:
    skipped = Skipped()
    trainer = quiet(accumulate_grad_batches=2, hooks=[skipped])
    trainer.fit(Returning(lambda loss, i: None if i < 2 else loss), batches(4))
    assert skipped.reasons == ["no_loss"]
    assert trainer.global_step == 1


@pytest.mark.parametrize("loader", [lambda data: data, Stream], ids=["known length", "unknown length"])
def test_an_epoch_ended_inside_a_window_steps_on_what_it_has(loader: Any) -> None:
    net, twin = twins()
    ends: list[int] = []

    class Listen(AtBatchStart):
        def on_step_end(self, step: int) -> None:
            ends.append(step)

    quiet(accumulate_grad_batches=2, hooks=[Listen({3: END_EPOCH})]).fit(net, loader(batches(6)))
    data = batches(6)
    by_hand(twin, [data[:2], [data[2]]], planned=2)
    assert_same_weights(net, twin)
    assert ends == [1, 2]


def test_the_loss_that_hooks_hear_is_never_divided_by_the_accumulation() -> None:
    net, twin = twins()
    live: list[float] = []
    after: list[float] = []
    window: list[float] = []

    class Listen(Hook):
        def on_before_backward(self, loss: Tensor) -> None:
            live.append(loss.item())

        def on_train_batch_end(self, loss: float) -> None:
            after.append(loss)

        def on_step_end(self, loss: float) -> None:
            window.append(loss)

    quiet(accumulate_grad_batches=2, hooks=[Listen()]).fit(net, batches(2))
    real = [twin.training_step(b, 0).item() for b in batches(2)]
    assert live == after == real
    assert window == [pytest.approx(sum(real) / 2)]
