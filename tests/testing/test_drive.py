"""Hooks can be tested without writing a trainer."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hookline import SKIP_BATCH, Hook, HookError, every
from hookline.testing import TinyModule, fire, play, tiny_batches


class Halve(Hook):
    """Halves the learning rate when the loss is high."""

    def __init__(self, threshold: float = 1.0) -> None:
        self.threshold = threshold
        self.seen: list[float] = []

    def on_train_batch_start(self, batch_idx: int) -> Any:
        return SKIP_BATCH if batch_idx == 13 else None

    @every("100 steps")
    def on_step_end(self, step: int, loss: float, optimizers: list[Any]) -> None:
        self.seen.append(loss)
        if loss > self.threshold:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5


def test_one_event_with_its_facts() -> None:
    hook, optimizer = Halve(), torch.optim.SGD(TinyModule().parameters(), lr=1.0)
    fire(hook, "step_end", step=100, loss=3.0, optimizers=[optimizer])
    assert hook.seen == [3.0]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_the_hook_returns_comes_back() -> None:
    assert fire(Halve(), "on_batch_start", batch_idx=13) is SKIP_BATCH
    assert fire(Halve(), "on_train_batch_start", batch_idx=1) is None


def test_facts_that_are_not_given_are_those_before_a_run() -> None:
    class Look(Hook):
        def on_train_start(self, step: int, epoch: int, optimizers: Any, state: Any) -> Any:
            return step, epoch, optimizers, state["status"]

    assert fire(Look(), "train_start") == (0, 0, [], "created")


def test_a_fact_under_another_spelling_reaches_the_hook() -> None:
    class Names(Hook):
        def on_train_end(self, global_step: int, model: Any) -> Any:
            return global_step, model

    assert fire(Names(), "train_end", step=7, module="the model") == (7, "the model")


def test_a_wrong_fact_event_or_hook_is_an_error_that_teaches() -> None:
    with pytest.raises(HookError, match="has no fact 'los'. Did you mean 'loss'"):
        fire(Halve(), "step_end", los=1.0)
    with pytest.raises(HookError, match="Did you mean"):
        fire(Halve(), "step_ended")
    with pytest.raises(HookError, match="does not listen to on_fit_end"):
        fire(Halve(), "fit_end")


def test_a_whole_run_is_real_and_recorded() -> None:
    hook = Halve(threshold=0.0)
    played = play(hook, train=tiny_batches(5), max_epochs=40)
    assert hook.seen and played.trainer.global_step == 200
    assert played.events("halve").count("on_step_end") == 2
    assert played.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_a_plain_mock_does_as_well() -> None:
    trainer = Mock()
    trainer.optimizers = [torch.optim.SGD(TinyModule().parameters(), lr=1.0)]
    Halve().on_step_end(step=1, loss=5.0, optimizers=trainer.optimizers)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
