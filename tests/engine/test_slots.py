"""The slots of a plan: what returned values do, and how listeners are called and counted."""

from __future__ import annotations

import time

import pytest
from tiny import Net, batches, quiet

from hookline import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, Hook, HookError, StopTraining, every
from hookline.engine.slots import MOST_UNROLLED


def run_with(*functions, event="train_batch_start", data=4, **options):
    """Fit with function hooks, noting the batches that came to their end and the steps that were skipped."""
    trainer = quiet(**options)
    trainer.ended, trainer.skipped = [], []
    for function in functions:
        trainer.on(event)(function)
    trainer.on("train_batch_end")(lambda batch_idx: trainer.ended.append(batch_idx))
    trainer.on("step_skipped")(lambda reason: trainer.skipped.append(reason))
    trainer.fit(Net(), batches(data))
    return trainer


@pytest.mark.parametrize("value", [True, False, 0, 1, "skip", SKIP_STEP, STEP_DONE], ids=repr)
def test_an_unknown_value_where_signals_are_read_is_an_error_that_lists_them(value):
    with pytest.raises(
        HookError,
        match=r"hook 'decides' returned .* from on_train_batch_start; it may return None, SKIP_BATCH, END_EPOCH",
    ):
        trainer = quiet()
        trainer.on("train_batch_start", name="decides")(lambda: value)
        trainer.fit(Net(), batches(1))


@pytest.mark.parametrize("value", [-1, SKIP_BATCH, END_EPOCH], ids=repr)
def test_signals_of_a_batch_mean_nothing_to_an_update(value):
    with pytest.raises(HookError, match="it may return None, SKIP_STEP, STEP_DONE"):
        run_with(lambda: value, event="before_optimizer_step")


@pytest.mark.parametrize(
    "event",
    [
        "setup",
        "on_train_start",
        "on_train_batch_end",
        "on_before_backward",
        "on_validation_batch_start",
        "on_train_metrics",
    ],
)
def test_a_signal_that_would_be_lost_is_an_error(event):
    trainer = quiet(log_every_n_steps=1)
    trainer.on(event, name="lost")(lambda: SKIP_BATCH)
    with pytest.raises(
        HookError, match=f"hook 'lost' returned SKIP_BATCH from {event}, where a signal has no effect"
    ):
        trainer.fit(Net(), batches(1), batches(1))


def test_other_values_returned_from_plain_events_are_ignored():
    trainer = run_with(lambda: "a value of the user's", event="train_batch_end")
    assert trainer.status == "completed"


def test_a_batch_returned_where_a_signal_belongs_is_described_not_printed():
    class Replaces(Hook):
        def on_train_batch_start(self, batch):
            return batch

    with pytest.raises(HookError) as caught:
        quiet(hooks=[Replaces()]).fit(Net(), batches(1, size=500))
    said = str(caught.value)
    assert "returned tuple (Tensor (500, 4), Tensor (500, 2)) from on_train_batch_start" in said
    assert "replace the batch, return it from on_after_batch_transfer" in said and len(said) < 250


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        (
            "log",
            "A hook logs through the trainer: `def on_step_end(self, trainer): trainer.log('name', value)`.",
        ),
        ("trainer", "requests it as a parameter: `def on_step_end(self, trainer): ...`"),
        ("grad_norm", "`def on_step_end(self, grad_norm): ...`"),
        ("colour", ""),
    ],
)
def test_what_a_hook_has_not_got_but_can_ask_for_is_said(attribute, said):
    class Wants(Hook):
        def on_step_end(self):
            getattr(self, attribute)

    with pytest.raises(AttributeError) as caught:
        quiet(hooks=[Wants()]).fit(Net(), batches(1))
    hints = [note for note in caught.value.__notes__ if "A hook" in note]
    assert [said in hint for hint in hints] == ([True] if said else [])


def test_accounts_of_listeners_in_one_slot_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read once between two listeners, also where one of them has a filter and an account of its own."""
    now = 0

    class Takes(Hook):
        def __init__(self, name: str, ns: int) -> None:
            super().__init__(name)
            self.ns = ns

        def on_step_end(self) -> None:
            nonlocal now
            now += self.ns

    class Filtered(Takes):
        @every("1 step")
        def on_step_end(self) -> None:
            super().on_step_end()

    class Stops(Takes):
        def on_step_end(self) -> None:
            super().on_step_end()
            raise StopTraining("enough")

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    hooks = [
        Takes("a", 5),
        Takes("b", 7),
        Filtered("c", 1000),
        Takes("d", 11),
        Stops("e", 13),
        Takes("f", 17),
    ]
    trainer = quiet(hooks=hooks)
    trainer.state.fill(step=1)
    for _ in range(2):
        trainer.plan.on_step_end(trainer.state)
    accounts = {each.name: each.account for each in trainer.plan.listeners("on_step_end")}
    assert {name: (each.calls, each.total, each.worst) for name, each in accounts.items() if name != "c"} == {
        "a": (2, 10, 5),
        "b": (2, 14, 7),
        "d": (2, 22, 11),
        "e": (2, 26, 13),
        "f": (2, 34, 17),
    }
    assert trainer.state.should_stop


def test_more_listeners_than_a_slot_unrolls_are_called_in_order_and_counted() -> None:
    called: list[str] = []

    class Notes(Hook):
        def on_step_end(self) -> None:
            called.append(self.name)

    names = [f"h{number}" for number in range(MOST_UNROLLED + 1)]
    trainer = quiet(hooks=[Notes(name) for name in names])
    trainer.plan.on_step_end(trainer.state)
    assert called == names
    assert {each.account.calls for each in trainer.plan.listeners("on_step_end")} == {1}
