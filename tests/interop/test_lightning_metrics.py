"""Metrics of Lightning's trainer: one program is run by Lightning and by Hookline, and everything that it logs, shows and writes is equal."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric

import hookline
from hookline.config import load_config
from hookline.interop.lightning import Trainer as HooklinesTrainer

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
TRAINERS = (pl.Trainer, HooklinesTrainer)


def loader(samples: int, size: int, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.randn(samples, 4, generator=draw)), batch_size=size)


class Model(pl.LightningModule):
    """Logs in every hook where that is possible, with every combination of arguments."""

    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaders = loaders
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 2)
        self.mean = MeanMetric()
        self.several = MetricCollection({"all": MeanMetric(), "sum": SumMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss * 2, on_step=False, on_epoch=True, reduce_fx="MAX")
        self.log("count", batch_idx, on_step=True, on_epoch=True, reduce_fx=sum, logger=False)
        self.log("weighted", float(batch_idx), on_epoch=True, batch_size=batch_idx + 1)
        self.log("graph", loss, enable_graph=True)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.several(loss.detach())
        self.log_dict(self.several, on_epoch=True, on_step=False)
        return {"loss": loss, "returned": torch.tensor(3.0)}

    def on_train_start(self) -> None:
        self.log("at_start", 2.5, prog_bar=True)

    def on_train_epoch_start(self) -> None:
        self.log("at_epoch_start", 1.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("at_batch_start", float(batch_idx), on_epoch=True)

    def on_after_backward(self) -> None:
        self.log("after_backward", 1.0)

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", 7.0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        value = self.layer(batch[0]).mean()
        self.log("v", value, prog_bar=True)
        self.log("v_both", value * 3, on_step=True, on_epoch=True)
        self.log(f"own_{dataloader_idx}", value, add_dataloader_idx=False)
        return {"returned": value}

    def on_validation_start(self) -> None:
        self.log("at_validation_start", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("at_validation_end", torch.tensor(4.0))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        value = self.layer(batch[0]).mean()
        self.log_dict({"t": value, "t_twice": value * 2}, on_step=True)
        return value

    def on_test_epoch_end(self) -> None:
        self.log("at_test_end", torch.tensor(4.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return loader(16, 3, 9)

    def val_dataloader(self) -> Any:
        loaders = [loader(10, 3, number) for number in range(self.loaders)]
        return loaders if self.loaders > 1 else loaders[0]

    test_dataloader = val_dataloader


class Recorder(Logger):
    """Keeps every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.calls.append(("metrics", dict(metrics), step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("hyperparams", dict(params)))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.calls.append("graph")

    def save(self) -> None:
        self.calls.append("save")

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))


MOMENTS = [name for name in vars(pl.Callback) if name.startswith("on_") and "checkpoint" not in name]


def shown(trainer: Any) -> Any:
    """Return the three dictionaries as numbers; the values of the first two are tensors."""
    tensors = [trainer.callback_metrics, trainer.logged_metrics]
    assert all(isinstance(each, Tensor) for kept in tensors for each in kept.values())
    return [
        *({name: value.item() for name, value in kept.items()} for kept in tensors),
        dict(trainer.progress_bar_metrics),
    ]


def looks(seen: list[Any]) -> pl.Callback:
    """Return a callback that records the metrics at every moment."""

    def moment(name: str) -> Callable[..., None]:
        def look(self: Any, trainer: Any, pl_module: Any, *rest: Any) -> None:
            seen.append((name, trainer.fit_loop.epoch_loop._batches_that_stepped, *shown(trainer)))

        return look

    kind: Any = type("Looks", (pl.Callback,), {name: moment(name) for name in MOMENTS})
    return kind()  # type: ignore[no-any-return]


def run(kind: Any, directory: Path, loaders: int, options: dict[str, Any]) -> Any:
    """Return all that one trainer has shown, returned and written."""
    seen: list[Any] = []
    logger, table = Recorder(), CSVLogger(directory, name="table")
    trainer = kind(
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=[logger, table],
        callbacks=[looks(seen)],
        **options,
    )
    model = Model(loaders)
    trainer.fit(model)
    results = [shown(trainer), trainer.validate(model), shown(trainer), trainer.test(model), shown(trainer)]
    written = Path(table.log_dir, "metrics.csv")
    return seen, logger.calls, results, list(csv.reader(written.open())) if written.exists() else None


