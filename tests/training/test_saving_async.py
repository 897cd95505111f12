"""Checkpoints written in the background: the same contents, told when durable, one at a time, waited for at the end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook
from hookline.checkpoint import background, writer
from hookline.checkpoint.files import read, read_manifest
from hookline.hooks.model_checkpoint import ModelCheckpoint


class Saved(Hook):
    """Notes what it is told, when, and whether it was true."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, str]] = []
        self.threads: set[Any] = set()

    def on_checkpoint_save(self, path: Path, step: int, state: Any, reason: str) -> None:
        assert read(path)["counters"]["step"] == step
        self.told.append((step, state.step, reason))
        self.threads.add(threading.current_thread())


def fit(run_dir: Path, *hooks: Any, last: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    how = {"checkpoint": "async"} if last else {"save": "async"}
    trainer = quiet(
        run_dir=run_dir,
        hooks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), *hooks],
        **{"max_epochs": 2, **how, **options},
    )
    trainer.fit(Net(), batches(4))
    return trainer


def test_contents_are_those_of_the_step_that_was_saved(tmp_path: Path) -> None:
    fit(tmp_path / "async")
    fit(tmp_path / "sync", save="sync")
    for name in ("epoch=0-step=2", "epoch=0-step=4", "epoch=1-step=6", "epoch=1-step=8"):
        ours, theirs = (read(tmp_path / kind / "checkpoints" / name) for kind in ("async", "sync"))
        assert torch.equal(ours["module"]["layer.weight"], theirs["module"]["layer.weight"])
        assert ours["counters"] == theirs["counters"]


def test_everyone_is_told_on_the_main_thread_when_it_is_durable_with_the_saved_step(tmp_path: Path) -> None:
    saved = Saved()
    fit(tmp_path, saved, last=True)
    assert [step for step, _, _ in saved.told] == [2, 4, 6, 8, 8]  # the last one is the run's last state
    assert saved.threads == {threading.main_thread()}
    assert not [each for each in threading.enumerate() if each.name == "hookline save"]


def test_training_continues_while_one_is_written_and_waits_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    really = background.write

    def slow(*given: Any, **named: Any) -> Any:
        may_write.wait(60)
        return really(*given, **named)

    monkeypatch.setattr(background, "write", slow)
    steps: list[int] = []

    class Watches(Hook):
        def on_step_end(self, step: int) -> None:
            steps.append(step)
            if step == 3:
                assert not (
                    tmp_path / "checkpoints" / "epoch=0-step=2"
                ).exists()  # asked for at 2, and training continues
                may_write.set()

    saved = Saved()
    fit(tmp_path, saved, Watches())
    assert steps == list(range(1, 9))
    assert saved.told[0][0] == 2 and saved.told[0][1] > 2


def test_a_save_that_fails_is_reported_and_ends_the_run_or_not_as_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AsksForTheImpossible(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 8:  # the very last thing
                trainer.save_checkpoint(tmp_path / "file" / "cannot be")

    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot be could not be written"):
        fit(tmp_path / "a", AsksForTheImpossible())
    failed: list[Any] = []
    listener = Hook()
    listener.__dict__["on_checkpoint_failed"] = lambda path, step, exception: failed.append(
        (Path(path).name, step, exception)
    )
    trainer = fit(tmp_path / "b", AsksForTheImpossible(), listener, on_save_error="warn")
    assert trainer.status == "completed"
    assert "continues without it" in caplog.text
    assert failed[0][:2] == ("cannot be", 8) and isinstance(failed[0][2], CheckpointError)


def test_last_is_of_the_newest_state_though_an_older_one_is_still_being_written(tmp_path: Path) -> None:
    keep = ModelCheckpoint(every_n_train_steps=1, save_last=True)
    trainer = quiet(run_dir=tmp_path, hooks=[keep], max_epochs=2, save="async")
    trainer.fit(Net(), batches(4))
    assert read(tmp_path / "checkpoints" / "last")["counters"]["step"] == 8
    assert Path(keep.last_model_path).name == "last"


def test_checkpoints_at_a_url(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    keep = ModelCheckpoint("val/loss", dirpath=f"file://{tmp_path}/bucket", save_top_k=1, save_last=True)
    trainer = quiet(run_dir=tmp_path / "run", hooks=[keep], max_epochs=3)
    trainer.fit(Net(lr=0.01), batches(4), batches(1))
    there = sorted(each.name for each in (tmp_path / "bucket").iterdir())
    assert there == [Path(keep.best_model_path).name, "last"]
    assert keep.best_model_path.startswith("file://")
    again = quiet(run_dir=tmp_path / "run", max_epochs=4)
    again.fit(Net(), batches(4), batches(1), resume=keep.last_model_path)
    assert again.global_step == 16


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_run_on_a_disk_that_hangs_ends_and_names_what_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_save_error: str
) -> None:
    monkeypatch.setattr(writer, "FLUSH_TIMEOUT", 0.2)
    answers, flush = threading.Event(), os.fsync

    def hang(handle: int) -> None:
        assert answers.wait(60)
        flush(handle)

    monkeypatch.setattr(os, "fsync", hang)
    trainer = quiet(
        run_dir=tmp_path,
        hooks=[ModelCheckpoint(every_n_train_steps=4)],
        save="async",
        on_save_error=on_save_error,
    )
    try:
        with (
            pytest.raises(CheckpointError) if on_save_error == "raise" else contextlib.nullcontext() as raised
        ):
            trainer.fit(Net(), batches(4))
    finally:
        answers.set()
    said = caplog.text if raised is None else str(raised.value)
    assert "epoch=0-step=4 could not be written: it was still not on the disk after 0 s" in said


def test_a_hook_hears_of_a_checkpoint_before_a_newer_one_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_batch, write, seen = threading.Event(), background.write, list[tuple[int, int]]()

    def late(*given: Any) -> Any:
        second_batch.wait(20)  # so that the first one is not written when its own save point is over
        return write(*given)

    monkeypatch.setattr(background, "write", late)

    class Looks(Hook):
        def on_train_batch_start(self, batch_idx: int) -> None:
            if batch_idx == 1:
                second_batch.set()

        def on_checkpoint_save(self, path: Path, step: int) -> None:
            if path.parent.name == "checkpoints":  # the state that the run ends with has a name of its own
                return
            until = time.monotonic() + (1.0 if not seen else 0.0)
            while read_manifest(path)["step"] == step and time.monotonic() < until:
                time.sleep(0.01)
            seen.append((step, read_manifest(path)["step"]))

    class AsksForLast(Hook):
        def on_step_end(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "run" / "last")

    quiet(run_dir=tmp_path / "run", save="async", hooks=[AsksForLast(), Looks()]).fit(Net(), batches(3))
    assert seen == [(1, 1), (2, 2), (3, 3)]
