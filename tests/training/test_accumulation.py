"""Gradient accumulation: windows of several batches make the updates of a loop written by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
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
from training.weighted import (
    Batch,
    Heard,
    Tokens,
    assert_close,
    by_tokens,
    count,
    large,
    trained,
    uneven,
    windows,
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


# ---- Steps of weighted batches: what a window counts, skips and leaves out


class Stream:
    """A loader that cannot tell its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class AtStart(Hook):
    """Returns a signal at the batches named."""

    def __init__(self, signals: dict[int, Any]) -> None:
        self.signals = signals

    def on_train_batch_start(self, batch_idx: int) -> Any:
        return self.signals.get(batch_idx)


@pytest.mark.parametrize("loader", [list, Stream])
def test_a_short_last_window_counts_what_it_has(loader: Any) -> None:
    data = uneven(30, 2, 11, 5, 17)
    assert_close(
        by_tokens(loader(data), accumulate_grad_batches=3, max_epochs=2),
        trained(windows(data, 3), max_epochs=2),
    )


@pytest.mark.parametrize(("signal", "used"), [(SKIP_BATCH, [[0, 2], [3, 4, 5]]), (END_EPOCH, [[0]])])
@pytest.mark.parametrize("at", [1])
def test_batches_that_a_hook_leaves_out_count_nothing(signal: Any, used: list[list[int]], at: int) -> None:
    data = uneven(30, 2, 11, 5, 17, 9)
    net = by_tokens(data, accumulate_grad_batches=3, hooks=[AtStart({at: signal})])
    assert_close(net, trained([large([data[index] for index in each]) for each in used]))


@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_batch_without_a_loss_counts_nothing(without: int) -> None:
    data = uneven(30, 2, 11)

    class Some(Tokens):
        def training_step(self, batch: Batch) -> Any:
            return None if batch is data[without] else super().training_step(batch)

    net = Some()
    quiet(count_tokens=count, accumulate_by="tokens", accumulate_grad_batches=3).fit(net, data)
    assert_close(net, trained([large([each for each in data if each is not data[without]])]))


def test_an_update_that_is_not_finite_is_skipped_and_the_next_is_right() -> None:
    data = uneven(30, 2, 11, 5)
    data[1]["y"][0, 0] = torch.nan
    heard = Heard()
    net = by_tokens(data, accumulate_grad_batches=2, nonfinite="skip", hooks=[heard])
    assert heard.skips == ["nonfinite"]
    assert_close(net, trained(windows(data[2:], 2)))


@pytest.mark.parametrize("tokens", [(0, 30, 2), (30, 0, 2), (30, 2, 0)])
def test_a_batch_without_tokens_counts_nothing_though_its_loss_is_not_a_number(
    tokens: tuple[int, ...],
) -> None:
    data, heard = uneven(*tokens), Heard()
    net = by_tokens(data, accumulate_grad_batches=3, hooks=[heard], log_every_n_steps=1)
    assert_close(net, trained(windows(data, 3)))
    assert heard.skips == []
    assert all(loss == loss for loss in (*heard.losses, *heard.rows))


def test_a_window_without_tokens_makes_no_update_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    data = uneven(0, 0, 30, 2)
    trainer = quiet(count_tokens=count, accumulate_by="tokens", accumulate_grad_batches=2, hooks=[heard])
    trainer.fit(net := Tokens(), data)
    assert heard.skips == ["no_loss"]
    assert trainer.global_step == 1
    assert_close(net, trained(windows(data[2:], 2)))
    with caplog.at_level(logging.WARNING):
        by_tokens(uneven(0, 0))
    assert "or its batches had no tokens to count (accumulate_by='tokens')" in caplog.text


@pytest.mark.parametrize("first", [(3, 3), (900, 3), (3, 900)])
def test_many_windows_without_an_update_do_not_move_the_scale_of_the_next(first: tuple[int, int]) -> None:
    data = [*uneven(*first), *uneven(0) * 2300, *uneven(13, 29)]
    net = by_tokens(data, accumulate_grad_batches=2)
    assert_close(net, trained([large(data[:2]), large(data[-2:])]))
