"""A trace can be started and stopped in the middle of a run, continues after a resume, and never replaces what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import Net, SavesFirstEpoch, batches, quiet
from tracing.traced import Watch, load, named

from hookline import HooklineError, OptionError
from hookline.tracing.session import file_of_rank


def test_it_covers_what_happens_between_start_and_stop():
    trainer = quiet(hooks=[Watch()], run_dir="run")
    is_on = []

    @trainer.on("train_batch_end")
    def switch(batch_idx):
        if batch_idx == 1:
            trainer.tracing.start()
        if batch_idx == 3:
            trainer.tracing.stop()
        is_on.append(trainer.tracing.is_on)

    trainer.fit(Net(), batches(6))
    assert is_on == [False, True, True, False, False, False]
    records = load("run/trace.json")
    assert [each["args"]["step"] for each in named(records, "on_step_end")] == [2, 3]
    assert len(named(records, "training_step", "action")) == 2
    assert trainer.plan.tracers == ()
    plan = named(records, "hookline_plan", None)[0]["args"]
    assert plan["partial"] is True and any(row["event"] == "on_step_end" for row in plan["rows"])


def test_started_again_it_continues_in_the_same_file():
    trainer = quiet(run_dir="run")

    @trainer.on("train_batch_end")
    def switch(batch_idx):
        (trainer.tracing.stop if trainer.tracing.is_on else trainer.tracing.start)()

    trainer.fit(Net(), batches(6))
    assert [each["args"]["step"] for each in named(load("run/trace.json"), "on_step_end")] == [1, 3, 5]


def test_a_run_that_ends_closes_its_trace():
    trainer = quiet(run_dir="run")
    trainer.on("train_start")(lambda: trainer.tracing.start("mine.json"))
    trainer.fit(Net(), batches(2))
    assert len(named(load("mine.json"), "on_step_end")) == 2
    assert not trainer.tracing.is_on


def test_it_cannot_be_started_twice_or_without_a_run():
    trainer = quiet(trace="trace.json")
    with pytest.raises(
        HooklineError,
        match=r"works only during a run, from a hook. To trace a whole run, use Trainer\(trace=True\)",
    ):
        trainer.tracing.start()
    trainer.on("train_start")(lambda: trainer.tracing.start())
    with pytest.raises(HooklineError, match="being written already"):
        trainer.fit(Net(), batches(1))
    trainer.tracing.stop()  # nothing to stop, nothing happens


def test_a_resumed_run_continues_in_the_trace_of_the_killed_one():
    saves = SavesFirstEpoch()
    quiet(hooks=[saves], trace=True, run_dir="run", max_epochs=2).fit(Net(), batches(2))
    path = Path("run/trace.json")
    path.write_bytes(path.read_bytes()[:-200])  # as a kill leaves it: no end, and half a line
    quiet(trace=True, run_dir="run", max_epochs=3).fit(Net(), batches(2), resume=saves.path)
    records = load(path)
    assert [each["args"]["resumed"] for each in records if each["name"] == "hookline"] == [False, True]
    assert [each["args"]["step"] for each in named(records, "on_step_end")] == [1, 2, 3, 4, 3, 4, 5, 6]


def test_a_fresh_run_replaces_an_older_trace_and_a_test_continues_in_it():
    for _ in range(2):
        trainer = quiet(trace="trace.json")
        net = Net()
        trainer.fit(net, batches(2))
        trainer.test(net, batches(1))
    records = load("trace.json")
    assert [each["args"]["stage"] for each in records if each["name"] == "hookline"] == ["fit", "test"]
    assert len(named(records, "on_step_end")) == 2 and len(named(records, "on_test_end")) == 1


def test_a_file_that_is_no_trace_is_not_written_over():
    Path("notes.json").write_text(json.dumps([1]))
    with pytest.raises(
        OptionError, match=r"trace='notes.json' exists and is not a trace of Hookline; it is not overwritten"
    ):
        quiet(trace="notes.json").fit(Net(), batches(1))
    assert json.loads(Path("notes.json").read_text()) == [1]
    Path("folder").mkdir()
    with pytest.raises(OptionError, match=r"is a directory; name a file in it, such as folder/trace.json"):
        quiet(trace="folder").fit(Net(), batches(1))
    with pytest.raises(OptionError, match=r"trace='notes.json/x/trace.json' cannot be written"):
        quiet(trace="notes.json/x/trace.json").fit(Net(), batches(1))


@pytest.mark.parametrize("wrong", [3, "", None, ["trace.json"]])
def test_a_wrong_option_is_refused(wrong):
    with pytest.raises(OptionError, match=r"trace=.* must be True, False or the path of a file"):
        quiet(trace=wrong)


def test_files_of_several_ranks_lie_side_by_side():
    assert file_of_rank(Path("run/trace.json"), 0) == Path("run/trace.json")
    assert file_of_rank(Path("run/trace.json"), 3) == Path("run/trace.rank3.json")


def test_a_hook_that_stops_the_trace_and_takes_its_time_ends_the_trace_and_not_the_run(monkeypatch):
    monkeypatch.setattr(
        "hookline.tracing.tracer.FLUSH_INTERVAL", 0
    )  # every event that ends would be written at once
    trainer = quiet(trace="trace.json")
    trainer.on("train_batch_end")(lambda batch_idx: trainer.tracing.stop() if batch_idx == 2 else None)
    trainer.fit(Net(), batches(5))
    assert trainer.status == "completed"
    assert [each["args"]["step"] for each in named(load("trace.json"), "on_step_end")] == [1, 2]


def test_after_a_full_disk_another_trace_can_be_started():
    trainer = quiet(trace="trace.json", hooks=[Watch()])

    @trainer.on("train_batch_end")
    def switch(batch_idx):
        if batch_idx == 1:
            trainer.tracing._tracer.failed = True  # as when the disk is full
        if batch_idx == 2:
            trainer.tracing.start("other.json")

    trainer.fit(Net(), batches(5))
    assert [each["args"]["step"] for each in named(load("other.json"), "on_step_end")] == [3, 4, 5]
