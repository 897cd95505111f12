"""Lightning's loggers with their real clients: Lightning's trainer and Hookline's two write the same into them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline.interop.lightning import Trainer as HooklinesTrainer

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OPTIONS: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 2, "enable_progress_bar": False}
TRAINERS = (pl.Trainer, HooklinesTrainer)


class Model(pl.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 2)
        self.example_input_array = torch.ones(1, 4)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(9)
        return DataLoader(TensorDataset(torch.randn(16, 4, generator=draw)), batch_size=4)

    val_dataloader = train_dataloader


def scalars(directory: str | Path) -> dict[str, Any]:
    """Return all that is in TensorBoard's files."""
    found: dict[str, Any] = {"graph": False}
    for file in sorted(Path(directory).glob("events*")):
        events = EventAccumulator(str(file))
        events.Reload()
        tags: Any = events.Tags()
        found["graph"] |= tags["graph"]
        for tag in tags["scalars"]:
            found.setdefault(tag, []).extend((each.step, each.value) for each in events.Scalars(tag))
    return found


def trained(kind: Any, logger: Any, directory: Path) -> Any:
    trainer = kind(logger=logger, default_root_dir=directory, enable_model_summary=False, **OPTIONS)
    trainer.fit(Model())
    assert trainer.logger is logger and len(trainer.loggers) == 1
    return trainer


def test_tensorboard_gets_metrics_hyperparameters_and_the_graph(tmp_path: Path) -> None:
    written = []
    for kind in TRAINERS:
        logger = TensorBoardLogger(tmp_path / kind.__module__, name="tb", log_graph=True)
        trainer = trained(kind, logger, tmp_path)
        assert trainer.log_dir == logger.log_dir and (logger.name, logger.version) == ("tb", 0)
        written.append((scalars(logger.log_dir), Path(logger.log_dir, "hparams.yaml").read_text()))
    assert written[0] == written[1]
    assert written[1][0]["graph"] and "hp_metric" in written[1][0] and "lr: 0.1" in written[1][1]


def test_the_default_logger_is_lightnings_default(tmp_path: Path) -> None:
    trainer = HooklinesTrainer(default_root_dir=tmp_path, enable_model_summary=False, **OPTIONS)
    trainer.fit(Model())
    assert isinstance(trainer.logger, TensorBoardLogger)
    assert trainer.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert [step for step, _ in scalars(str(trainer.log_dir))["loss_step"]] == [1, 3, 5, 7]


def test_mlflow_gets_metrics_parameters_and_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    written = []
    for kind in TRAINERS:
        logger = MLFlowLogger("experiment", tracking_uri=f"file:{tmp_path / kind.__module__}")
        trained(kind, logger, tmp_path)
        run, client = logger.experiment.get_run(logger.run_id), logger.experiment
        history = {
            name: [(each.step, each.value) for each in client.get_metric_history(logger.run_id, name)]
            for name in run.data.metrics
        }
        written.append((history, run.data.params, run.info.status))
    assert written[0] == written[1]
    assert written[1][1:] == ({"lr": "0.1"}, "FINISHED") and "val_loss" in written[1][0]


def test_wandb_gets_the_rows_and_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    written = []
    for kind in TRAINERS:
        logger = WandbLogger(project="p", save_dir=tmp_path, offline=True)
        trained(kind, logger, tmp_path)
        summary = {name: value for name, value in dict(logger.experiment.summary).items() if name[0] != "_"}
        written.append((summary, dict(logger.experiment.config)))
        logger.experiment.finish()
    assert written[0] == written[1]
    assert written[1][0]["trainer/global_step"] == 7 and written[1][1] == {"lr": 0.1}


def test_hooklines_trainer_writes_its_rows_into_tensorboard(tmp_path: Path) -> None:
    class Draws(hookline.Hook):
        def on_train_end(self, logger: Any) -> None:
            logger.add_histogram("weights", torch.arange(5.0), 8)

    logger = TensorBoardLogger(tmp_path, name="tb")
    trainer = hookline.Trainer(hooks=[Draws()], logger=logger, run_dir=tmp_path / "run", **OPTIONS)
    trainer.fit(Model())
    found = scalars(logger.log_dir)
    assert [step for step, _ in found["train/loss"]][:2] == [2, 4] and "val_loss" in found
    assert not os.path.exists(tmp_path / "run" / "log.jsonl")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert events.Tags()["histograms"] == ["weights"]  # type: ignore[index]
