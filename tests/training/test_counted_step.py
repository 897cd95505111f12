"""Steps of weighted batches: what a window counts, skips and leaves out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import quiet
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

"""How far sums of float64 in another order may be apart."""


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
