"""A new run in the directory of an earlier one: it takes the directory at its first update, not before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook, OptionError
from hookline.hooks import ModelCheckpoint
from hookline.loggers import read_log
from hookline.report.runs import list_runs
from hookline.run.record import read_record

RUN = Path("runs/keep")


def trainer(*hooks: Any, **options: Any) -> Any:
    given = {
        "num_sanity_val_steps": 1,
        "max_epochs": 2,
        "checkpoint": True,
        "logger": True,
        "log_every_n_steps": 1,
        **options,
    }
    return quiet(run_dir=RUN, hooks=[ModelCheckpoint(monitor="val/loss"), *hooks], **given)


class Typo(Net):
    """Fails where a user's mistake would show."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "first batch":
            self.log("a", 1.0)
            raise NameError("typo")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "sanity check":
            raise NameError("typo")
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.where == "set-up":
            return []
        return super().configure_optimizers()


class Copies(Hook):
    """Copies the directory as a kill at this moment would leave it."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.event = event

    def _copy(self, event: str) -> None:
        if event == self.event and not Path("copy").exists():
            shutil.copytree(RUN, "copy", ignore=shutil.ignore_patterns("*.sock", "*.lock", ".*"))

    def on_sanity_check_end(self) -> None:
        self._copy("sanity check")

    def on_train_batch_start(self) -> None:
        self._copy("first batch")

    def on_step_end(self) -> None:
        self._copy("first update")


def contents(run: Path) -> list[tuple[int, dict[str, float]]]:
    return [(row["step"], row["metrics"]) for row in read_log(run) if row["type"] == "metrics"]


@pytest.mark.parametrize("where", ["set-up", "sanity check", "first batch"])
def test_a_run_that_fails_before_its_first_update_leaves_the_directory_to_the_earlier_run(where: str) -> None:
    torch.manual_seed(1)
    first = trainer()
    first.fit(Net(), batches(2), batches(1))
    record, rows = (RUN / "run.json").read_text(), contents(RUN)
    best = str(first.load_best(Net()))
    with pytest.raises((NameError, OptionError)) as failure:
        first.fit(Typo(where), batches(2), batches(1))
    assert (RUN / "run.json").read_text() == record and contents(RUN) == rows
    if where != "set-up":
        assert f"{RUN} still belongs to the earlier run (completed at step 4)" in "".join(
            failure.value.__notes__
        )
    assert str(first.load_best(Net())) == best
    (listed,) = list_runs(Path("runs")).runs
    assert (listed.status, listed.step) == ("completed", 4)
    again = trainer()
    again.fit(Net(), batches(2), batches(1), resume="auto")
    assert again.global_step == 4 and read_record(RUN)["status"] == "completed"


@pytest.mark.parametrize("where", ["sanity check", "first batch"])
def test_so_does_one_that_is_killed_before_its_first_update(where: str) -> None:
    trainer().fit(Net(), batches(2), batches(1))
    record, rows = (RUN / "run.json").read_text(), contents(RUN)
    trainer(Copies(where)).fit(Net(), batches(2), batches(1))
    assert Path("copy/run.json").read_text() == record and contents(Path("copy")) == rows
    (listed,) = list_runs(Path("copy")).runs
    assert (listed.status, listed.step) == ("completed", 4)


def test_a_run_takes_the_directory_at_its_first_update() -> None:
    trainer().fit(Net(), batches(2), batches(1))
    record = read_record(RUN)
    trainer(Copies("first update")).fit(Net(), batches(2), batches(1))
    killed = read_record(Path("copy"))
    assert killed["status"] == "training" and killed["id"] != record["id"]
    assert [step for step, _ in contents(Path("copy"))] == [1]
    assert {step for step, _ in contents(RUN)} == {1, 2, 3, 4}
    kinds = [row["type"] for row in read_log(RUN)]
    assert kinds.count("hyperparams") == kinds.count("end") == 1
    assert read_record(RUN)["id"] == killed["id"] and "data" in killed


def test_an_update_at_the_end_of_an_epoch_counts_and_so_does_a_checkpoint_before_the_first_one() -> None:
    trainer().fit(Net(), batches(2), batches(1))
    first = read_record(RUN)["id"]
    trainer(accumulate_grad_batches=5, max_epochs=1, checkpoint=False).fit(Net(), batches(2), batches(1))
    second = read_record(RUN)
    assert second["id"] != first and (second["status"], second["step"]) == ("completed", 1)
    saving = trainer()
    saving.on("train_start")(lambda trainer: trainer.save_checkpoint())
    with pytest.raises(NameError):
        saving.fit(Typo("first batch"), batches(2), batches(1))
    third = read_record(RUN)
    assert third["id"] != second["id"] and (third["status"], third["step"]) == ("error", 0)


def test_load_best_names_the_checkpoints_of_an_earlier_run() -> None:
    trainer().fit(Net(), batches(2), batches(1))
    later = quiet(run_dir=RUN, checkpoint=True, max_epochs=1)
    later.fit(Net(), batches(2))
    with pytest.raises(CheckpointError, match="no monitor has kept a checkpoint") as refused:
        later.load_best(Net())
    (kept,) = (each for each in (RUN / "checkpoints").iterdir() if each.name != "last")
    assert f"An earlier run in it has kept {kept}" in str(refused.value)
    assert f"load_best(path={str(kept)!r})" in str(refused.value)
    assert str(later.load_best(Net(), path=kept)).startswith(str(kept))


class Leaves(Hook):
    """Ends the run at step 2."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def on_step_end(self, step: int) -> None:
        if step == 2:
            raise self.error


