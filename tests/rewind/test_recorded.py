"""A recorded run as it is read: how far it came, where it begins again, and what was done to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import Net, batches

from hookline import Hook, OptionError, Trainer
from hookline.checkpoint.catalog import ALONE
from hookline.hooks import ModelCheckpoint
from hookline.rewind.recorded import Beginning, RecordedRun, log_position


def record(folder: Path, *hooks: Any, **options: Any) -> RecordedRun:
    saves = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        run_dir=folder,
        max_epochs=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        hooks=[saves, *hooks],
        **options,
    )
    trainer.fit(Net(), batches(4))
    return RecordedRun(folder)


def test_a_run_begins_at_its_newest_checkpoint_before_a_step(tmp_path: Path) -> None:
    run = record(tmp_path / "run", seed=1)
    assert (run.last_step, run.world_size, run.seed, run.config) == (8, 1, 1, None)
    assert run.checkpoint_steps == [2, 4, 6, 8]
    assert [run.find_beginning(to, ALONE).step for to in range(1, 9)] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert run.find_beginning(2, ALONE).start is None
    start = run.find_beginning(8, ALONE).start
    assert start is not None
    at = log_position(start.contents)
    assert at is not None and b'"step": 6' in (tmp_path / "run" / "log.jsonl").read_bytes()[:at]
    assert len(list(run.rows())) == 8 + 2 and run.options["max_epochs"] == 2


def test_a_bare_name_is_a_run_in_runs(tmp_path: Path) -> None:
    record(Path("runs") / "mine")
    assert RecordedRun("mine").path == Path("runs/mine")
    with pytest.raises(OptionError, match="does not exist"):
        RecordedRun("other")


def test_a_killed_run_is_known_by_its_log_and_checkpoints(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    known = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**known, "status": "training", "step": 3}))
    assert RecordedRun(run.path).last_step == 8
    RecordedRun(run.path).check_step(9)
    with pytest.raises(OptionError, match="choose 1 to 8, and 9 to see the step that failed or was cut off"):
        RecordedRun(run.path).check_step(10)
    with pytest.raises(OptionError, match="to=True"):
        run.check_step(True)


def test_rollbacks_are_found_in_the_order_in_which_they_happened(tmp_path: Path) -> None:
    class GoesBack(Hook):
        left = [(5, 4), (7, 2)]

        def on_step_end(self, trainer: Any, step: int) -> None:
            if self.left and step == self.left[0][0]:
                trainer.roll_back(before=self.left[0][1])
                self.left = self.left[1:]

    run = record(tmp_path / "run", GoesBack())
    beginning = run.find_beginning(4, ALONE)

    def steps(to: int, since: Beginning = beginning) -> list[tuple[int, int]]:
        return [(each["from_step"], each["step"]) for each in run.changes_since(since, to)[0]]

    assert beginning.step == 2
    assert steps(4) == steps(8) == [(5, 4), (7, 2)]  # the second one has undone the first
    assert steps(2) == []
    assert steps(8, run.find_beginning(7, ALONE)) == []  # saved after both
    assert run.changes_since(Beginning(), 1) == ([], [])
