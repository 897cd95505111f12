"""`hookline.interop.lightning.callbacks`, `loggers` and `Tuner`, with Lightning installed and without."""

from __future__ import annotations

import importlib.util
import pickle
import re
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.demos.boring_classes import BoringModel
from tiny import batches

import hookline
import hookline.hooks
from hookline.interop.lightning import LightningModule, Trainer, Tuner, callbacks, loggers

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
NAMES = [
    "EarlyStopping",
    "ModelCheckpoint",
    "LearningRateMonitor",
    "Timer",
    "RichProgressBar",
    "TQDMProgressBar",
    "ModelSummary",
    "GradientAccumulationScheduler",
    "StochasticWeightAveraging",
    "BasePredictionWriter",
    "DeviceStatsMonitor",
    "LambdaCallback",
    "BackboneFinetuning",
    "Callback",
]
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


@pytest.fixture
def without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    hidden = ("lightning", "pytorch_lightning")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    for name in [each for each in sys.modules if each.endswith(".trainer.trainer")]:
        monkeypatch.delitem(sys.modules, name)


class Net(LightningModule):
    """The linear regression of `tiny`, in the dialect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(4, 2), 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("name", NAMES)
def test_a_callback_is_that_of_the_installed_package(name: str) -> None:
    assert getattr(callbacks, name) is getattr(theirs, name)


@pytest.mark.usefixtures("without_lightning")
def test_without_the_package_it_is_hooklines_that_does_the_same() -> None:
    assert issubclass(callbacks.EarlyStopping, hookline.hooks.EarlyStopping)
    assert issubclass(callbacks.ModelCheckpoint, hookline.hooks.ModelCheckpoint)
    assert callbacks.EarlyStopping("val_accuracy").mode == theirs.EarlyStopping("val_accuracy").mode == "min"
    assert callbacks.ModelCheckpoint(monitor="val_accuracy").mode == "min"
    assert hookline.hooks.ModelCheckpoint(monitor="val_accuracy").mode == "max"
    assert callbacks.ModelCheckpoint(monitor="val_accuracy", mode="max").mode == "max"
    assert pickle.loads(pickle.dumps(callbacks.EarlyStopping)) is callbacks.EarlyStopping
    made = [callbacks.TQDMProgressBar(refresh_rate=2), callbacks.LearningRateMonitor("step")]
    trainer = Trainer(callbacks=[*made, callbacks.DeviceStatsMonitor()], max_epochs=1, logger=False)
    assert list(trainer.callbacks)[:3] == [*made, trainer.callbacks[2]]
    trainer.fit(Net(), batches(2))
    assert trainer.global_step == 2


@pytest.mark.usefixtures("without_lightning")
def test_without_the_package_other_names_say_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"^SpikeDetection needs the package lightning.*SpikeGuard"):
        from hookline.interop.lightning.callbacks import SpikeDetection  # noqa: F401
    with pytest.raises(ImportError, match=r"^BatchSizeFinder needs .*hookline\.hooks\.BatchSizeFinder"):
        from hookline.interop.lightning import BatchSizeFinder  # noqa: F401
    with pytest.raises(ImportError, match=r"use hookline\.loggers\.CSV: `CSV\(\)` .* no save_dir\.$"):
        from hookline.interop.lightning.loggers import CSVLogger  # noqa: F401
    with pytest.raises(AttributeError, match="Did you mean 'EarlyStopping'"):
        callbacks.EarlyStoping  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean 'CSVLogger'"):
        loggers.CSVLoger  # noqa: B018


@pytest.mark.parametrize(("table", "package"), [(callbacks.INSTEAD, "hooks"), (loggers.INSTEAD, "loggers")])
def test_what_to_use_without_the_package_exists(table: dict[str, str], package: str) -> None:
    named = [each for text in table.values() for each in re.findall(rf"hookline\.{package}\.(\w+)", text)]
    assert len(named) > 5
    assert [each for each in named if not hasattr(importlib.import_module(f"hookline.{package}"), each)] == []
    missing = [each for each in dir(loggers) if each.endswith("Logger") and each != "AdoptedLogger"]
    assert set(pl.loggers.__all__) <= set(missing)


@pytest.mark.parametrize("name", pl.loggers.__all__)
def test_a_logger_is_that_of_the_installed_package(name: str) -> None:
    assert getattr(loggers, name) is getattr(pl.loggers, name)


def test_the_tuner_takes_modules_of_the_package() -> None:
    model = BoringModel()
    model.lr = 0.5
    found = Tuner(Trainer(**QUIET, max_epochs=1)).lr_find(model, num_training=20, early_stop_threshold=None)
    assert model.lr == found.suggestion() != 0.5
    model.batch_size = 1
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="not found"):
        Tuner(Trainer(**QUIET)).scale_batch_size(BoringModel())


@pytest.mark.usefixtures("without_lightning")
def test_without_the_package_the_tuner_searches_with_hooklines_finder() -> None:
    model = Net()
    model.save_hyperparameters({"lr": 0.1})
    before = model.layer.weight.clone()
    found = Tuner(Trainer(**QUIET)).lr_find(model, batches(50), num_training=40)
    assert model.lr == model.hparams.lr == found.suggestion() != 0.1
    assert torch.equal(model.layer.weight, before)
    assert len(found.results["lr"]) == len(found.results["loss"]) > 10
    with pytest.raises(AttributeError, match="should have one of these fields: speed"):
        Tuner(Trainer(**QUIET)).lr_find(model, batches(50), attr_name="speed")
    with pytest.raises(ValueError, match="mode='linear'"):
        Tuner(Trainer(**QUIET)).lr_find(model, batches(50), mode="linear")


def test_the_tuner_takes_a_trainer_of_hookline() -> None:
    native: Any = hookline.Trainer(logger=False, enable_progress_bar=False)
    assert len(Tuner(native).lr_find(Net(), batches(50), num_training=10).results["lr"]) == 10
    with pytest.raises(ValueError, match=r"For a hookline.Trainer use hookline.hooks.LRFinder\(\).find"):
        Tuner(native).lr_find(BoringModel())


def test_lightnings_summary_runs_the_example_input_of_a_module_of_the_dialect() -> None:
    class Shown(Net):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = {"values": torch.ones(3, 4)}

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch["values"] if isinstance(batch, dict) else batch

        def forward(self, values: Any) -> Any:
            return self.layer(values)

    class Kept(theirs.ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *args: Any, **options: Any) -> None:
            seen.update(summary_data)

    seen: dict[str, Any] = {}
    options = {**QUIET, "enable_model_summary": True, "enable_checkpointing": False}
    Trainer(max_steps=1, callbacks=[Kept()], **options).fit(Shown(), batches(1))
    assert seen["Out sizes"] == ["[3, 2]"]


def test_star_imports_give_what_those_of_lightning_give() -> None:
    space: dict[str, Any] = {}
    exec("from hookline.interop.lightning.callbacks import *", space)
    exec("from hookline.interop.lightning.loggers import *", space)
    names = [*theirs.__all__, *pl.loggers.__all__]
    assert space.keys() - {"__builtins__"} == set(names)
    assert space["EarlyStopping"] is theirs.EarlyStopping


def test_star_imports_without_lightning_give_hooklines(without_lightning: None) -> None:
    space: dict[str, Any] = {}
    exec("from hookline.interop.lightning.callbacks import *", space)
    exec("from hookline.interop.lightning.loggers import *", space)
    assert space.keys() - {"__builtins__"} == {*callbacks.SAME, *callbacks.OWN}


@pytest.mark.parametrize(
    ("line", "told"),
    {
        "from hookline.interop.lightning import LightningCLI": "hookline run --as lightning",
        "from hookline.interop.lightning import rank_zero_only": "lightning.pytorch.utilities.rank_zero_only",
        "from hookline.interop.lightning.tuner import Tuner": "from hookline.interop.lightning import Tuner",
        "from hookline import LightningCLI": "hookline convert FILE",
        "from hookline import rank_zero_only": "ranks = 'zero'",
    }.items(),
)
def test_names_of_lightning_in_another_place_say_what_to_do(line: str, told: str) -> None:
    with pytest.raises(ImportError, match=told):
        exec(line, {})


def test_a_progress_bar_of_lightning_replaces_that_of_the_trainer() -> None:
    trainer = hookline.Trainer(hooks=[theirs.TQDMProgressBar()], logger=False)
    assert [entry.name for entry in trainer.hooks.entries()] == ["tqdm_progress_bar"]
    with pytest.raises(hookline.OptionError, match="would make two progress bars"):
        hookline.Trainer(hooks=[theirs.TQDMProgressBar()], logger=False, enable_progress_bar=True)


@pytest.mark.parametrize("name", ["utilities", "strategies"])
def test_a_module_that_only_lightning_has_is_to_be_imported_from_there(name: str) -> None:
    import hookline.interop.lightning as dialect

    told = f"Import it from Lightning: lightning.pytorch.{name}"
    for line in (
        f"from hookline.interop.lightning import {name}",
        f"import hookline.interop.lightning.{name}",
    ):
        with pytest.raises(ImportError, match=told):
            exec(line, {})
    with pytest.raises(AttributeError, match=told):
        getattr(dialect, name)
    assert not hasattr(dialect, name)
