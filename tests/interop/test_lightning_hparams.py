"""Hyper-parameters of Lightning's modules and data modules, as Lightning's own trainer treats them."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from tiny import quiet
from torch.utils.data import DataLoader

from hookline.checkpoint.weights import load_module
from hookline.interop import lightning as dialect
from hookline.loggers.base import Logger

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Recorded(Logger):
    """Keeps the newest hyper-parameters."""

    logged: Any = None

    def log_metrics(self, metrics: Any, step: int, epoch: int) -> None: ...

    def log_hyperparams(self, params: Any) -> None:
        if "options" not in params:  # Hookline's own
            self.logged = dict(params)


class TheirRecorded(pl.loggers.Logger):
    name, version = "recorded", 0
    logged: Any = None

    def log_hyperparams(self, params: Any, *args: Any) -> None:
        self.logged = dict(params)

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...


class Data(BoringDataModule):
    def __init__(self, lr: float = 1.0, shape: tuple[int, int] = (2, 3)) -> None:
        super().__init__()
        self.save_hyperparameters()


class Silent(BoringDataModule):
    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


class Model(BoringModel):
    def __init__(self, lr: float = 1.0, net: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def logged(module: Any, data: Any) -> tuple[Any, Any]:
    """What Lightning's trainer and Hookline's send to a logger."""
    theirs, ours = TheirRecorded(), Recorded()
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}
    quiet(logger=ours, **options).fit(module, datamodule=data)
    pl.Trainer(
        logger=theirs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **options,
    ).fit(module, datamodule=data)
    return theirs.logged, ours.logged


@pytest.mark.parametrize(
    ("module", "data", "expected"),
    [
        (BoringModel, Data, {"lr": 1.0, "shape": (2, 3)}),
        (BoringModel, Silent, None),
        (Model, BoringDataModule, {"lr": 1.0, "net": None}),
        (Model, Data, {"lr": 1.0, "net": None, "shape": (2, 3)}),
        (lambda: Model(2.0), Silent, {"lr": 2.0, "net": None}),
    ],
    ids=["data only", "data, not logged", "module only", "both", "a conflict that is not logged"],
)
def test_those_of_the_module_and_of_the_data_module_are_logged(module: Any, data: Any, expected: Any) -> None:
    assert logged(module(), data()) == (expected, expected)


@pytest.mark.parametrize("package", [pl, dialect])
def test_different_values_in_module_and_data_module_are_an_error(package: Any) -> None:
    class Net(package.LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(32, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Samples(package.LightningDataModule):  # type: ignore[misc]
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(2, 32))

    with pytest.raises(RuntimeError, match="merging hparams: 'lr' is 2.0 in Net and 1.0 in Samples"):
        quiet(logger=Recorded()).fit(Net(2.0), datamodule=Samples(1.0))
    quiet().fit(Net(2.0), datamodule=Samples(1.0))  # without a logger nothing is merged
    quiet(logger=Recorded()).fit(Net(2.0), datamodule=Samples(2.0))
    with pytest.raises(RuntimeError, match="The hyper-parameter|merging hparams"):  # a number is not its text
        quiet(logger=Recorded()).fit(Net(2.0), datamodule=Samples("2.0"))


def test_objects_are_logged_as_text_and_named_when_a_module_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Recorded()
    trainer = quiet(
        logger=recorded, limit_train_batches=1, limit_val_batches=0, checkpoint=True, run_dir=tmp_path
    )
    trainer.fit(Model(0.5, net=Namespace(width=3, act=torch.nn.ReLU())))
    assert recorded.logged["lr"] == 0.5
    assert "ReLU" in recorded.logged["net"]
    again = load_module(Model, tmp_path)
    assert again.hparams == {"lr": 0.5, "net": None}
    assert "which a checkpoint cannot hold: the default is used instead" in caplog.text
    trainer = quiet(limit_train_batches=1, limit_val_batches=0, checkpoint=True, run_dir=tmp_path)
    trainer.fit(Model(0.5, net=Namespace(width=3)), resume=tmp_path)


@dataclass(eq=False)
class TheirDataclass(BoringModel):
    width: int
    name_of: str = "small"
    scratch: Any = None

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="scratch")


@dataclass(eq=False)
class OurDataclass(dialect.LightningModule):
    width: int
    name_of: str = "small"
    scratch: Any = None

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="scratch")
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("cls", [TheirDataclass, OurDataclass])
def test_a_dataclass_keeps_its_fields(cls: Any) -> None:
    module = cls(4, scratch=[1])
    assert dict(module.hparams) == {"width": 4, "name_of": "small"}
    recorded = Recorded()
    quiet(logger=recorded, limit_val_batches=0).fit(module, DataLoader(torch.ones(2, 32)))
    assert recorded.logged == {"width": 4, "name_of": "small"}


@pytest.mark.parametrize("base", [pl.LightningModule, dialect.LightningModule])
def test_a_derived_class_may_ignore_what_its_base_has_kept(base: Any) -> None:
    class Keeps(base):  # type: ignore[misc]
        def __init__(self, width: int, secret: str) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Ignores(Keeps):
        def __init__(self, depth: int) -> None:
            super().__init__(width=2, secret="s")
            self.save_hyperparameters(ignore=["secret"])

    class Empty(base):  # type: ignore[misc]
        def __init__(self, conf: Any) -> None:
            super().__init__()
            self.save_hyperparameters(conf)

    assert dict(Keeps(1, "s").hparams) == {"width": 1, "secret": "s"}
    assert dict(Ignores(3).hparams) == {"width": 2, "depth": 3}
    assert dict(Empty({}).hparams) == {}
