"""A trace holds every event and call with its nesting, step, rank and facts, costs nothing when off, and changes nothing."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import preloaded
import pytest
import torch
from tiny import Net, SavesFirstEpoch, batches, quiet
from tracing.traced import Listening, Watch, load, named, trace_run

from hookline import EVENTS, Hook, Recorder, declare_event, on
from hookline.engine.plan import noop
from hookline.tracing import tracer as tracer_module


def inside(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3


def test_every_call_that_a_recorder_sees_is_in_the_trace_in_the_same_order():
    trainer = quiet(hooks=[Watch()], trace="trace.json")
    with Recorder(trainer) as recorder:
        trainer.fit(Listening(), batches(3), batches(2))
    kinds = {"H": "hook", "M": "module", "S": "strategy", "D": "data module"}
    calls = [each for each in load("trace.json") if each.get("cat") in kinds.values()]
    assert [
        (each["cat"], each["name"], each["args"]["event"], each["args"]["step"])
        for each in sorted(calls, key=lambda e: e["ts"])
    ] == [(kinds[call.receiver], call.name, call.event, call.step) for call in recorder.calls]


def test_calls_lie_in_their_event_events_in_their_batch_batches_in_their_epoch():
    records = trace_run()
    epochs = [each for each in records if each["name"].startswith("epoch ")]
    batches_ = [each for each in records if each["name"].startswith("batch ") and each["cat"] == "span"]
    validations = named(records, "validation", "span")
    assert [each["name"] for each in epochs] == ["epoch 0", "epoch 1"]
    assert len(validations) == 2 and len(batches_) == 2 * (3 + 2)
    for call in (each for each in records if each.get("cat") in ("hook", "module")):
        assert any(inside(call, event) for event in records if event["name"] == call["args"]["event"])
    for event in (
        named(records, "on_train_batch_end")
        + named(records, "on_step_end")
        + named(records, "backward", "action")
    ):
        assert sum(inside(event, batch) for batch in batches_) == 1
    for batch in batches_:
        assert sum(inside(batch, epoch) for epoch in epochs) == 1
    for validation in validations:
        assert sum(inside(batch, validation) for batch in batches_) == 2
    spans = sorted(batches_, key=lambda each: each["ts"])
    assert all(first["ts"] + first["dur"] <= second["ts"] + 1e-3 for first, second in pairwise(spans))


def test_a_viewer_finds_every_record_inside_another_one_or_beside_it():
    class Validates(Hook):
        def on_step_end(self, trainer, step):
            if step == 2:
                trainer.validate()

    records = [each for each in trace_run("trace.json", Validates(), SavesFirstEpoch()) if each["ph"] == "X"]
    # as Perfetto does it: whole nanoseconds, cut off, and what ends after the one around it is dropped
    times = sorted((int(each["ts"] * 1000), -int(each["dur"] * 1000)) for each in records)
    around: list[int] = []
    for start, minus in times:
        while around and around[-1] <= start:
            around.pop()
        assert not around or start - minus <= around[-1]
        around.append(start - minus)
    assert len(times) > 200


def test_events_without_listeners_are_there_too_and_leave_no_slot_behind():
    trainer = quiet(trace="trace.json")
    trainer.fit(Net(), batches(2))
    assert len(named(load("trace.json"), "on_after_backward")) == 2
    assert trainer.plan.on_after_backward is noop
    assert trainer.plan.tracers == ()


def test_off_means_absent():
    seen = []
    trainer = quiet(hooks=[Watch()])
    trainer.on("train_start")(lambda: seen.append((trainer.plan.on_after_backward, trainer.plan.tracers)))
    trainer.fit(Net(), batches(1))
    assert seen == [(noop, ())]


def test_facts_that_are_plain_data_stand_with_their_event():
    records = trace_run(log_every_n_steps=2)
    ends = [each["args"] for each in named(records, "on_train_batch_end")]
    assert [each["step"] for each in ends] == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(each["loss"], float) and each["metrics"]["loss"] == each["loss"] for each in ends)
    assert all("batch" not in each and "outputs" not in each for each in ends)
    assert named(records, "on_step_end")[0]["args"]["used_lr"] == 0.1
    assert set(named(records, "on_validation_end")[0]["args"]["metrics"]) == {"val/loss"}
    assert named(records, "on_train_end")[0]["args"]["status"] == "completed"
    # those known at every event are written when they change
    known = {}
    for each in records:
        if each.get("cat") in ("event", "action"):
            known.update(each["args"])
    assert (known["batches_seen"], known["samples_seen"], known["epochs_seen"], known["lr"]) == (
        6,
        18,
        2,
        0.1,
    )


def test_every_process_is_its_rank_and_says_so():
    records = trace_run()
    assert {each["pid"] for each in records} == {0}
    assert named(records, "process_name", None)[0]["args"] == {"name": "rank 0"}
    header = records[0]["args"]
    assert (header["rank"], header["world_size"], header["stage"], header["resumed"]) == (0, 1, "fit", False)


def test_tracing_changes_neither_the_training_nor_what_is_called():
    def run(**options):
        torch.manual_seed(0)
        net = Listening()
        trainer = quiet(
            hooks=[Watch()], max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1, **options
        )
        with Recorder(trainer) as recorder:
            trainer.fit(net, batches(5), batches(2))
        return recorder.calls, {name: each.clone() for name, each in net.state_dict().items()}

    calls, weights = run()
    traced_calls, traced_weights = run(trace=True, run_dir="run")
    assert traced_calls == calls
    assert all(torch.equal(weights[name], traced_weights[name]) for name in weights)


def test_a_run_that_nothing_may_be_read_from_can_be_traced():
    class OnMeta(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step([each.to("meta") for each in batch], batch_idx)

    trainer = quiet(device="meta", trace="trace.json", nonfinite="stop")
    trainer.fit(OnMeta().to("meta"), batches(3))
    assert all("loss" not in each["args"] for each in named(load("trace.json"), "on_train_batch_end"))


def test_a_hook_that_fails_is_in_the_trace_with_the_whole_run():
    trainer = quiet(trace="trace.json")
    with pytest.raises(ZeroDivisionError), trainer.on("step_end", name="fails")(lambda: 1 / 0):
        trainer.fit(Net(), batches(2))
    records = load("trace.json")
    assert len(named(records, "fails", "hook")) == 1
    assert named(records, "on_exception") and named(records, "teardown")
    assert named(records, "epoch 0", "span")  # not over, but closed with the file


def test_own_events_are_recorded_with_their_plain_facts():
    declare_event("on_reward", ("reward", "model_output"), "A reward came in.")
    try:
        trainer = quiet(trace="trace.json")
        trainer.on("train_batch_end")(lambda: trainer.emit("on_reward", reward=1.5, model_output=object()))
        trainer.fit(Net(), batches(1))
    finally:
        EVENTS.forget("on_reward")
    args = named(load("trace.json"), "on_reward")[0]["args"]
    assert args["reward"] == 1.5 and "model_output" not in args


def test_numbers_that_json_does_not_know_become_text():
    @on("train_metrics")
    def spoil(metrics):
        metrics["train/bad"] = float("nan")

    trainer = quiet(trace="trace.json", log_every_n_steps=1, hooks=[spoil])
    heard = []
    trainer.on("train_metrics", name="later")(lambda metrics: heard.append(metrics["train/bad"]))
    trainer.on("step_end")(lambda: trainer.log("inf", float("inf")))
    trainer.fit(Net(), batches(2))
    rows = [each["args"]["metrics"] for each in named(load("trace.json"), "on_train_metrics")]
    assert {"inf": "inf"} in rows and heard


def test_memory_stays_bounded_and_chunks_are_written_as_they_come(monkeypatch):
    monkeypatch.setattr(tracer_module, "MOST_PENDING", 64)
    most = 0

    class Looks(Hook):
        def on_train_batch_end(self, trainer):
            nonlocal most
            most = max(most, len(trainer.plan.tracers[0]._records))

    sizes = []
    trainer = quiet(hooks=[Looks()], trace="trace.json")
    trainer.on("step_end")(lambda: sizes.append(Path("trace.json").stat().st_size))
    trainer.fit(Net(), batches(60))
    assert most <= 64 + 20
    assert sizes[10] < sizes[30] < sizes[50]
    assert len(named(load("trace.json"), "writing the trace", "trace")) > 5


FULL_DISK = """
import logging, resource, sys
sys.path[:0] = {path!r}
from tiny import Net, batches, quiet
logging.basicConfig()
trainer = quiet(trace="trace.json")
trainer.on("train_start")(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)))
trainer.fit(Net(), batches(400))
print("done", trainer.status, trainer.global_step, trainer.plan.tracers)
"""


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path):
    code = FULL_DISK.format(path=[each for each in sys.path if each.endswith("tests")])
    done = preloaded.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "done completed 400 ()\n", done.stderr
    assert done.stderr.count("because writing to it failed") == 1


def test_a_fact_that_holds_itself_is_left_out():
    around = [1]
    around.append(around)
    declare_event("on_reward", ("reward", "text"), "A reward came in.")
    try:
        trainer = quiet(trace="trace.json")
        trainer.on("train_batch_end")(lambda: trainer.emit("on_reward", reward=around, text="kept"))
        trainer.fit(Net(), batches(1))
    finally:
        EVENTS.forget("on_reward")
    args = named(load("trace.json"), "on_reward")[0]["args"]
    assert args["text"] == "kept" and "reward" not in args
