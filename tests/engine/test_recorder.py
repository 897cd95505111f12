"""A recorder sees every call of a run, in order, and leaves no trace of itself."""

from __future__ import annotations

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, HookError, Recorder
from hookline.engine.plan import noop


class Watch(Hook):
    def on_train_start(self): ...

    def on_train_batch_end(self): ...


class Listening(Net):
    def on_train_batch_end(self): ...


def test_every_call_is_recorded_in_order_with_who_and_where():
    trainer = quiet(hooks=[Watch()])
    with Recorder(trainer) as recorder:
        trainer.fit(Listening(), batches(2))
    calls = [
        (call.receiver, call.name, call.event, call.epoch, call.batch_idx, call.step)
        for call in recorder.calls
    ]
    training = [
        each for each in calls if each[2] in ("on_train_start", "training_step", "on_train_batch_end")
    ]
    assert training == [
        ("H", "watch", "on_train_start", 0, 0, 0),
        ("M", "Listening", "training_step", 0, 0, 0),
        ("H", "watch", "on_train_batch_end", 0, 0, 1),
        ("M", "Listening", "on_train_batch_end", 0, 0, 1),
        ("M", "Listening", "training_step", 0, 1, 1),
        ("H", "watch", "on_train_batch_end", 0, 1, 2),
        ("M", "Listening", "on_train_batch_end", 0, 1, 2),
    ]


def test_events_counts_consecutive_listeners_of_one_event_as_one():
    trainer = quiet(hooks=[Watch()])
    with Recorder(trainer) as recorder:
        trainer.fit(Listening(), batches(1))
    assert recorder.events()[-4:] == [
        "configure_optimizers",
        "on_train_start",
        "training_step",
        "on_train_batch_end",
    ]


def test_a_call_reads_well():
    trainer = quiet(hooks=[Watch()])
    with Recorder(trainer, events=["train_batch_end"]) as recorder:
        trainer.fit(Listening(), batches(1))
    assert [str(call) for call in recorder.calls] == [
        "hook watch: on_train_batch_end",
        "module: on_train_batch_end",
    ]


def test_only_the_events_asked_for_are_recorded_under_any_spelling():
    trainer = quiet(hooks=[Watch()])
    with Recorder(trainer, events=["on_train_begin"]) as recorder:
        trainer.fit(Listening(), batches(1))
    assert [call.event for call in recorder.calls] == ["on_train_start"]


def test_steps_and_actions_can_be_asked_for_too():
    trainer = quiet()
    with Recorder(trainer, events=["training_step"]) as recorder:
        trainer.fit(Net(), batches(2))
    assert [call.event for call in recorder.calls] == ["training_step"] * 2


def test_an_unknown_event_is_refused():
    with pytest.raises(HookError, match="Did you mean 'on_train_start'"):
        Recorder(quiet(), events=["on_train_strat"])


def test_a_call_that_a_filter_held_back_is_not_recorded():
    got = []
    trainer = quiet()
    trainer.on("train_batch_end", every=2)(lambda batch_idx: got.append(batch_idx))
    with Recorder(trainer, events=["train_batch_end"]) as recorder:
        trainer.fit(Net(), batches(4))
    assert [call.batch_idx for call in recorder.calls] == got == [1, 3]


def test_hooks_that_come_late_are_recorded_and_those_that_left_are_not():
    trainer = quiet(hooks=[Watch()])

    @trainer.on("train_batch_end", name="change", when=lambda batch_idx: batch_idx == 0)
    def change():
        trainer.remove_hook("watch")
        trainer.add_hook(Watch("late"))

    with Recorder(trainer, events=["train_batch_end"]) as recorder:
        trainer.fit(Net(), batches(3))
    assert [(call.name, call.batch_idx) for call in recorder.calls if call.name != "change"] == [
        ("watch", 0),
        ("late", 1),
        ("late", 2),
    ]


def test_recording_changes_nothing_of_the_run():
    def train(record):
        trainer, module = quiet(hooks=[Watch()]), Net()
        with module_weights(module):
            if record:
                with Recorder(trainer):
                    trainer.fit(module, batches(3))
            else:
                trainer.fit(module, batches(3))
        return trainer.metrics["train/loss"], [
            (row.event, row.calls) for row in sorted(trainer.hooks.cost(), key=lambda row: row.event)
        ]

    assert train(record=True) == train(record=False)


class module_weights:
    """The same weights whenever it is entered."""

    def __init__(self, module):
        self.module = module

    def __enter__(self):
        for index, parameter in enumerate(self.module.parameters()):
            parameter.data.fill_(0.1 * (index + 1))

    def __exit__(self, *error): ...


def test_leaving_the_recorder_puts_the_slots_back():
    trainer = quiet(hooks=[Watch()])
    assert trainer.plan.on_step_end is noop
    with Recorder(trainer) as recorder:
        assert trainer.plan.on_step_end is noop
        assert trainer.plan.tracers == (recorder,)
    assert trainer.plan.tracers == ()
    assert trainer.plan.on_step_end is noop
    trainer.fit(Listening(), batches(2))
    assert recorder.calls == []


def test_a_recorder_leaves_when_the_run_fails():
    trainer = quiet()
    with (
        Recorder(trainer) as recorder,
        pytest.raises(ZeroDivisionError),
        trainer.on("train_start")(lambda: 1 / 0),
    ):
        trainer.fit(Net(), batches(1))
    assert trainer.plan.tracers == ()
    assert "training_step" not in recorder.events()


def test_recorders_may_be_nested_and_the_outer_one_continues_afterwards():
    trainer = quiet(hooks=[Watch()])
    with Recorder(trainer, events=["train_start"]) as outer:
        with Recorder(trainer, events=["train_start"]) as inner:
            trainer.fit(Net(), batches(1))
        trainer.fit(Net(), batches(1))
    assert len(inner.calls) == 1
    assert len(outer.calls) == 2
