"""`save_hyperparameters`, `hparams`, `load_from_checkpoint`, and callbacks that a module brings, without Lightning."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hookline
from hookline.cli import main
from hookline.hooks import EarlyStopping, HParams
from hookline.interop.lightning import Callback, LightningDataModule, LightningModule, Trainer


class Net(LightningModule):
    """As people write them."""

    def __init__(self, lr: float = 0.1, width: int = 2, shape: Any = None, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="shape")
        self.layer = nn.Linear(4, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("far", float(dataloader_idx))
        self.log(f"own_{dataloader_idx}", 1.0, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        return batches(3)


def trainer(**options: Any) -> Trainer:
    return Trainer(
        **{"logger": False, "max_epochs": 2, "enable_progress_bar": False, "accelerator": "cpu", **options}
    )


def test_the_arguments_of_init_are_kept_those_of_derived_classes_too() -> None:
    class Derived(Net):
        def __init__(self, lr: float, depth: int) -> None:
            super().__init__(lr=lr * 2, extra="e")

    assert Net(0.3, shape=nn.ReLU()).hparams == {"lr": 0.3, "width": 2}
    module = Derived(0.25, depth=3)
    assert module.hparams == {"lr": 0.25, "width": 2, "extra": "e", "depth": 3} and module.hparams.depth == 3
    module.hparams.lr = 1.0
    assert module.hparams["lr"] == 1.0 and module.hparams_initial.lr == 0.25
    with pytest.raises(AttributeError, match="hparams has no 'dept'. It has: lr, width"):
        _ = module.hparams.dept


@dataclass
class Settings:
    lr: float = 0.5
    width: int = 2


@pytest.mark.parametrize(
    "given", [{"lr": 0.5, "width": 2}, argparse.Namespace(lr=0.5, width=2), Settings()], ids=str
)
def test_one_object_with_all_of_them_is_kept_by_its_entries(given: Any) -> None:
    class Conf(LightningModule):
        def __init__(self, conf: Any, other: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(conf)

    assert Conf(given).hparams == {"lr": 0.5, "width": 2}


def test_some_are_kept_by_their_names_and_an_unknown_one_is_refused() -> None:
    class Some(LightningModule):
        def __init__(self, name: str, lr: float = 0.1, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters(name)

    assert Some("lr").hparams == {"lr": 0.1}
    with pytest.raises(
        hookline.OptionError, match=r"'depth'.*Some.__init__ has no such argument. It has: name, lr, width"
    ):
        Some("depth")


class Data(LightningDataModule):
    """Data with a setting."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return batches(self.hparams.number)


def test_they_are_logged_and_a_module_is_made_again_with_them() -> None:
    mine = trainer(logger=True, run_dir="run")
    module = Net(lr=0.2, width=2)
    mine.fit(module, datamodule=Data())
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert {"lr": 0.2, "width": 2, "number": 3} in [
        each["params"] for each in records if each["type"] == "hyperparams"
    ]
    mine.save_checkpoint("saved")
    again = Net.load_from_checkpoint("saved", width=2)
    assert again.hparams.lr == 0.2 and torch.equal(again.layer.weight, module.layer.weight)


def test_ones_own_hook_for_them_goes_first() -> None:
    mine = trainer(callbacks=[HParams({"lr": 7.0})])
    mine.fit(Net(lr=0.2))
    mine.save_checkpoint("saved")
    assert Net.load_from_checkpoint("saved").hparams.lr == 7.0


def test_callbacks_that_the_module_brings_take_the_place_of_the_trainers_own() -> None:
    class Patient(Net):
        def val_dataloader(self) -> Any:
            return batches(2)

        def configure_callbacks(self) -> Any:
            return EarlyStopping("far", patience=9)

    mine = trainer(callbacks=[EarlyStopping("far", patience=0)], max_epochs=4)
    mine.fit(Patient())
    assert mine.status == "completed" and mine.current_epoch == 4


def test_results_of_several_loaders_are_a_dictionary_for_each() -> None:
    results = trainer().validate(
        Net(), [DataLoader(batches(n), batch_size=None) for n in (2, 1)], verbose=False
    )
    assert results == [
        {"far/dataloader_idx_0": 0.0, "own_0": 1.0},
        {"far/dataloader_idx_1": 1.0, "own_1": 1.0},
    ]


def test_a_metric_object_is_logged_by_the_step_without_being_told_as_in_lightning() -> None:
    class Mean:
        def __init__(self) -> None:
            self.values: list[float] = []
            self._forward_cache: Any = None

        def __call__(self, value: float) -> None:
            self.values.append(value)
            self._forward_cache = value

        def compute(self) -> float:
            return sum(self.values) / len(self.values)

        def reset(self) -> None:
            self.values = []

    class Measures(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = Mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(float(batch_idx))
            self.log("by_step", self.mean)
            self.log("both", self.mean, on_step=True, on_epoch=True)
            self.log("again", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    mine = trainer(max_epochs=1)
    mine.fit(Measures())
    assert mine.metrics["by_step"] == 2.0  # the last batch's
    assert (
        mine.metrics["both"] == mine.metrics["both_epoch"] == mine.metrics["again"] == 1.0
        and mine.metrics["both_step"] == 2.0
    )


def test_after_the_training_current_epoch_is_the_number_of_epochs() -> None:
    class Looks(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.last = (trainer.current_epoch, pl_module.current_epoch)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end = (trainer.current_epoch, pl_module.current_epoch)

    looks = Looks()
    mine = trainer(callbacks=[looks])
    mine.fit(Net())
    assert (looks.last, looks.end, mine.current_epoch) == ((1, 1), (2, 2), 2)


def test_the_command_line_shows_callbacks_of_the_dialect_a_trainer_with_their_names(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("parts.py").write_text(
        "import sys\n"
        "from hookline.interop.demo import BoringModel\n"
        "from hookline.interop.lightning import Callback\n"
        "class Tells(Callback):\n"
        "    def on_train_end(self, trainer, pl_module):\n"
        "        print('told', sorted(trainer.callback_metrics), trainer.is_global_zero, file=sys.stderr)\n"
    )
    Path("run.toml").write_text(
        'module = "parts.BoringModel"\nhooks = ["parts.Tells"]\n'
        'trainer = {max_epochs = 1, limit_train_batches = 2, run_dir = "run"}\n'
    )
    assert main(["fit", "run.toml"]) == 0
    assert "told ['train/loss', 'val/x'] True" in capfd.readouterr().err


def test_arguments_of_a_mixin_and_of_init_called_again_are_kept() -> None:
    class Mixin:
        def __init__(self, width: int, **more: Any) -> None:
            super().__init__(**more)

    class Mixed(Mixin, LightningModule):
        """Has the `__init__` of another class."""

    class Both(Mixed):
        def __init__(self, *sizes: int, lr: float = 0.1) -> None:
            super().__init__(width=3)
            self._keep()

        def _keep(self) -> None:
            self.save_hyperparameters()

    assert Both(1, 2).hparams == {"lr": 0.1}
    made = Net(0.5)
    made.__init__(lr=0.25)  # type: ignore[misc]
    assert made.hparams == {"lr": 0.25, "width": 2}
