"""The log of a loop written by hand: each step once after a resume, and the metrics that its hooks monitor."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects.looped import net_and_sgd, train
from tiny import batches
from torch.nn import functional as F

from hookline import CheckpointError, Hook, Line
from hookline.checkpoint import files
from hookline.cli import main
from hookline.hooks import EarlyStopping, ModelCheckpoint
from hookline.loggers import CSV, JSONLines, Logger, TensorBoard, read_log
from hookline.report import runs
from hookline.report.reader import read_run
from hookline.report.runs import list_runs
from hookline.report.summary import summarize


class Killed(Hook):
    """Copies the run's directory in the middle of a step: that is what a kill leaves."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__()
        self.step, self.folder = step, folder

    def on_after_optimizer_step(self, step: int, trainer: Any) -> None:
        if step == self.step:
            shutil.copytree(trainer.run_dir, self.folder)


def loop(folder: Path, *hooks: Any, load: Any = "auto", logger: Any = True, epochs: int = 2) -> Line:
    """Train epochs of 4 steps, with a row of each step and a checkpoint every 3 steps."""
    net, sgd = net_and_sgd()
    keep = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, filename="{step}")
    line = Line(net, sgd, hooks=[keep, *hooks], run_dir=folder, logger=logger, log_every_n_steps=1)
    with line:
        if load is not None:
            line.load_checkpoint(load)
        for epoch in line.epochs(epochs):
            for x, y in line.epoch(batches(4)):
                sgd.zero_grad()
                line.backward(F.mse_loss(net(x), y))
                sgd.step()
            for x, y in line.validation(batches(1)):
                line.log_dict({"val/loss": F.mse_loss(net(x), y), "val/accuracy": 0.5 + 0.1 * epoch})
    return line


def steps_in(log: Path) -> list[tuple[str, int]]:
    """The rows of a log, as its readers show them."""
    return [(each["over"], each["step"]) for each in read_log(log) if each["type"] == "metrics"]


WHOLE = [
    *[("step", step) for step in (1, 2, 3, 4)],
    ("evaluation", 4),
    ("epoch", 4),
    *[("step", step) for step in (5, 6, 7, 8)],
    ("evaluation", 8),
    ("epoch", 8),
]


@pytest.mark.parametrize("killed_at", [2, 5, 8])  # 2: before the first checkpoint
def test_a_killed_loop_logs_every_step_once(killed_at: int, tmp_path: Path) -> None:
    loop(tmp_path / "whole", Killed(killed_at, tmp_path / "run"))
    loop(tmp_path / "run")
    assert steps_in(tmp_path / "whole") == steps_in(tmp_path / "run") == WHOLE
    run = read_run(tmp_path / "run")
    steps, _ = run.series["train/loss"].arrays()
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [each.kind for each in run.events] == ["resume"]
    (summary,) = summarize([tmp_path / "run"])["runs"]
    counts = {(each["name"], each["over"]): each["count"] for each in summary["metrics"]}
    assert counts["train/loss", "step"] == 8 and counts["val/loss", "epoch"] == 2
    (listed,) = list_runs(tmp_path / "run").runs
    assert (listed.status, listed.step, listed.epochs) == ("completed", 8, 2)


def test_a_loop_that_starts_over_supersedes_the_earlier_log(tmp_path: Path) -> None:
    for _ in range(2):
        loop(tmp_path, load=None)
    assert steps_in(tmp_path) == WHOLE
    assert len([each for each in read_log(tmp_path, superseded=True) if each["type"] == "metrics"]) == 24


def test_a_line_that_trains_again_continues_its_log(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, run_dir=tmp_path, logger=True, log_every_n_steps=1)
    for epochs in (1, 2):
        train(line, net, sgd, batches(2), epochs=epochs)
    assert [step for over, step in steps_in(tmp_path) if over == "step"] == [1, 2, 3, 4]


def test_a_line_that_only_evaluates_a_checkpoint_supersedes_nothing(tmp_path: Path) -> None:
    loop(tmp_path)
    for load in (tmp_path / "checkpoints/step=3", None):
        net, sgd = net_and_sgd()
        with Line(net, sgd, run_dir=tmp_path, logger=True) as line:
            if load is not None:
                line.load_checkpoint(load)
            for x, y in line.validation(batches(1)):
                line.log("val/loss", F.mse_loss(net(x), y))
        assert steps_in(tmp_path)[: len(WHOLE)] == WHOLE


def test_a_checkpoint_that_is_saved_before_the_first_update_has_the_position_of_the_loaded_one(
    tmp_path: Path,
) -> None:
    loop(tmp_path / "whole", Killed(5, tmp_path / "run"))
    with Line(*net_and_sgd(), run_dir=tmp_path / "run", logger=True) as line:
        line.load_checkpoint("auto")
        line.save_checkpoint(tmp_path / "run/checkpoints/again")
    assert files.read_manifest(tmp_path / "run/checkpoints/again")["step"] == 3
    loop(tmp_path / "run")
    assert steps_in(tmp_path / "run") == WHOLE


