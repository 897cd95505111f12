"""Sampled steps and batches: what the table says of their spans, and what changes meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hooks.traced import Traces
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.engine.events import EVENTS
from hookline.engine.plan import noop
from hookline.hooks import _span_sample, _spans
from hookline.hooks._span_sample import MOST_NODES, Roles


def test_every_pair_and_action_of_the_table_has_a_role() -> None:
    roles = Roles(EVENTS)
    assert {pair.name for pair in roles.begins.values()} == {pair.name for pair in EVENTS.pairs()}
    assert set(roles.ends) == {end.name for pair in EVENTS.pairs() for end in pair.ends}
    alone = {event.name for event in EVENTS if roles.spans_itself(event)}
    assert {"training_step", "configure_optimizers", "train_dataloader"} <= alone
    assert {"backward", "optimizer_step"}.isdisjoint(alone)  # pairs have these names


def test_hooks_that_come_and_go_in_a_sampled_step_leave_the_plan_as_it_was() -> None:
    calls: list[str] = []

    class Late(Hook):
        def on_train_batch_end(self) -> None:
            calls.append("late")

    class Changes(Hook):
        def on_after_backward(self, trainer: Any, step: int) -> None:
            if step == 0:
                trainer.add_hook(Late(), "late")
            if step == 3:
                trainer.remove_hook("late")

    hook = Traces(every=1)
    trainer = quiet(hooks=[Changes(), hook])
    trainer.fit(Net(), batches(6))
    assert calls == ["late"] * 3
    slots = vars(trainer.plan)
    assert slots["on_train_batch_end"] is noop and trainer.plan.on_before_backward is noop
    assert trainer.plan.tracers == () and trainer.state.timer.observers == []
    assert len(hook.named("step")) == 5  # the timer samples the second step


def test_a_validation_inside_a_sampled_step_is_inside_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_span_sample, "MOST_NODES", 60)
    assert MOST_NODES > 60

    class Validates(Hook):
        def on_train_batch_end(self, trainer: Any) -> None:
            trainer.validate()

    hook = Traces(every=50)
    quiet(hooks=[Validates(), hook], check_val_every_n_epoch=2).fit(Net(), batches(2), batches(40))
    first, second = hook.named("validation")
    assert [hook.parent_of(each) for each in (first, second)] == ["train_epoch"] * 2
    (step,) = hook.named("step")
    assert step.start_time < first.start_time and first.end_time < step.end_time
    inside = [each for each in hook.spans if each.name == "batch_fetch"]
    assert len(inside) <= 60  # of both: a step has a limit
    assert len(hook.named("validation_batch")) == 1  # the first batch of the pass outside of a sampled step
    for each in hook.spans:
        if each.parent is not None:
            (parent,) = (x for x in hook.spans if x.context.span_id == each.parent.span_id)
            assert parent.start_time <= each.start_time <= each.end_time <= parent.end_time, each.name


def test_a_skipped_step_is_sampled_once_and_the_next_update_again() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx < 4 else super().training_step(batch, batch_idx)

    hook = Traces(every=3)
    quiet(hooks=[hook]).fit(Skips(), batches(12))
    steps = [each.attributes["hookline.step"] for each in hook.named("step")]
    assert steps[0] == 0 and steps[1:] == [3, 6]
    assert len(hook.named("train_batch")) == len(steps)


def test_a_declared_event_of_every_step_is_traced_as_often_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spans, "FIRST_DECLARED", 3)
    names = ("on_part_start", "on_part_end", "on_mark")
    for name in names:
        EVENTS.declare(name)

    slots: set[str] = set()

    class Emits(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            for name in names:
                trainer.emit(name)
            if batch_idx == 7:
                slots.update(name for name in names if getattr(trainer.plan, name) is noop)

    hook = Traces(every=5)
    try:
        quiet(hooks=[Emits(), hook]).fit(Net(), batches(17))
    finally:
        for name in names:
            EVENTS.forget(name)
    parts = [(each.attributes["hookline.step"], hook.parent_of(each)) for each in hook.named("part")]
    assert parts[:3] == [(1, "run fit"), (2, "run fit"), (3, "run fit")]
    assert parts[3:] == [(step, "emits.on_train_batch_end") for step in (5, 10, 15)]
    (epoch,) = hook.named("train_epoch")
    assert [each.attributes["hookline.step"] for each in epoch.events if each.name == "on_mark"] == [1, 2, 3]
    assert slots == {"on_part_start", "on_part_end", "on_mark"}  # nothing is left in the other steps


def test_between_two_samples_the_plan_has_its_own_slots() -> None:
    kept: dict[int, bool] = {}

    class Looks(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            plan = trainer.plan  # the run's own timer marks neither of the two
            kept[step] = plan.on_before_batch_transfer is noop and plan.training_step is plain[0]

    class Keeps(Net):
        def on_train_start(self) -> None:
            plain.append(self.trainer.plan.training_step)

    plain: list[Any] = []
    hook = Traces(every=4)
    quiet(hooks=[Looks(), hook]).fit(Keeps(), batches(9))
    assert [step for step, is_plain in kept.items() if not is_plain] == [1, 4, 8]
    assert [each.attributes["hookline.step"] for each in hook.named("step")] == [1, 4, 8]
