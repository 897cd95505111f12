"""A recorded run is played to a hook without a model: the same events, the same facts, and an error for what was not recorded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny import Net, SavesFirstEpoch, batches, quiet

from hookline import (
    EVENTS,
    SKIP_BATCH,
    Hook,
    HooklineError,
    OptionError,
    StepContext,
    StopTraining,
    declare_event,
    every,
    on,
)
from hookline.hooks import EarlyStopping
from hookline.tracing.replay import NotRecorded, replay


class Notes(Hook):
    """Writes down everything plain that it can ask for."""

    def __init__(self):
        self.notes = []

    def setup(self, stage):
        self.notes.append(("setup", stage))

    def on_train_epoch_start(self, epoch, resumed, world_size):
        self.notes.append(("epoch", epoch, resumed, world_size))

    def on_train_batch_end(self, batch_idx, loss, metrics, dataloader_name, samples_seen):
        self.notes.append(("batch", batch_idx, loss, dict(metrics), dataloader_name, samples_seen))

    @every("2 steps")
    def on_step_end(self, step, loss, lr, batches_seen):
        self.notes.append(("step", step, loss, lr, batches_seen))

    def on_validation_end(self, metrics, sanity_checking):
        self.notes.append(("validation", dict(metrics), sanity_checking))

    def on_checkpoint_save(self, path, step, reason):
        self.notes.append(("saved", path, step, reason))

    def on_train_metrics(self, metrics):
        self.notes.append(("row", dict(metrics)))

    def on_train_end(self, status, metrics):
        self.notes.append(("end", status, dict(metrics)))


def record(*hooks, module=None, **options):
    trainer = quiet(
        **{
            "hooks": list(hooks),
            "trace": "trace.json",
            "max_epochs": 2,
            "log_every_n_steps": 2,
            "run_dir": "run",
            **options,
        }
    )
    trainer.fit(module or Net(), batches(3), batches(2))
    return trainer


def test_a_hook_hears_in_the_replay_just_what_it_heard_in_the_run():
    hook, again = Notes(), Notes()
    record(hook, SavesFirstEpoch(), num_sanity_val_steps=1)
    done = replay("trace.json", again)
    assert again.notes == hook.notes
    assert {each[0] for each in again.notes} == {
        "setup",
        "epoch",
        "batch",
        "step",
        "validation",
        "saved",
        "row",
        "end",
    }
    assert (done.hook, done.steps) == ("notes", 6)
    assert sum(row.calls for row in done.cost) == len(again.notes)


def test_a_hook_that_was_not_there_gets_events_that_had_no_listener():
    record()
    heard = []
    replay("trace.json", on("after_backward")(lambda batch_idx: heard.append(batch_idx)))
    assert heard == [0, 1, 2, 0, 1, 2]


def test_numbers_that_json_does_not_know_come_back():
    class Bad(Hook):
        def on_step_end(self, trainer):
            trainer.log("bad", math.nan)
            trainer.log("huge", math.inf)

    record(Bad())
    again = Notes()
    replay("trace.json", again)
    rows = [each[1] for each in again.notes if each[0] == "row" and "bad" in each[1]]
    assert rows and all(math.isnan(each["bad"]) and each["huge"] == math.inf for each in rows)


def test_what_was_not_recorded_is_an_error_before_the_first_event():
    record()

    class Wants(Hook):
        heard = 0

        def setup(self):
            self.heard += 1

        def on_train_batch_end(self, batch, loss, trainer): ...

        def on_step_end(self, grad_norm): ...

    hook = Wants()
    with pytest.raises(
        NotRecorded,
        match=r"'batch' in on_train_batch_end, 'trainer' in on_train_batch_end, 'grad_norm' in on_step_end",
    ):
        replay("trace.json", hook)
    assert hook.heard == 0


def test_costly_facts_are_there_if_a_hook_had_requested_them():
    got = {"run": [], "replay": []}

    class Norms(Hook):
        def __init__(self, where):
            self.got = got[where]

        def on_step_end(self, grad_norm, tokens_seen):
            self.got.append((grad_norm, tokens_seen))

    record(Norms("run"))
    replay("trace.json", Norms("replay"))
    assert got["replay"] == got["run"]
    assert len(got["run"]) == 6


def test_the_state_and_the_context_have_what_was_recorded_and_name_what_was_not():
    record()
    seen = []

    class Looks(Hook):
        def on_step_end(self, state, ctx):
            assert isinstance(ctx, StepContext)
            assert ctx.loss == state.window_loss and state["current_epoch"] == state.epoch
            with pytest.raises(NotRecorded, match="'grad_norm' was not recorded at epoch 0, batch 0, step 1"):
                ctx.grad_norm  # noqa: B018
            with pytest.raises(NotRecorded, match="'optimizers' was not recorded at"):
                state.optimizers  # noqa: B018
            seen.append(state.step)
            raise StopTraining("seen enough")

        def on_train_batch_start(self, batch_idx):
            return SKIP_BATCH if batch_idx == 2 else None

        def on_train_metrics(self, metrics):
            return {**metrics, "more": 1.0}

    done = replay("trace.json", on("step_end", every=100)(lambda: None))
    assert done.asked == []
    hook = Looks()
    record(max_epochs=1, limit_train_batches=1, log_every_n_steps=1, logger=True)
    done = replay("trace.json", hook)
    assert seen == [1]
    assert done.asked[0] == "replace row at epoch 0, batch 0, step 1"
    assert "stop at epoch 0, batch 0, step 1: seen enough" in done.asked


def test_signals_are_noted_and_the_run_continues():
    record()
    done = replay(
        "trace.json", on("train_batch_start")(lambda batch_idx: SKIP_BATCH if batch_idx == 2 else None)
    )
    assert done.asked == [
        "SKIP_BATCH from on_train_batch_start at epoch 0, batch 2, step 2",
        "SKIP_BATCH from on_train_batch_start at epoch 1, batch 2, step 5",
    ]


def test_a_replay_of_a_run_on_several_ranks_needs_no_declaration_of_signals():
    record()
    trace = Path("trace.json")
    text = trace.read_text()
    assert '"world_size": 1' in text or '"world_size":1' in text
    trace.write_text(
        text.replace('"world_size": 1', '"world_size": 2').replace('"world_size":1', '"world_size":2')
    )
    done = replay(
        "trace.json", on("train_batch_start")(lambda batch_idx: SKIP_BATCH if batch_idx == 2 else None)
    )
    assert len(done.asked) == 2


def test_a_hook_that_fails_says_where_in_the_recorded_run():
    record()
    with pytest.raises(ZeroDivisionError) as failed:
        replay("trace.json", on("step_end")(lambda step: 1 / (step - 4)))
    assert (
        "in on_step_end" in failed.value.__notes__[0]
        and "epoch 1, batch 0, step 4" in failed.value.__notes__[0]
    )
    with pytest.raises(ZeroDivisionError):
        replay("trace.json", on("teardown")(lambda: 1 / 0))


def test_own_events_are_played_too():
    declare_event("on_reward", ("reward",), "A reward came in.")
    try:
        trainer = quiet(trace="trace.json")
        trainer.on("train_batch_end")(lambda batch_idx: trainer.emit("on_reward", reward=batch_idx * 0.5))
        trainer.fit(Net(), batches(3))
        heard = []
        replay("trace.json", on("reward")(lambda reward, batch_idx: heard.append((reward, batch_idx))))
    finally:
        EVENTS.forget("on_reward")
    assert heard == [(0.0, 0), (0.5, 1), (1.0, 2)]


def test_a_killed_runs_trace_is_played_as_far_as_it_goes():
    record()
    data = Path("trace.json").read_bytes()
    Path("cut.json").write_bytes(data[: len(data) // 2])
    steps = []
    done = replay("cut.json", on("step_end")(lambda step: steps.append(step)))
    assert steps and steps == list(range(1, len(steps) + 1)) and len(steps) < 6
    assert done.steps >= steps[-1]


def test_nothing_to_hear_is_an_error():
    record()
    with pytest.raises(HooklineError, match=r"has none of the events of this hook \(on_test_end\)"):
        replay("trace.json", on("test_end")(lambda: None))
    with pytest.raises(OptionError, match=r"has no events of rank 3. Recorded ranks: 0"):
        replay("trace.json", Notes(), rank=3)


def test_a_rank_that_is_played_is_the_one_that_the_hook_is_on():
    record()
    text = Path("trace.json").read_text()
    Path("rank1.json").write_text(text.replace('"pid":0', '"pid":1').replace('"rank":0', '"rank":1'))
    notes = Notes()
    notes.ranks = [1]
    assert replay("rank1.json", notes).events and notes.notes
    notes = Notes()
    notes.ranks = "zero"
    replay("rank1.json", notes)
    assert not notes.notes


def test_a_built_in_hook_that_only_needs_metrics_says_what_it_would_have_done():
    record()
    done = replay("trace.json", EarlyStopping("val/loss", stopping_threshold=1e9))
    assert any(
        each.startswith("stop at epoch 0") and "has reached the threshold" in each for each in done.asked
    )


def test_a_trace_without_any_event_is_refused():
    record()
    first = Path("trace.json").read_text().splitlines()[0]
    Path("empty.json").write_text(first + "\n")
    with pytest.raises(OptionError, match="has no events yet"):
        replay("empty.json", Notes())