def test_every_logger_continues_from_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    class Draws(Hook):
        def on_step_end(self, logger: Any, step: int, module: Any) -> None:
            logger.add_histogram("weights", module.weight, step)

    def loggers() -> list[Logger]:
        return [CSV(), TensorBoard(queued=False)]

    loop(tmp_path / "whole", Draws(), Killed(5, tmp_path / "run"), logger=loggers())
    loop(tmp_path / "run", Draws(), logger=loggers())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"histograms": 0}).Reload()
    assert [each.step for each in reader.Scalars("lr")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [each.step for each in reader.Histograms("weights")] == [1, 2, 3, 4, 5, 6, 7, 8]
    with (tmp_path / "run/metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["lr"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (tmp_path / "run/metrics.superseded-1.csv").exists()


def test_a_loop_s_own_checkpoint_has_the_position_of_the_log(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    kept: dict[int, Any] = {}

    class Keeps(Hook):
        def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
            kept[epoch] = trainer.state_dict()

    for _ in range(2):
        line = Line(net, sgd, hooks=[Keeps()], run_dir=tmp_path, logger=[JSONLines()], log_every_n_steps=1)
        if kept:
            torch.save(kept[0], tmp_path / "kept.pt")
            line.load_state_dict(torch.load(tmp_path / "kept.pt"))
        train(line, net, sgd, batches(2), epochs=2)
    assert [step for over, step in steps_in(tmp_path) if over == "step"] == [1, 2, 3, 4]
    (resumed,) = [each for each in read_log(tmp_path) if each["type"] == "resume"]
    assert resumed["checkpoint"] == "a checkpoint of a loop with hookline.Line" and resumed["step"] == 2


def test_a_checkpoint_without_positions_of_loggers_still_loads_and_damaged_ones_are_refused(
    tmp_path: Path,
) -> None:
    loop(tmp_path / "old", epochs=1)
    contents = files.read(tmp_path / "old/checkpoints/step=3")
    positions = contents.pop("loggers")
    assert positions["JSONLines"]["bytes"] > 0
    files.write(contents, tmp_path / "older")
    assert loop(tmp_path / "new", load=tmp_path / "older").global_step == 8
    files.write({**contents, "loggers": 3}, tmp_path / "damaged")
    with pytest.raises(Exception, match="loggers in its state.json is not a table of loggers"):
        loop(tmp_path / "new", load=tmp_path / "damaged")


# ---- what hooks monitor ------------------------------------------------------------------------------------


def bests_of(folder: Path) -> set[tuple[str, float]]:
    """The best value of a run, by every reader."""
    (listed,), (summary,) = list_runs(folder).runs, summarize([folder])["runs"]
    assert listed.best is not None
    (progress,) = [each for each in summary["metrics"] if each["direction_from"] == "monitor"]
    return {
        (listed.best.metric, listed.best.value),
        (summary["best"]["metric"], summary["best"]["value"]),
        (progress["name"], progress["best"]["value"]),
    }


@pytest.mark.parametrize(
    "hook", [EarlyStopping("val/accuracy"), ModelCheckpoint(monitor="val/accuracy")], ids=["stops", "keeps"]
)
def test_the_best_value_of_a_loop_is_that_of_the_metric_that_its_hooks_monitor(
    hook: Hook, tmp_path: Path
) -> None:
    loop(tmp_path / "whole", hook, Killed(7, tmp_path / "killed"), load=None)
    assert bests_of(tmp_path / "whole") == {("val/accuracy", 0.6)}
    assert bests_of(tmp_path / "killed") == {("val/accuracy", 0.5)}


def test_a_long_log_has_the_metric_that_hooks_monitor_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop(tmp_path, EarlyStopping("val/accuracy"))
    began = next(iter(read_log(tmp_path)))["time"]
    monkeypatch.setattr(runs, "LOG_BYTES", 1000)
    monkeypatch.setattr(runs, "TAIL_BYTES", 1000)
    (found,) = list_runs(tmp_path).runs
    assert found.is_partial and found.started == began
    assert found.best is not None and found.best.metric == "val/accuracy"


# ---- which samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("logger", [True, False], ids=["with a log", "with checkpoints only"])
def test_samples_of_a_loop_are_not_recorded(
    logger: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(tmp_path, logger=logger)
    assert main(["samples", str(tmp_path), "--step", "1"]) == 1
    said = capsys.readouterr().err
    assert "A loop with hookline.Line reads its data itself, so the order of its samples is not" in said
    assert "Only hookline.Trainer records it" in said and "readable" not in said


def test_a_checkpoint_that_does_not_fit_leaves_the_log_of_the_loop_as_it_was(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    train(Line(net, sgd, hooks=[ModelCheckpoint()], logger=True, run_dir=tmp_path), net, sgd, batches(2))
    before = (tmp_path / "log.jsonl").read_bytes()
    wider = torch.nn.Linear(4, 3)
    line = Line(wider, torch.optim.SGD(wider.parameters(), lr=0.1), logger=True, run_dir=tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this run"), line:
        line.load_checkpoint("auto")
    assert (tmp_path / "log.jsonl").read_bytes() == before
    with pytest.raises(RuntimeError, match="mine"), line:
        raise RuntimeError("mine")
    assert '"message": "mine"' in (tmp_path / "log.jsonl").read_text()
