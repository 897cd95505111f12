"""Spans of runs in cases that are rare: saves in the background, saves that fail, a stop, a failed run."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from hooks.traced import Traces
from tiny import Net, batches, quiet

from hookline import Hook, StopTraining


def test_saves_in_the_background_are_spans_until_they_are_durable(tmp_path: Path) -> None:
    """The second save begins before the end of the first is reported; each has its own path and end."""

    class Saves(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step in (1, 2):
                trainer.save_checkpoint(tmp_path / f"at-{step}")

        def on_checkpoint_save(self, path: Any) -> None:
            pass

    hook = Traces(every=0)
    trainer = quiet(hooks=[Saves(), hook], run_dir=tmp_path, checkpoint={"last": False, "write": "async"})
    trainer.fit(Net(), batches(4))
    saves = hook.named("save_checkpoint")
    assert [Path(each.attributes["hookline.path"]).name for each in saves] == ["at-1", "at-2"]
    assert [hook.parent_of(each) for each in saves] == ["run fit"] * 2
    calls = hook.named("saves.on_checkpoint_save")
    assert [each.parent.span_id for each in calls] == [each.context.span_id for each in saves]
    for call, save in zip(calls, saves, strict=True):
        assert save.start_time <= call.start_time <= call.end_time <= save.end_time
    assert not any(each.status.description for each in saves)


def test_a_save_that_fails_is_a_failed_span(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")

    class Saves(Hook):
        def on_step_end(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "taken" / "below")

    hook = Traces(every=0)
    options = {"last": False, "on_error": "warn"}
    quiet(hooks=[Saves(), hook], run_dir=tmp_path, checkpoint=options).fit(Net(), batches(1))
    (save,) = hook.named("save_checkpoint")
    assert save.status.description.startswith("CheckpointError: ")
    assert [each.name for each in save.events] == ["exception"]


def test_a_pass_that_is_abandoned_and_a_stop_are_no_failures() -> None:
    class Stops(Hook):
        def on_validation_epoch_start(self) -> None:
            raise StopTraining("enough")

    hook = Traces()
    trainer = quiet(hooks=[Stops(), hook])
    trainer.fit(Net(), batches(2), batches(2))
    assert trainer.status == "stopped"
    assert not [each.name for each in hook.spans if each.status.description]
    assert hook.named("run fit")[0].attributes["hookline.status"] == "stopped"


def test_a_failed_run_keeps_neither_its_error_nor_its_tensors() -> None:
    kept: list[Any] = []

    class Big:
        pass

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            big = Big()
            kept.append(weakref.ref(big))
            raise ValueError("broken")

    hook = Traces()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="broken"):
            quiet(hooks=[hook]).fit(Fails(), batches(2))
        assert kept[0]() is None  # without a collection: no cycle holds the frame
    finally:
        gc.enable()
    assert hook.named("training_step")[0].status.description == "ValueError: broken"