REPLACES = "which this new run replaces; resume='auto' continues it."


def test_a_new_run_warns_of_the_interrupted_run_that_it_replaces(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(Leaves(KeyboardInterrupt)).fit(Net(), batches(4), batches(1))
    trainer(fast_dev_run=True).fit(Net(), batches(4), batches(1))
    assert REPLACES not in caplog.text
    seen: list[bool] = []
    again = trainer()
    again.on("train_batch_start", once=True)(lambda: seen.append(REPLACES in caplog.text))
    again.fit(Net(), batches(4), batches(1))
    assert seen == [True]
    assert f"{RUN} has an interrupted run at step 2, {REPLACES}" in caplog.text
    caplog.clear()
    trainer().fit(Net(), batches(4), batches(1))
    assert f"{RUN} has a completed run at step 8, which this new run replaces; another run_dir keeps it." in (
        caplog.text
    )


def test_it_warns_of_a_killed_run_and_not_if_there_is_nothing_to_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer(Copies("first update"), checkpoint=False).fit(Net(), batches(2), batches(1))
    shutil.copy("copy/run.json", RUN / "run.json")  # as a kill after the first update leaves it
    trainer().fit(Net(), batches(2), batches(1))
    assert f"{RUN} has a killed run at step 4, {REPLACES}" in caplog.text
    caplog.clear()
    shutil.copy("copy/run.json", RUN / "run.json")
    shutil.rmtree(RUN / "checkpoints")
    trainer().fit(Net(), batches(2), batches(1))
    assert REPLACES not in caplog.text


@pytest.mark.parametrize("where", ["sanity check", "first batch"])
def test_load_best_without_a_run_dir_finds_the_run_before_a_failed_one(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"checkpoint": True, "max_epochs": 2, "num_sanity_val_steps": 1}
    tuner = quiet(hooks=[ModelCheckpoint(monitor="val/loss")], **options)
    tuner.fit(good := Typo("nowhere"), batches(2), batches(1))
    best = str(tuner.load_best())
    first = tuner.run_dir
    good.where = where
    with pytest.raises(NameError):
        tuner.fit(good, batches(2), batches(1), resume=None)
    failed = tuner.run_dir
    assert failed != first
    assert str(tuner.load_best()) == best
    assert f"load_best(): the newest run, {failed} (error), has kept no such checkpoint" in caplog.text
    assert f"an earlier run of this trainer, {first}" in caplog.text
    good.where = "nowhere"
    for which in ("best", "auto"):
        caplog.clear()
        tuner.validate(good, batches(1), checkpoint=which)
        assert f"checkpoint={which!r}: the newest run, {failed} (error)" in caplog.text
    with pytest.raises(CheckpointError, match="no monitor has kept"):
        tuner.load_best(Net())  # of another class, which this trainer has not trained
