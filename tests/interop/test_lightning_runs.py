"""Hookline's commands show the runs of Lightning's trainer: the list, the summary, the report and the best."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import nn

import hookline
from hookline import export_checkpoint, load_weights
from hookline.cli import main
from hookline.interop.lightning import Trainer
from hookline.report.page import write_report
from hookline.report.runs import list_runs
from hookline.report.summary import summarize

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LOSSES = (0.5, 0.1, 0.7)
BARE: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", LOSSES[self.current_epoch])
        self.log("val_accuracy", 1 - LOSSES[self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return [torch.ones(2, 4)] * 2

    val_dataloader = train_dataloader


class Tracker(Logger):
    """A logger without a directory of its own, such as that of W&B."""

    name = "project"
    version = "k7"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def fit(**options: Any) -> Trainer:
    trainer = Trainer(
        max_epochs=3, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, **options
    )
    trainer.fit(Model())
    return trainer


no_socket = shutil.ignore_patterns("*.sock")


def best_by_accuracy(**options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(monitor="val_accuracy", mode="max", save_top_k=3, **options)


def test_the_list_the_summary_and_the_report_show_a_run_with_a_logger_of_lightning(tmp_path: Path) -> None:
    logger, keep = CSVLogger(tmp_path, name="spirals"), best_by_accuracy()
    trainer = fit(logger=logger, callbacks=[EarlyStopping("val_loss", patience=5), keep])
    assert trainer.loggers == [logger] and len(trainer.callbacks) == 2
    folder = tmp_path / "spirals" / "version_0"
    [listed] = list_runs(tmp_path).runs
    assert (listed.path, listed.status, listed.step, listed.epochs) == (folder, "completed", 6, 3)
    assert listed.best is not None and listed.best.metric == "val_accuracy"  # what checkpoints are kept for
    assert listed.best.value == pytest.approx(0.9)
    [about] = summarize([folder])["runs"]
    assert about["best"]["step"] == 4 and about["missing_log"] == ""
    assert {each["name"] for each in about["metrics"]} >= {"train_loss", "val_loss", "val_accuracy"}
    kept = {Path(each["path"]).name: (each["step"], each["score"]) for each in about["checkpoints"]}
    assert kept == {
        "epoch=0-step=2.ckpt": (2, "val_accuracy 0.5"),
        "epoch=1-step=4.ckpt": (4, "val_accuracy 0.9"),
        "epoch=2-step=6.ckpt": (6, "val_accuracy 0.3"),
    }
    monitors = json.loads((folder / "run.json").read_text())["monitors"]
    assert monitors["early_stopping"]["best"] == pytest.approx(0.1)  # a tensor in Lightning
    page = write_report([folder])[0].read_text()
    assert "val_accuracy" in page and "epoch=1-step=4.ckpt" in page


def test_a_killed_run_shows_its_checkpoints_and_what_it_monitors(tmp_path: Path) -> None:
    class Copies(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *given: Any) -> None:
            if trainer.current_epoch == 2:  # what a kill here leaves
                shutil.copytree(
                    tmp_path / "a" / "version_0", tmp_path / "killed", ignore=no_socket, dirs_exist_ok=True
                )

    logger = CSVLogger(tmp_path, name="a")
    trainer = fit(logger=logger, callbacks=[Copies(), EarlyStopping("val_loss"), best_by_accuracy()])
    [about] = summarize([tmp_path / "killed"])["runs"]
    assert [Path(each["path"]).name for each in about["checkpoints"]] == [
        "epoch=1-step=4.ckpt",
        "epoch=0-step=2.ckpt",
    ]
    assert about["best"]["metric"] == "val_accuracy"
    run, out = tmp_path / "a" / "version_0", tmp_path / "net.safetensors"
    best = export_checkpoint(run, out, checkpoint="best")
    assert best.source.endswith("epoch=1-step=4.ckpt")
    assert export_checkpoint(run, out, force=True).source.endswith("epoch=2-step=6.ckpt")
    found = load_weights(Model(), trainer.checkpoint_callback.best_model_path)
    assert found.complete and found.step == 4


def test_a_removed_checkpoint_is_not_listed_and_a_run_can_be_moved(tmp_path: Path) -> None:
    outside = ModelCheckpoint(dirpath=tmp_path / "kept", save_weights_only=True)
    fit(logger=CSVLogger(tmp_path, name="a"), callbacks=[ModelCheckpoint(monitor="val_loss"), outside])
    moved = (tmp_path / "a" / "version_0").rename(tmp_path / "moved")
    found = [each["path"] for each in summarize([moved])["runs"][0]["checkpoints"]]
    assert found == [
        str(tmp_path / "kept" / "epoch=2-step=6.ckpt"),
        str(moved / "checkpoints" / "epoch=1-step=4.ckpt"),
    ]


def test_a_logger_without_a_directory_has_the_run_beside_its_checkpoints(tmp_path: Path) -> None:
    trainer = fit(
        logger=Tracker(), default_root_dir=tmp_path, callbacks=[ModelCheckpoint(monitor="val_loss")]
    )
    [listed] = list_runs(tmp_path).runs
    assert listed.path == tmp_path / "project" / "k7" and listed.best is not None
    assert Path(trainer.checkpoint_callback.best_model_path).parent == listed.path / "checkpoints"
    assert [each.name for each in tmp_path.iterdir()] == ["project"]


def test_without_a_logger_only_checkpoints_are_written(tmp_path: Path) -> None:
    fit(logger=False, default_root_dir=tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["epoch=2-step=6.ckpt"]


def test_the_last_line_names_the_best_checkpoint_and_load_best_loads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hookline")
    trainer = fit(
        logger=CSVLogger(tmp_path, name="a"), callbacks=[best_by_accuracy(dirpath=tmp_path / "kept")]
    )
    best = tmp_path / "kept" / "epoch=1-step=4.ckpt"
    line = next(each for each in caplog.messages if each.startswith("Model:"))
    assert f"Best: {best} (val_accuracy 0.9, step 4). Load the best:" in line
    assert f'load_weights(model, "{best}")' in line
    weights = torch.load(best, weights_only=True)["state_dict"]
    assert not torch.equal(trainer.lightning_module.layer.weight, weights["layer.weight"])
    assert trainer.load_best().step == 4
    assert torch.equal(trainer.lightning_module.layer.weight, weights["layer.weight"])


class Described(Model):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_settings_are_those_that_the_user_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(
        max_epochs=2,
        logger=CSVLogger(tmp_path, name="a"),
        callbacks=[EarlyStopping("val_loss", patience=5)],
        gradient_clip_val=0.5,
    )
    trainer.fit(Described(width=8))
    folder = tmp_path / "a" / "version_0"
    [about] = summarize([folder])["runs"]
    chosen = about["settings"]
    assert chosen["module.width"] == 8 and chosen["hooks.early_stopping.patience"] == 5
    hooks = {name.split(".")[1] for name in chosen if name.startswith("hooks.")}
    assert hooks == {"early_stopping", "model_checkpoint"}  # not the bar, the summary and the saved arguments
    assert "trainer.checkpoint" not in chosen  # Lightning's callback saves
    assert "checkpoint" not in json.loads((folder / "run.json").read_text())["options"]
    assert main(["summary", str(folder)]) == 0
    text = capsys.readouterr().out
    rows = {
        line.split()[0]: line.split()[1:]
        for line in text.partition("setting ")[2].splitlines()
        if line.split()
    }
    assert rows["hooks.early_stopping.min_delta"] == ["0"]  # Lightning keeps -0.0
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert f"The checkpoints of {folder} are files of Lightning: {folder}" in capsys.readouterr().out
    assert rows["trainer.gradient_clip_val"] == ["0.5"] and rows["optimizers.0.groups.0.lr"] == ["0.01"]
    assert not any(
        name.startswith("optimizers.") and value[0] in ("true", "false") for name, value in rows.items()
    )
    own = Trainer(max_epochs=1, logger=CSVLogger(tmp_path, name="b"), checkpoint=True, **BARE)
    own.fit(Model())
    assert (
        json.loads((tmp_path / "b" / "version_0" / "run.json").read_text())["options"]["checkpoint"] is True
    )


@pytest.mark.parametrize("monitor", ["val_loss", None])
def test_the_last_line_names_a_file_that_has_only_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monitor: str | None
) -> None:
    caplog.set_level("INFO", "hookline")
    keep = ModelCheckpoint(dirpath=tmp_path / "kept", monitor=monitor, save_weights_only=True)
    trainer = Trainer(max_epochs=3, logger=CSVLogger(tmp_path, name="a"), callbacks=[keep], **BARE)
    trainer.fit(Described())
    file = tmp_path / "kept" / f"epoch={1 if monitor else 2}-step={4 if monitor else 6}.ckpt"
    score = "val_loss 0.1, step 4" if monitor else "step 6"
    line = next(each for each in caplog.messages if each.startswith("Model:"))
    assert line == f'Model: {file} ({score}). Load it: model = Described.load_from_checkpoint("{file}")'
    assert Described.load_from_checkpoint(str(file)).hparams.width == 4


def test_load_best_of_hooklines_trainer_takes_a_file_of_lightning(tmp_path: Path) -> None:
    trainer, model = fit(logger=False, default_root_dir=tmp_path), Model()
    hookline.Trainer(logger=False).load_best(model, path=trainer.checkpoint_callback.best_model_path)
    assert torch.equal(model.layer.weight, trainer.lightning_module.layer.weight)


def test_entries_of_a_forged_record_are_left_out(tmp_path: Path) -> None:
    fit(logger=CSVLogger(tmp_path, name="a"), callbacks=[ModelCheckpoint(monitor="val_loss")])
    path = tmp_path / "a" / "version_0" / "run.json"
    record = json.loads(path.read_text())
    good = record["files"][-1]
    wrong = {"path": "a\0b", "step": "4", "monitor": {"name": 1}, "saved_at": None, "reason": 2, "epoch": -1}
    record["files"] = [good, 7, {}, *({**good, key: value} for key, value in wrong.items())]
    path.write_text(json.dumps(record))
    assert summarize([path.parent])["runs"][0]["checkpoint_count"] == 1
