"""Lightning's Tuner and its two callbacks with the dialect's trainer, against Lightning's own trainer."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from hookline.interop import lightning as dialect
from hookline.interop.lightning import Trainer

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
TRAINERS = (pl.Trainer, Trainer)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


class Model(BoringModel):
    """A model with a learning rate and a batch size; its data is the same in every call."""

    def __init__(self, lr: float = 0.01, batch_size: int = 2, most: int = 2**30) -> None:
        super().__init__()
        self.lr, self.batch_size, self.most = lr, batch_size, most
        self.data = RandomDataset(32, 64)
        self.heard: list[str] = []

    def setup(self, stage: str) -> None:
        self.heard.append("setup")

    def on_train_start(self) -> None:
        self.heard.append("on_train_start")

    def on_train_end(self) -> None:
        self.heard.append("on_train_end")

    def teardown(self, stage: str) -> None:
        self.heard.append("teardown")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch) > self.most:
            raise RuntimeError("CUDA out of memory.")
        self.log("loss", loss := super().training_step(batch, batch_idx)["loss"])
        return loss

    def _loader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def made(kind: Any, tmp_path: Path, **options: Any) -> Any:
    return kind(default_root_dir=tmp_path / kind.__module__, **{**QUIET, "max_epochs": 2, **options})


def test_lr_find_reads_the_loader_that_the_module_has_loaded_for_its_schedule(tmp_path: Path) -> None:
    class Scheduled(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": (self(batch) * (batch[0, 0] + 2)).square().sum()}

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=2, shuffle=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            steps = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)]

    found = []
    for kind in TRAINERS:
        torch.manual_seed(1)
        result = Tuner(made(kind, tmp_path)).lr_find(Scheduled(), num_training=20, early_stop_threshold=None)
        found.append(result.results)
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["linear", "exponential"])
def test_lr_find_measures_the_same_losses_and_restores_everything(mode: str, tmp_path: Path) -> None:
    found = []
    for kind in TRAINERS:
        torch.manual_seed(1)
        model = Model()
        before = copy.deepcopy(model.state_dict())
        trainer = made(kind, tmp_path)
        shown = [trainer.callbacks, trainer.max_steps, trainer.limit_val_batches, trainer.global_step]
        result = Tuner(trainer).lr_find(model, num_training=20, mode=mode, early_stop_threshold=None)
        found.append((result.results, result.suggestion(), model.lr, result._total_batch_idx))
        assert model.lr == result.suggestion() != 0.01
        assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
        after = [trainer.callbacks, trainer.max_steps, trainer.limit_val_batches, trainer.global_step]
        assert after == shown and trainer.state.finished and model.trainer is trainer
        assert not list(tmp_path.rglob(".lr_find*"))
        assert model.heard == ["setup", "on_train_start", "on_train_end", "teardown"]
        trainer.fit(model)
        assert trainer.global_step == 64
    assert found[0] == found[1]


@pytest.mark.parametrize("as_callback", [False, True], ids=["tuner", "callback"])
def test_a_module_of_this_dialect_gets_the_rate_of_lightnings_search(
    as_callback: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    for name in ("lightning.pytorch", "hookline"):
        caplog.set_level(logging.INFO, name)

    shown_state = (
        "TrainerState(status=<TrainerStatus.FINISHED: 'finished'>, fn=<TrainerFn.FITTING: 'fit'>, stage=None)"
    )

    def found_by(package: Any, find: Any) -> list[Any]:
        class Both(package.LightningModule):  # type: ignore[misc]
            def __init__(self, lr: float = 0.01) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.lr, self.layer = lr, torch.nn.Linear(32, 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer(batch).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=self.lr)

        torch.manual_seed(1)
        caplog.clear()
        model, loader = Both(), DataLoader(RandomDataset(32, 64), 2, shuffle=True)
        finder = LearningRateFinder(num_training_steps=80, early_stop_threshold=None)
        callbacks = [finder] if as_callback else []
        trainer = made(package.Trainer, tmp_path, callbacks=callbacks, enable_checkpointing=False)
        if not as_callback:
            options = {"num_training": 80, "early_stop_threshold": None}
            finder.optimal_lr = find(trainer).lr_find(model, loader, **options)
        trainer.fit(model, loader)
        losses = finder.optimal_lr.results
        stopped = {each for each in caplog.messages if "stopped early" in each}
        trained = [each for each in caplog.messages if each.startswith("Model: ")]
        assert len(trained) == (0 if package is pl else 1)  # the search trains none
        assert repr(trainer.state) == shown_state
        return [model.lr, model.hparams.lr, losses, stopped, trainer.global_step, model.layer.weight.tolist()]

    theirs, ours = found_by(pl, Tuner), found_by(dialect, dialect.Tuner)
    assert ours == theirs and ours[0] == ours[1] != 0.01
    assert ours[3] == {"LR finder stopped early after 64 steps due to diverging loss."}


def test_lr_find_counts_updates_and_not_batches(tmp_path: Path) -> None:
    for kind in TRAINERS:
        trainer = made(kind, tmp_path, accumulate_grad_batches=2)
        result = Tuner(trainer).lr_find(Model(), num_training=20, early_stop_threshold=None)
        assert len(result.results["lr"]) == len(result.results["loss"]) == 20
        assert result._total_batch_idx == 39


def test_lr_find_stops_where_the_loss_diverges(tmp_path: Path) -> None:
    class Diverging(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 0 + 10.0 ** max(0, self.trainer.global_step - 5)

    lengths = [len(Tuner(made(each, tmp_path)).lr_find(Diverging()).results["lr"]) for each in TRAINERS]
    assert lengths[0] == lengths[1] < 64


def test_lr_find_reports_wrong_models_as_lightning(tmp_path: Path) -> None:
    class Two(BoringModel):
        lr = 0.1
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=1), torch.optim.SGD(self.parameters(), lr=1)]

    with pytest.raises(MisconfigurationException, match="single optimizer"):
        Tuner(made(Trainer, tmp_path)).lr_find(Two())
    with pytest.raises(AttributeError, match="should have one of these fields"):
        Tuner(made(Trainer, tmp_path)).lr_find(BoringModel())
    trainer = made(Trainer, tmp_path)
    trainer.fit(BoringModel())  # a failed search leaves nothing behind
    assert trainer.global_step == 128


def test_an_error_in_the_search_restores_the_trainer_and_is_reported_once(tmp_path: Path) -> None:
    class Failing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("in the step")

    class Listening(Callback):
        heard: list[str]

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.heard.append(str(exception))

    for kind in TRAINERS:
        listening = Listening()
        listening.heard = []
        trainer = made(kind, tmp_path, callbacks=[LearningRateFinder(), listening], limit_val_batches=3)
        with pytest.raises(ZeroDivisionError, match="in the step"):
            trainer.fit(Failing())
        assert listening.heard == (["in the step"] if kind is Trainer else [])  # Lightning has removed it
        assert str(trainer.state.status) == "TrainerStatus.INTERRUPTED"


def test_the_callback_sets_the_learning_rate_and_the_fit_continues(tmp_path: Path) -> None:
    found = []
    for kind in TRAINERS:
        torch.manual_seed(1)
        model, finder = Model(), LearningRateFinder(num_training_steps=20)
        trainer = made(kind, tmp_path, callbacks=[finder], num_sanity_val_steps=0)
        trainer.fit(model)
        assert trainer.optimizers[0].param_groups[0]["lr"] == finder.optimal_lr.suggestion() == model.lr
        found.append((trainer.global_step, trainer.current_epoch, trainer.num_val_batches, model.heard))
    assert found[0] == found[1]


def test_a_subclass_searches_at_the_start_of_epochs(tmp_path: Path) -> None:
    class AtEpochs(LearningRateFinder):
        found: list[tuple[int, int, int]]

        def on_fit_start(self, *given: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.lr_find(trainer, pl_module)
            self.found.append((trainer.current_epoch, trainer.global_step, trainer.max_steps))

    found = []
    for kind in TRAINERS:
        finder = AtEpochs(num_training_steps=15, early_stop_threshold=None)
        finder.found = []
        trainer = made(kind, tmp_path, callbacks=[finder], limit_train_batches=10, limit_val_batches=0)
        trainer.fit(Model())
        found.append((finder.found, trainer.global_step))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize("most", [10, 2**30], ids=["out of memory", "enough memory"])
def test_scale_batch_size_finds_the_same_size(mode: str, most: int, tmp_path: Path) -> None:
    found = []
    for kind in TRAINERS:
        model = Model(most=most)
        before = copy.deepcopy(model.state_dict())
        trainer = made(kind, tmp_path, limit_train_batches=1.0)
        size = Tuner(trainer).scale_batch_size(model, mode=mode, steps_per_trial=2, max_trials=8)
        assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
        found.append((size, model.batch_size, trainer.global_step, trainer.train_dataloader.batch_size))
        trainer.fit(model)
        found[-1] += (trainer.global_step,)
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_scale_batch_size_of_evaluations(method: str, tmp_path: Path) -> None:
    found = []
    for kind in TRAINERS:
        model, trainer = Model(), made(kind, tmp_path)
        size = Tuner(trainer).scale_batch_size(model, method=method, max_trials=3)
        found.append((size, model.batch_size, trainer.global_step, trainer.current_epoch))
        finder, model = BatchSizeFinder(max_trials=3), Model()
        getattr(made(kind, tmp_path, callbacks=[finder]), method)(model)
        found[-1] += (finder.optimal_batch_size, model.batch_size)
    assert found[0] == found[1]


def test_scale_batch_size_of_a_data_module(tmp_path: Path) -> None:
    class Data(BoringDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(self.random_train, batch_size=self.batch_size)

    found = []
    for kind in TRAINERS:
        data, trainer = Data(), made(kind, tmp_path)
        size = Tuner(trainer).scale_batch_size(BoringModel(), datamodule=data, max_trials=3)
        assert trainer.datamodule is data
        found.append((size, data.batch_size, trainer.train_dataloader.batch_size))
    assert found[0] == found[1]


def test_scale_batch_size_refuses_loaders_that_were_passed(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(MisconfigurationException, match="passed directly"):
        Tuner(made(Trainer, tmp_path)).scale_batch_size(model, train_dataloaders=model.train_dataloader())
