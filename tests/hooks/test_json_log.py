"""JSONLog: records that a program can read, whatever was in them and however the run ended."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline.distributed.base import SingleDevice
from hookline.hooks.json_log import JSONLog
from hookline.util.errors import OptionError


def strict(text: str) -> list[dict[str, Any]]:
    """Every line by itself, as JSON that any reader takes: no NaN, no Infinity."""
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        for line in text.splitlines()
    ]


def records(run_dir: Path) -> list[dict[str, Any]]:
    (path,) = (run_dir / "logs").iterdir()
    assert path.name.startswith("training_") and path.suffix == ".jsonl"
    return strict(path.read_text())


def test_a_run_is_told_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    quiet(run_dir=tmp_path, max_epochs=2, num_sanity_val_steps=1, hooks=[JSONLog(log_every_n_batches=2)]).fit(
        Net(), batches(5), batches(1)
    )
    rows = records(tmp_path)
    epoch = ["batch", "batch", "validation_end", "epoch_end"]
    assert [row["type"] for row in rows] == ["train_begin", *epoch, *epoch, "train_end"]
    begin, end = rows[0], rows[-1]
    assert (begin["model"], begin["model_params"], begin["device"], begin["batches_per_epoch"]) == (
        "Net",
        10,
        "cpu",
        5,
    )
    assert [(row["epoch"], row["batch"], row["step"]) for row in rows if row["type"] == "batch"] == [
        (0, 1, 2),
        (0, 3, 4),
        (1, 1, 7),
        (1, 3, 9),
    ]
    assert (end["status"], end["step"], end["epochs"]) == ("completed", 10, 2)
    assert {"train/loss", "val/loss"} <= set(end["metrics"])
    assert all(isinstance(row["time"], float) for row in rows)


def test_a_batch_has_its_loss_and_the_running_average(tmp_path: Path) -> None:
    class Fixed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": 0.0 * super().training_step(batch, batch_idx) + float(batch_idx), "accuracy": 0.5}

    quiet(run_dir=tmp_path, hooks=[JSONLog(1)]).fit(Fixed(), batches(3))
    rows = [row for row in records(tmp_path) if row["type"] == "batch"]
    assert [row["loss"] for row in rows] == [0, 1, 2]
    assert [row["avg_loss"] for row in rows] == [0, 0.5, 1]
    assert rows[1]["perplexity"] == pytest.approx(math.e)
    assert [row["lr"] for row in rows] == [0.1] * 3
    assert rows[2]["metrics"] == {"loss": 2, "accuracy": 0.5}


def test_values_that_json_cannot_hold_are_written_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("odd/nan", math.nan, on_epoch=True)
            self.log('odd/\n\u2028\ud800 "quoted"', math.inf, on_epoch=True)
            return loss * 0.0 + 1e30

    quiet(run_dir=tmp_path, hooks=[JSONLog(1)]).fit(Odd(), batches(2))
    assert [row["type"] for row in records(tmp_path)] == [
        "train_begin",
        "batch",
        "batch",
        "epoch_end",
        "train_end",
    ]
    assert records(tmp_path)[1]["metrics"]["odd/nan"] == "nan"
    assert records(tmp_path)[1]["perplexity"] == "inf"
    assert not caplog.records


def test_an_epoch_has_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def passes(epoch: int) -> None:
        nonlocal now
        now += 3 - epoch

    monkeypatch.setattr(
        "hookline.hooks.json_log.time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now})
    )
    trainer = quiet(run_dir=tmp_path, max_epochs=2, hooks=[JSONLog()])
    trainer.on("train_batch_end")(passes)
    trainer.fit(Net(), batches(1))
    assert [row["seconds"] for row in records(tmp_path) if row["type"] == "epoch_end"] == [3, 2]
    assert records(tmp_path)[-1]["seconds"] == 5


def test_a_failed_run_ends_with_what_failed(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError('broken "here"\nand there')

    with pytest.raises(RuntimeError):
        quiet(run_dir=tmp_path, hooks=[JSONLog(1)]).fit(Fails(), batches(2))
    last = records(tmp_path)[-1]
    assert (last["type"], last["status"], last["exception"]) == ("exception", "error", "RuntimeError")
    assert last["message"] == 'broken "here"\nand there'


def test_a_run_that_fails_before_training_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoOptimizer(Net):
        def configure_optimizers(self) -> Any:
            raise RuntimeError("none")

    with pytest.raises(RuntimeError):
        quiet(run_dir=tmp_path / "run", hooks=[JSONLog()]).fit(NoOptimizer(), batches(1))
    assert not (tmp_path / "run" / "logs").exists()
    assert not caplog.records


def test_a_line_that_a_killed_run_left_half_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"type": "train_begin", "cut')
    quiet(run_dir=tmp_path, hooks=[JSONLog(1, path="mine.jsonl")]).fit(Net(), batches(1))
    half, *whole = (tmp_path / "mine.jsonl").read_text().splitlines()
    assert half.endswith("cut")
    assert [row["type"] for row in strict("\n".join(whole))] == [
        "train_begin",
        "batch",
        "epoch_end",
        "train_end",
    ]


def test_a_given_path_is_below_the_run_directory_unless_it_is_absolute(tmp_path: Path) -> None:
    quiet(run_dir=tmp_path / "run", hooks=[JSONLog(path="deep/er/log.jsonl")]).fit(Net(), batches(1))
    assert (tmp_path / "run/deep/er/log.jsonl").exists()
    quiet(run_dir=tmp_path / "run", hooks=[JSONLog(path=tmp_path / "there.jsonl")]).fit(Net(), batches(1))
    assert (tmp_path / "there.jsonl").exists()


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    class Second(SingleDevice):
        rank = 1

    quiet(run_dir=tmp_path, strategy=Second(torch.device("cpu")), hooks=[JSONLog(1)]).fit(Net(), batches(1))
    assert not (tmp_path / "logs").exists()


def test_the_trainer_adds_it_by_name(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path)
    trainer.add_json_logging(log_every_n_batches=1)
    trainer.disable_hook("json_log")
    trainer.fit(Net(), batches(1))
    assert not (tmp_path / "logs").exists()
    trainer.enable_hook("json_log")
    trainer.fit(Net(), batches(1))
    assert records(tmp_path)[-1]["type"] == "train_end"


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_every_n_batches": 0},
        {"log_every_n_batches": "5"},
        {"path": "../up.jsonl"},
        {"path": 3},
        {"path": ""},
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"JSONLog: {next(iter(wrong))}="):
        JSONLog(**wrong)