@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2, "log_every_n_steps": 2},
        {"max_epochs": 2, "log_every_n_steps": 1, "val_check_interval": 2},
        {
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "accumulate_grad_batches": 2,
            "reload_dataloaders_every_n_epochs": 1,
        },
        {"max_steps": 3, "log_every_n_steps": 1, "num_sanity_val_steps": 0},
        {"max_epochs": 1, "log_every_n_steps": 0},
        {"fast_dev_run": 2},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_metrics_are_lightnings_at_every_moment_and_in_every_row(
    tmp_path: Path, options: dict[str, Any], loaders: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found, printed = [], []
    for kind in TRAINERS:
        found.append(run(kind, tmp_path / kind.__module__, loaders, options))
        printed.append(capsys.readouterr().out)
    for theirs, ours in zip(*found, strict=True):
        assert ours == theirs
    assert "Validate metric" in printed[0] and printed[1].splitlines()[-30:] == printed[0].splitlines()[-30:]


def small(**options: Any) -> HooklinesTrainer:
    usual = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return HooklinesTrainer(**{**usual, "enable_model_summary": False, **options})


def test_hooklines_own_hooks_and_loggers_know_lightnings_metrics_too(tmp_path: Path) -> None:
    seen: dict[str, float] = {}

    class Native(hookline.Hook):
        def on_validation_end(self, metrics: Any) -> None:
            seen.update(metrics)

        def on_train_epoch_start(self, trainer: Any) -> None:
            trainer.lightning_module.log("of_a_hook", 5.0)

    log = hookline.JSONLines()
    trainer = small(callbacks=[Native()], logger=log, run_dir=str(tmp_path / "run"), log_every_n_steps=1)
    trainer.fit(Model())
    assert seen["v"] == pytest.approx(trainer.callback_metrics["v"].item())
    rows = (tmp_path / "run" / "log.jsonl").read_text()
    assert '"both_step"' in rows and '"v_both_epoch"' in rows and '"train/loss"' in rows
    assert "train/loss" not in trainer.callback_metrics


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([{"on_step": False, "on_epoch": False}], "not useful"),
        ([{"on_epoch": True}, {"on_epoch": False}], "twice in `training_step` with different arguments"),
        (
            [{"reduce_fx": torch.median}],
            r"reduce_fx=(\{min,max,mean,sum\}|.*allowed are min, max, mean and sum)",
        ),
    ],
)
def test_log_refuses_what_lightning_refuses(arguments: list[dict[str, Any]], error: str) -> None:
    class Logs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for each in arguments:
                self.log("x", 1.0, **each)
            return super().training_step(batch, batch_idx)

    for kind in TRAINERS:
        with pytest.raises(MisconfigurationException, match=error):
            kind(fast_dev_run=True, enable_progress_bar=False).fit(Logs())


def test_log_is_refused_where_lightning_refuses_it() -> None:
    class Logs(Model):
        def on_validation_end(self) -> None:
            self.log("x", 1.0)

    with pytest.raises(MisconfigurationException, match="on_validation_end"):
        small().fit(Logs())


def test_a_batch_without_tensors_needs_a_batch_size() -> None:
    class Logs(Model):
        def train_dataloader(self) -> Any:
            return DataLoader(["a", "b"], batch_size=1)  # type: ignore[arg-type]

    with pytest.raises(MisconfigurationException, match="batch_size"):
        small(limit_val_batches=0).fit(Logs())


def test_nothing_is_logged_with_barebones() -> None:
    trainer = HooklinesTrainer(barebones=True, max_epochs=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="barebones=True"):
        trainer.fit(Model())
    assert trainer.callback_metrics == {} and trainer.loggers == [] and trainer.logger is None


def test_an_interval_of_rows_above_the_length_of_the_epoch_is_warned_about(tmp_path: Path) -> None:
    for kind in TRAINERS:
        trainer = kind(max_epochs=1, logger=Recorder(), enable_progress_bar=False, enable_checkpointing=False)
        is_short = r"training batches \(6\) is smaller than the logging interval"
        with pytest.warns(PossibleUserWarning, match=is_short):
            trainer.fit(Model())
    assert HooklinesTrainer(log_every_n_steps=0, logger=False).log_every_n_steps == 0


# ---- loggers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, None, []])
def test_without_loggers_there_are_none(given: Any) -> None:
    trainer = small(logger=given if given is not None else False)
    assert trainer.logger is None and trainer.loggers == []


def test_loggers_are_the_objects_that_were_passed_and_can_be_replaced(tmp_path: Path) -> None:
    logger, other = CSVLogger(tmp_path, name="one", version=3), Recorder()
    trainer = small(logger=logger)
    assert trainer.logger is logger and trainer.loggers == [logger]
    assert trainer.log_dir == str(tmp_path / "one" / "version_3")
    trainer.logger = other
    assert trainer.loggers == [other]
    trainer.loggers = [logger, other]
    model = Model()
    trainer.fit(model)
    assert model.logger is logger and model.loggers == [logger, other]
    assert other.calls[0] == ("hyperparams", {"loaders": 1}) and other.calls[-1] == ("finalize", "success")
    trainer.logger = None
    assert trainer.logger is None and trainer.loggers == []


