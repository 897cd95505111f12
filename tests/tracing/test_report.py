"""What happened is told beside what was planned, and every difference is named."""

from __future__ import annotations

import pytest
from tiny import Net, batches, quiet
from tracing.traced import Listening, Watch, trace_run

from hookline import DataModule, Hook, every
from hookline.tracing.reader import read_trace
from hookline.tracing.report import count, differences_from_plan


def told(path="trace.json"):
    return count(read_trace(path))


def different(path="trace.json"):
    seen = told(path)
    return differences_from_plan(seen.rows, seen)


def test_a_run_as_planned_has_no_differences():
    trace_run()
    seen = told()
    assert different() == []
    assert (seen.events["on_step_end"], seen.events["on_validation_end"]) == (6, 2)
    assert seen.calls["hooks", "watch", "on_step_end"].calls == 6
    assert seen.calls["module", "Listening", "training_step"].calls == 6


def test_a_hook_that_was_switched_off_is_named_with_where():
    trainer = quiet(hooks=[Watch()], trace="trace.json")
    trainer.on("train_batch_end", name="switch")(
        lambda batch_idx: trainer.disable_hook("watch") if batch_idx == 1 else None
    )
    trainer.fit(Net(), batches(5), batches(1))
    assert different() == [
        "hook watch was called in on_train_batch_end 2 of 5 times: the last at step 2, then it was switched off, removed or "
        "skipped because of its budget",
        "hook watch was called in on_step_end 1 of 5 times: the last at step 1, then it was switched off, removed or "
        "skipped because of its budget",
    ]


def test_a_gap_is_named_too():
    trainer = quiet(hooks=[Watch()], trace="trace.json")
    switches = {1: trainer.disable_hook, 3: trainer.enable_hook}
    trainer.on("train_batch_start", name="switch")(
        lambda batch_idx: switches[batch_idx]("watch") if batch_idx in switches else None
    )
    trainer.fit(Net(), batches(6), batches(1))
    assert (
        "hook watch was called in on_step_end 4 of 6 times: in between it was switched off, removed or skipped because of its budget"
        in different()
    )


def test_a_hook_that_came_later_is_named():
    trainer = quiet(trace="trace.json")
    trainer.on("train_batch_end", name="adds")(
        lambda batch_idx: trainer.add_hook(Watch()) if batch_idx == 1 else None
    )
    trainer.fit(Net(), batches(4), batches(1))
    found = different()
    assert len(found) == 2
    assert found[0].startswith("hook watch was called in on_step_end but was not planned: called 3 times, ")
    assert found[0].endswith("from step 2 on")


def test_a_schedule_that_never_fired_is_named_and_one_that_fired_is_as_planned():
    class Rare(Hook):
        @every("100 steps")
        def on_step_end(self): ...

        @every("2 steps")
        def on_train_batch_end(self): ...

    trace_run("trace.json", Rare())
    assert different() == [
        "hook rare was never called in on_step_end, which happened 6 times; its filter is every 100 steps"
    ]


def test_an_event_that_never_came_is_named_unless_it_comes_only_if_something_is_the_matter():
    class Waits(Hook):
        def on_validation_end(self): ...

        def on_exception(self): ...

        def on_step_skipped(self): ...

        def on_checkpoint_save(self): ...

    trainer = quiet(hooks=[Waits()], trace="trace.json")
    trainer.fit(Net(), batches(1))
    assert different() == ["on_validation_end never happened: hook waits was not called"]


def test_a_trace_of_a_part_of_a_run_says_nothing_about_the_rest():
    class Starts(Hook):
        def on_train_start(self): ...

    trainer = quiet(hooks=[Starts()], run_dir="run")
    trainer.on("train_batch_end")(lambda batch_idx: trainer.tracing.start() if batch_idx == 0 else None)
    trainer.fit(Net(), batches(3))
    assert different("run/trace.json") == []


def test_a_data_module_that_hears_instead_of_the_module_is_as_planned():
    class Moves(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    class Data(DataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

        def train_dataloader(self):
            return batches(2)

        val_dataloader = train_dataloader

    quiet(trace="trace.json").fit(Moves(), datamodule=Data())
    assert different() == []


def test_an_order_that_was_not_planned_is_named():
    trace_run("trace.json", Watch("second"))
    seen = told()
    for row in seen.rows:
        if row["event"] == "on_step_end":
            row["listeners"].reverse()
    assert differences_from_plan(seen.rows, seen) == [
        "on_step_end called watch → second, but the plan is second → watch"
    ]


def test_another_plan_than_the_runs_own_can_be_compared():
    trace_run()
    planned = [row for row in quiet(hooks=[Watch("other")]).explain(Listening()).data() if row["listeners"]]
    found = differences_from_plan(planned, told())
    assert (
        "hook other was never called in on_step_end, which happened 6 times; it was switched off, removed or not added"
        in found
    )
    assert any(each.startswith("hook watch was called in on_step_end but was not planned") for each in found)


def test_a_run_that_failed_is_said_to_have_failed_and_those_after_the_guilty_one_are_not_said_to_be_switched_off():
    class Fails(Hook):
        def on_train_batch_end(self, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        quiet(hooks=[Fails(), Watch()], trace="trace.json").fit(Net(), batches(5))
    found = different()
    assert found[0].startswith("the run failed, or was interrupted, at step 3")
    assert not any("switched off" in each for each in found)


def test_a_bar_does_not_miss_a_validation_that_was_never_to_come():
    quiet(trace="trace.json", enable_progress_bar=True).fit(Net(), batches(2))
    assert different() == []
