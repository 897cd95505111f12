"""Hooks can be tested without writing a trainer."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hookline import (
    SKIP_BATCH,
    Hook,
    HookError,
    OptionError,
    StepContext,
    declare_event,
    every,
    on,
    once,
    when,
)
from hookline.engine.events import EVENTS
from hookline.testing import TinyModule, drive, fire, play, tiny_batches, tiny_trainer


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


@pytest.mark.parametrize(
    ("missing", "given"), [(["loss"], {"step": 2, "optimizers": []}), (["loss", "trainer", "metrics"], {})]
)
def test_facts_that_are_not_there_before_a_run_must_be_given(
    missing: list[str], given: dict[str, Any]
) -> None:
    class Wants(Hook):
        def on_train_batch_end(self, step: int, loss: float, trainer: Any, metrics: Any) -> None: ...

    hook = Halve() if given else Wants()
    event = "step_end" if given else "train_batch_end"
    with pytest.raises(
        HookError,
        match=rf"requests {', '.join(missing)}, without a value outside a run: pass "
        rf"(it|them) to fire\(hook, '{event}', {', '.join(f'{name}=...' for name in missing)}\)",
    ):
        fire(hook, event, **given)


def test_facts_reach_a_hook_the_way_a_run_gives_them() -> None:
    class Asks(Hook):
        def on_step_end(
            self, ctx: StepContext, loss: float, grad_norm: float, lr: float, state: Any, hooks: Any
        ) -> Any:
            return ctx, loss, grad_norm, lr, state.step, state["latest_loss"], state.optimizers, len(hooks)

    class Forwards(Asks):
        def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
            return super().on_step_end(*args, **kwargs)

    ctx, optimizer = StepContext(3, 0.5), torch.optim.SGD(TinyModule().parameters(), lr=1.0)
    facts = {
        "ctx": ctx,
        "loss": 0.5,
        "grad_norm": 2.0,
        "lr": 0.1,
        "global_step": 3,
        "optimizers": [optimizer],
    }
    for hook in (Asks(), Forwards()):
        assert fire(hook, "step_end", **facts) == (ctx, 0.5, 2.0, 0.1, 3, 0.5, [optimizer], 1)
    assert fire(
        on("train_batch_start")(lambda lr, world_size: (lr, world_size)),
        "batch_start",
        optimizers=[optimizer],
    ) == (1.0, 1)


def test_a_state_of_ones_own_may_be_given() -> None:
    class Looks(Hook):
        def on_step_end(self, state: Any, step: int) -> Any:
            return state.mine, step

    assert fire(Looks(), "step_end", state=Mock(mine=5), step=2) == (5, 2)


def test_facts_of_an_event_of_ones_own() -> None:
    declare_event("on_drawn_sample", facts=("text", "number"))
    try:
        drawn = on("drawn_sample")(lambda text, number, step: (text, number, step))
        assert fire(drawn, "on_drawn_sample", text="a", number=1, step=4) == ("a", 1, 4)
        with pytest.raises(HookError, match="requests number, without a value outside a run"):
            fire(drawn, "on_drawn_sample", text="a")
    finally:
        EVENTS.forget("on_drawn_sample")


def test_filters_hold_a_call_back_as_in_a_run() -> None:
    hook = Halve()
    facts = {"loss": 3.0, "optimizers": []}
    fire(hook, "step_end", step=2, **facts)
    assert hook.seen == []
    fire(hook, "step_end", step=100, **facts)
    fire(hook, "step_end", step=100, **facts)  # once on the edge
    assert hook.seen == [3.0]
    fire(hook, "step_end", step=2, filters=False, **facts)
    assert hook.seen == [3.0, 3.0]
    late = Halve()
    fire(late, "step_end", step=150, **facts)  # a run that has come to 150 was heard at 100
    assert late.seen == []
    for step in range(151, 301):
        fire(late, "step_end", step=step, **facts)
    assert len(late.seen) == 2


def test_a_filter_that_counts_needs_its_count() -> None:
    with pytest.raises(
        HookError,
        match=r"Halve.on_step_end is called every 100 steps: pass step to fire\(hook, 'step_end', "
        r"step=...\), or filters=False",
    ):
        fire(Halve(), "step_end", loss=3.0, optimizers=[])


def test_calls_for_one_hook_count_like_events_of_one_run() -> None:
    class Rarely(Hook):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        @every(3)
        def on_train_batch_end(self, batch_idx: int) -> None:
            self.seen.append(batch_idx)

        @once
        def on_train_start(self) -> None:
            self.seen.append("start")

        @every("2 epochs")
        def on_train_epoch_end(self, epoch: int) -> None:
            self.seen.append(("epoch", epoch))

        @when(lambda step: step % 7 == 3)
        def on_step_end(self, step: int) -> None:
            self.seen.append(("step", step))

    hook, other = Rarely(), Rarely()
    for batch_idx in range(7):
        fire(hook, "train_batch_end", batch_idx=batch_idx)
    for _ in range(3):
        fire(hook, "train_start")
    for epoch in range(4):
        fire(hook, "train_epoch_end", epoch=epoch)
    for step in range(11):
        fire(hook, "step_end", step=step)
    assert hook.seen == [2, 5, "start", ("epoch", 1), ("epoch", 3), ("step", 3), ("step", 10)]
    fire(other, "train_start")
    assert other.seen == ["start"]


def test_nothing_is_kept_of_a_hook_that_is_gone() -> None:
    hook = Halve()
    fire(hook, "step_end", step=2, loss=1.0, optimizers=[])
    known = id(hook)
    assert known in drive._COUNTED
    del hook
    gc.collect()
    assert known not in drive._COUNTED


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 6}, 6),
        ({"max_steps": 3}, 3),
        ({"max_steps": 6, "max_epochs": 1}, 4),
        ({}, 4),
        ({"max_epochs": 2}, 8),
        ({"max_steps": 3, "accumulate_grad_batches": 2}, 3),
    ],
)
def test_a_played_run_is_as_long_as_asked_for(options: Any, steps: int) -> None:
    seen: list[int] = []
    played = play(on("step_end")(lambda step: seen.append(step)), **options)
    assert seen == list(range(1, steps + 1))
    assert played.trainer.status == "completed"


def test_a_wrong_option_of_a_played_run_is_named() -> None:
    with pytest.raises(OptionError, match="max_stps.*Did you mean 'max_steps'"):
        play(Halve(), max_stps=6)  # type: ignore[call-arg]


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
    with pytest.raises(
        HookError,
        match="Halve does not listen to on_fit_end. It listens to on_train_batch_start, on_step_end",
    ):
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


# ---- the smallest model, data and trainer ------------------------------------------------------------------


def test_the_tiny_model_learns() -> None:
    data = [(inputs, inputs[:, :2]) for inputs, _ in tiny_batches(8)]
    torch.manual_seed(0)
    trainer = tiny_trainer(max_epochs=20)
    first = trainer.validate(TinyModule(), data)["val/loss"]
    assert trainer.fit(TinyModule(), data, data)["val/loss"] < first / 2


def test_two_plays_are_equal() -> None:
    assert play().trainer.metrics == play().trainer.metrics
    assert torch.equal(tiny_batches()[0][0], tiny_batches()[0][0])