def test_a_logger_of_a_fast_dev_run_does_nothing(tmp_path: Path) -> None:
    class Uses(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.anything("at all")  # type: ignore[union-attr]
            return super().training_step(batch, batch_idx)

    trainer = HooklinesTrainer(fast_dev_run=True, logger=CSVLogger(tmp_path), enable_progress_bar=False)
    trainer.fit(Uses())
    assert [type(each) for each in trainer.loggers] == [DummyLogger] and not list(tmp_path.iterdir())


def test_a_failure_finalizes_the_loggers_as_failed() -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("of the step")

    logger = Recorder()
    with pytest.raises(ValueError, match="of the step"):
        small(logger=logger).fit(Fails())
    assert [each for each in logger.calls if each[0] == "finalize"] == [("finalize", "failed")]


def test_the_error_of_a_logger_ends_the_run_as_in_lightning() -> None:
    class Broken(Recorder):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise OSError("the server is gone")

    for kind in TRAINERS:
        with pytest.raises(OSError, match="the server is gone"):
            kind(max_epochs=1, logger=Broken(), enable_progress_bar=False, enable_checkpointing=False).fit(
                Model()
            )


def test_the_directory_of_a_logger_is_empty_when_it_opens_it(tmp_path: Path, recwarn: Any) -> None:
    trainer = small(logger=CSVLogger(tmp_path, name="x"))
    trainer.fit(Model())
    assert not [each for each in recwarn if "not empty" in str(each.message)]
    assert (tmp_path / "x" / "version_0" / "metrics.csv").exists()


# ---- Lightning's loggers in hookline.Trainer -----------------------------------------------------------------


def test_hooklines_trainer_takes_lightnings_loggers_beside_its_own(tmp_path: Path) -> None:
    logger, table = Recorder(), CSVLogger(tmp_path, name="table")
    trainer = hookline.Trainer(
        logger=[logger, hookline.JSONLines(), table],
        run_dir=tmp_path / "run",
        max_epochs=1,
        log_every_n_steps=2,
        enable_progress_bar=False,
    )
    model = Model()
    trainer.fit(model)
    rows = [each for each in logger.calls if each[0] == "metrics"]
    assert [row[2] for row in rows if "train/loss" in row[1]] == [2, 4, 6, 6] and rows[0][1]["epoch"] == 0
    assert "options" in logger.calls[0][1] and logger.calls[-1] == ("finalize", "success")
    assert (tmp_path / "run" / "log.jsonl").exists() and Path(table.log_dir, "metrics.csv").exists()
    assert model.logger is logger and len(model.loggers) == 3 and model.loggers[1] is table
    assert (table.name, table.version, table.save_dir) == ("table", 0, str(tmp_path))


def test_the_loggers_of_a_failed_run_of_hooklines_trainer_are_finalized_as_failed(tmp_path: Path) -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("of the step")

    logger = Recorder()
    trainer = hookline.Trainer(logger=logger, run_dir=tmp_path, max_epochs=1, enable_progress_bar=False)
    with pytest.raises(ValueError, match="of the step"):
        trainer.fit(Fails())
    assert logger.calls[-1] == ("finalize", "failed")


def test_a_hook_of_hookline_adds_numbers_to_lightnings_loggers(tmp_path: Path) -> None:
    class Adds(hookline.Hook):
        def on_train_start(self, logger: Any) -> None:
            logger.add_scalar("added", 3.0, 7)
            logger.add_text("ignored", "this client has no text")

    logger = Recorder()
    hookline.Trainer(
        hooks=[Adds()], logger=logger, run_dir=tmp_path, max_epochs=1, enable_progress_bar=False
    ).fit(Model())
    assert ("metrics", {"added": 3.0}, 7) in logger.calls


def test_a_configuration_may_name_a_logger_of_lightning(tmp_path: Path) -> None:
    table = {"class_path": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path), "name": "x"}
    given = {"module": "hookline.demos.BoringModel", "loggers": {"table": table}}
    parts = load_config(given, allow=["lightning"]).build()
    (made,) = parts.make_trainer(hookline.Trainer).loggers.members
    assert made.original.root_dir == str(tmp_path / "x")


def test_rows_of_manual_optimization_are_of_the_batches_that_lightning_writes(tmp_path: Path) -> None:
    class Turns(Model):
        """Updates with the second optimizer in every second batch, so that `step` jumps."""

        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()  # type: ignore[misc]
            self.manual_backward(self.layer(batch[0]).square().mean())
            first.step()
            self.log("batch", float(batch_idx))
            if batch_idx % 2:
                second.step()
                self.log("second", float(batch_idx), on_epoch=True)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.001) for _ in range(2)]

    log = hookline.JSONLines()
    trainer = small(logger=log, run_dir=str(tmp_path / "run"), log_every_n_steps=4, limit_val_batches=0)
    trainer.fit(Turns(), loader(20, 2, seed=0))
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    shown = [
        (row["over"], row["step"], row["metrics"].get("batch"), row["metrics"].get("second_step"))
        for row in rows
        if row["type"] == "metrics"
    ]
    assert shown == [("step", 6, 3.0, 3.0), ("step", 12, 7.0, 7.0), ("epoch", 15, None, None)]
