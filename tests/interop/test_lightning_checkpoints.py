"""Checkpoints of Lightning's trainer on Hookline's loop: Lightning's files, and a bit-exact resume from them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import preloaded
import pytest
import torch
from interop.processes import environment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MinMetric, SumMetric

import hookline
from hookline.interop.lightning import Trainer

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

BOTH = pytest.mark.parametrize("kind", [Trainer, pl.Trainer], ids=["hookline", "lightning"])


def data(samples: int, shuffle: bool = False) -> Any:
    features = torch.arange(4.0 * samples).reshape(samples, 4) / samples
    return DataLoader(TensorDataset(features, features[:, :2]), batch_size=2, shuffle=shuffle)


class Model(pl.LightningModule):
    """Everything that a resume can lose: dropout, a shuffled loader, moments, a schedule on a metric."""

    def __init__(self, lr: float = 0.01, width: int = 2, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, width)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, features: Any) -> Any:
        return self.norm(self.drop(self.layer(features)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", abs(self.current_epoch - 1.0) + self.layer.weight.sum() * 0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "score"}}

    def train_dataloader(self) -> Any:
        return data(12, shuffle=True)

    def val_dataloader(self) -> Any:
        return data(4)


def make(kind: Any = Trainer, *callbacks: Any, **options: Any) -> Any:
    return kind(
        **{
            "max_epochs": 3,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "accelerator": "cpu",
            "callbacks": list(callbacks),
            "default_root_dir": "root",
            **options,
        }
    )


def fit(
    kind: Any = Trainer, *callbacks: Any, seed: int = 1, ckpt_path: Any = None, **options: Any
) -> tuple[Any, Any]:
    pl.seed_everything(seed, verbose=False)
    trainer, model = make(kind, *callbacks, **options), Model()
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


def state(trainer: Any, model: Any) -> dict[str, Any]:
    """What two runs that did the same have in common."""
    moments = trainer.optimizers[0].state_dict()
    numbers = [each for values in moments["state"].values() for each in values.values()]
    return {**model.state_dict(), **dict(enumerate(numbers)), "lr": moments["param_groups"][0]["lr"]}


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    first, second = state(*one), state(*other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[key])), key


def read(path: Any) -> dict[str, Any]:
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


# ---- the same files as Lightning's -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "interval", "fits"),
    [
        ({"monitor": "score", "save_top_k": 2, "save_last": True}, 3, 2),
        ({"monitor": "score", "mode": "max", "filename": "{epoch:02d}-{score:.1f}"}, 1.0, 1),
        ({"monitor": "score", "save_top_k": -1, "filename": "same"}, 1.0, 1),
        ({"save_top_k": 0, "save_last": True}, 1.0, 1),
        ({"save_last": "link", "save_top_k": -1}, 1.0, 1),
        ({"save_last": "link", "every_n_train_steps": 4, "save_top_k": -1}, 3, 1),
        ({"every_n_train_steps": 4, "save_top_k": -1, "save_last": True}, 1.0, 1),
        ({"every_n_epochs": 2, "save_top_k": -1}, 1.0, 1),
        ({"train_time_interval": timedelta(0), "save_top_k": -1}, 1.0, 1),
        ({"save_weights_only": True, "save_top_k": -1}, 1.0, 1),
        ({"save_on_train_epoch_end": False, "save_top_k": -1}, 3, 1),
    ],
    ids=str,
)
def test_the_folder_and_the_files_are_those_of_lightning(
    settings: dict[str, Any], interval: float, fits: int
) -> None:
    found = []
    for kind in (pl.Trainer, Trainer):
        folder = Path(kind.__module__.partition(".")[0]).absolute()
        callback = ModelCheckpoint(folder, **settings)
        fit(kind, callback, val_check_interval=interval)
        if fits == 2:  # the second one finds the files of the first
            fit(kind, callback := ModelCheckpoint(folder, **settings), val_check_interval=interval)
        files = {}
        for path in sorted(folder.iterdir()):
            assert path.is_file()
            entries = read(path)
            own = entries.pop("hookline", None)
            assert (own is not None) == (kind is Trainer and not settings.get("save_weights_only"))
            files[path.name] = (
                path.is_symlink(),
                entries["epoch"],
                entries["global_step"],
                list(entries),
                sorted(entries.get("callbacks", ())),
                entries["hyper_parameters"],
                entries["loops"]["fit_loop"]["epoch_progress"],
            )
        names = [callback.best_model_path, callback.last_model_path, callback.kth_best_model_path]
        found.append((files, [Path(each).name for each in names], callback.best_model_score))
    theirs, ours = found
    assert ours == theirs and theirs[0]


def test_the_last_link_may_change_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelCheckpoint, "CHECKPOINT_NAME_LAST", "last-{epoch}")
    listed = []
    for kind in (pl.Trainer, Trainer):
        folder = Path(kind.__module__.partition(".")[0])
        fit(kind, ModelCheckpoint(folder, save_last="link", filename="{epoch}", save_top_k=-1))
        listed.append(sorted((each.name, each.is_symlink()) for each in folder.iterdir()))
        assert read(folder / "last-epoch=2.ckpt")["epoch"] == 2
    kept = [(f"epoch={epoch}.ckpt", False) for epoch in range(3)]
    assert listed[0] == listed[1] == [*kept, ("last-epoch=2.ckpt", True)]
    fit(Trainer, ModelCheckpoint("one", save_last="link", filename="{epoch}"))
    assert sorted(os.listdir("one")) == ["epoch=2.ckpt", "last-epoch=2.ckpt"]  # no link to a removed file


def test_best_model_path_is_what_a_lightning_program_reads() -> None:
    trainer, model = fit(Trainer, callback := ModelCheckpoint("kept", monitor="score"))
    best = callback.best_model_path
    assert os.path.isfile(best) and os.listdir("kept") == ["epoch=1-step=12.ckpt"]
    again = Model.load_from_checkpoint(best)
    assert again.hparams == model.hparams
    assert Model.load_from_checkpoint(best, lr=0.5).hparams["lr"] == 0.5
    for name, value in read(best)["state_dict"].items():
        assert torch.equal(again.state_dict()[name], value)
    assert trainer.checkpoint_callback is callback


# ---- resuming ----------------------------------------------------------------------------------------------------

SAVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({"every_n_train_steps": 4}, {}),
    "steps before a validation": ({"every_n_train_steps": 3}, {"val_check_interval": 3}),
    "validations": ({"save_on_train_epoch_end": False}, {"val_check_interval": 2}),
    "last validation of an epoch": ({"save_on_train_epoch_end": False}, {}),
    "epochs": ({"save_on_train_epoch_end": True}, {}),
    "inside accumulation": ({"train_time_interval": timedelta(0)}, {"accumulate_grad_batches": 4}),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_resume_from_any_file_is_bit_exact(name: str) -> None:
    settings, options = SAVES[name]
    whole = fit(Trainer, ModelCheckpoint("kept", save_top_k=-1, **settings), **options)
    files = sorted(Path("kept").iterdir(), key=lambda path: read(path)["global_step"])
    assert len(files) >= 3
    for path in {files[0], files[len(files) // 2], files[-1]}:
        callback = ModelCheckpoint("again", save_top_k=-1, **settings)
        resumed = fit(Trainer, callback, seed=99, ckpt_path=path, **options)
        assert_same(whole, resumed)
        assert resumed[0].ckpt_path == path and resumed[0].current_epoch == 3


class Measured(Model):
    """Logs numbers and metric objects, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({"mean": MeanMetric(), "cat": MaxMetric(), "val": MeanMetric()})
        self.rates = MetricCollection({"low": MinMetric(), "sum": SumMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in ("mean", "cat"):
            self.metrics[name](loss)
            self.log(name, self.metrics[name], on_step=name == "cat", on_epoch=True)
        self.rates(loss)
        self.log_dict(self.rates, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.metrics["val"](batch[0])
        self.log("val", self.metrics["val"])


@pytest.mark.parametrize("name", SAVES)
def test_the_metrics_of_a_resumed_epoch_cover_all_its_batches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(pl.Callback):
        def __init__(self) -> None:
            self.epochs: list[dict[str, float]] = []

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self.epochs.append({key: float(each) for key, each in trainer.callback_metrics.items()})

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.on_fit_end(trainer, pl_module)

    monkeypatch.setitem(globals(), "Model", Measured)
    settings, options = SAVES[name]
    whole = Notes()
    fit(Trainer, ModelCheckpoint("kept", save_top_k=-1, **settings), whole, **options)
    files = sorted(Path("kept").iterdir(), key=lambda path: read(path)["global_step"])
    assert {"mean", "cat_epoch", "low", "sum", "loss_epoch", "first", "val"} <= whole.epochs[-1].keys()
    for path in {files[0], files[len(files) // 2], files[-1]}:
        again = Notes()
        callback = ModelCheckpoint("again", save_top_k=-1, **settings)
        fit(Trainer, callback, again, seed=99, ckpt_path=path, **options)
        for was, now in zip(whole.epochs[::-1], again.epochs[::-1], strict=False):
            assert now == {key: was[key] for key in now}, path  # no validation before the resume is shown


def test_callbacks_after_the_checkpoint_callback_and_hooks_of_the_module_are_in_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_train_batch_end(self: Any, *given: Any) -> None:
        with torch.no_grad():
            self.layer.bias += 0.125

    monkeypatch.setattr(Model, "on_train_batch_end", on_train_batch_end, raising=False)

    def callbacks() -> Any:
        stopping = EarlyStopping("score", patience=1)
        return ModelCheckpoint("kept", save_top_k=-1, every_n_train_steps=2), stopping

    whole = fit(Trainer, *callbacks(), max_epochs=9)
    assert whole[0].current_epoch == 4 - 1
    for path in ("kept/epoch=0-step=4.ckpt", "kept/epoch=2-step=18.ckpt"):
        resumed = fit(Trainer, *callbacks(), seed=7, max_epochs=9, ckpt_path=path)
        assert_same(whole, resumed)
        assert resumed[0].current_epoch == whole[0].current_epoch


def test_the_epoch_is_right_before_the_first_batch_of_a_resumed_run() -> None:
    class Notes(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.at = trainer.current_epoch, pl_module.current_epoch, trainer.global_step

    fit(pl.Trainer, ModelCheckpoint("kept", save_top_k=-1, filename="{epoch}"))
    found = []
    for kind in (pl.Trainer, Trainer):
        fit(kind, notes := Notes(), ckpt_path="kept/epoch=1.ckpt")
        found.append(notes.at)
    assert found[0] == found[1] == (2, 2, 12)


@pytest.mark.parametrize("settings", [{"every_n_train_steps": 4}, {}], ids=str)
def test_a_file_of_lightning_resumes_what_it_has(settings: dict[str, Any]) -> None:
    fit(pl.Trainer, theirs := ModelCheckpoint("kept", save_top_k=-1, **settings))
    for path in sorted(Path("kept").iterdir()):
        entries = read(path)
        callback = ModelCheckpoint("kept", save_top_k=-1, **settings)

        class Notes(pl.Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                self.weights = {name: each.clone() for name, each in pl_module.state_dict().items()}
                self.lr = trainer.optimizers[0].param_groups[0]["lr"]
                self.step = trainer.global_step, int(trainer.optimizers[0].state_dict()["state"][0]["step"])

        trainer, _ = fit(Trainer, callback, notes := Notes(), seed=5, max_epochs=4, ckpt_path=path)
        assert all(torch.equal(notes.weights[name], each) for name, each in entries["state_dict"].items())
        assert notes.lr == entries["optimizer_states"][0]["param_groups"][0]["lr"]
        assert notes.step == (entries["global_step"], entries["global_step"])
        assert trainer.global_step == 24 and trainer.current_epoch == 4
        for name in set(os.listdir("kept")) - {Path(each).name for each in (theirs.best_model_path,)}:
            if "-v" in name:
                Path("kept", name).unlink()


@pytest.mark.parametrize("name", ["steps", "validations", "epochs"])
def test_lightning_resumes_from_the_file_too(name: str) -> None:
    settings, options = SAVES[name]
    fit(Trainer, ModelCheckpoint("kept", save_top_k=-1, **settings), **options)
    for path in sorted(Path("kept").iterdir())[:3]:
        trainer, _ = fit(
            pl.Trainer, ModelCheckpoint("x", **settings), max_epochs=4, ckpt_path=path, **options
        )
        assert (trainer.global_step, trainer.current_epoch) == (24, 4)


def test_hookline_s_own_trainer_resumes_from_the_file() -> None:
    class Notes(hookline.Hook):
        def on_train_start(self, module: Any, step: int) -> None:
            self.step, self.weights = step, {name: each.clone() for name, each in module.state_dict().items()}

    fit(Trainer, ModelCheckpoint("kept", save_top_k=-1, filename="{epoch}"))
    trainer = hookline.Trainer(
        max_epochs=3, logger=False, enable_progress_bar=False, hooks=(notes := Notes())
    )
    trainer.fit(Model(), resume="kept/epoch=0.ckpt")
    saved = read("kept/epoch=0.ckpt")["state_dict"]
    assert notes.step == 6 and all(torch.equal(notes.weights[name], each) for name, each in saved.items())
    assert (trainer.global_step, trainer.state.epochs_seen) == (18, 3)


# ---- ckpt_path ---------------------------------------------------------------------------------------------------


def test_best_is_the_best_path_of_the_callback_and_the_older_wins_a_tie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("score", 1.0)

    monkeypatch.setattr(Model, "validation_step", validation_step)
    chosen = []
    for kind in (pl.Trainer, Trainer):
        folder = Path(kind.__module__.partition(".")[0], "deep").absolute()
        trainer, _ = fit(kind, ModelCheckpoint(folder, monitor="score", save_top_k=-1, filename="{epoch}"))
        trainer.validate(ckpt_path="best", verbose=False)
        chosen.append(Path(trainer.ckpt_path).name)
        trainer.validate(Model(), verbose=False)
        assert trainer.ckpt_path is None
        trainer.predict(dataloaders=data(2))  # without a model: the best
        assert Path(trainer.ckpt_path) == folder / chosen[-1]
    assert chosen == ["epoch=0.ckpt", "epoch=0.ckpt"]


@BOTH
def test_best_without_a_monitor_is_the_newest(kind: Any) -> None:
    trainer, model = fit(kind, ModelCheckpoint("kept", filename="{epoch}"))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        model.layer.weight.zero_()
    trainer.validate(model, ckpt_path="best", verbose=False)
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in before.items())


@BOTH
def test_a_path_or_a_model_that_is_missing_is_the_same_error(kind: Any) -> None:
    for stage in ("validate", "test", "predict"):
        trainer = kind(logger=False, enable_checkpointing=False, enable_progress_bar=False, fast_dev_run=1)
        assert trainer.fast_dev_run is True
        with pytest.raises(TypeError):
            getattr(trainer, stage)()
        with pytest.raises(FileNotFoundError):
            getattr(trainer, stage)(BoringModel(), ckpt_path="nowhere.ckpt")


@BOTH
def test_a_best_checkpoint_that_does_not_exist_is_an_error_that_says_why(kind: Any) -> None:
    trainer, model = fit(kind, max_epochs=1, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r'ckpt_path="best".*(no ModelCheckpoint|not configured)'):
        trainer.validate(model, ckpt_path="best")
    trainer, model = fit(kind, ModelCheckpoint("none", save_top_k=0), max_epochs=1)
    with pytest.raises(ValueError, match="no best_model_path|not configured to save"):
        trainer.validate(model, ckpt_path="best")
    trainer, model = fit(kind, fast_dev_run=True)
    with pytest.raises(ValueError, match="fast_dev_run=True"):
        trainer.validate(model, ckpt_path="best")
    with pytest.raises(ValueError, match="has no hpc_ckpt|no HPC checkpoint"):
        trainer.validate(model, ckpt_path="hpc")


@BOTH
def test_last_is_the_newest_last_file_and_begins_anew_without_one(kind: Any) -> None:
    trainer, _ = fit(kind, ModelCheckpoint("kept", save_last=True), max_epochs=1, ckpt_path="last")
    assert trainer.ckpt_path is None and trainer.global_step == 6
    trainer, _ = fit(kind, ModelCheckpoint("kept", save_last=True), max_epochs=2, ckpt_path="last")
    assert Path(trainer.ckpt_path) == Path("kept/last.ckpt").absolute() and trainer.global_step == 12


@BOTH
def test_hpc_is_the_highest_number_in_the_root_directory(kind: Any) -> None:
    trainer, model = fit(kind, max_epochs=1, enable_checkpointing=False)
    for number in (1, 11, 2):
        trainer.save_checkpoint(f"root/hpc_ckpt_{number}.ckpt")
    trainer.validate(model, ckpt_path="hpc", verbose=False)
    assert Path(trainer.ckpt_path).name == "hpc_ckpt_11.ckpt"


@BOTH
def test_the_path_can_be_set_on_the_trainer(kind: Any) -> None:
    trainer, model = fit(kind, max_epochs=1, enable_checkpointing=False)
    trainer.save_checkpoint("one.ckpt")
    trainer.ckpt_path = "one.ckpt"
    with torch.no_grad():
        model.layer.weight.zero_()
    trainer.validate(model, verbose=False)
    assert trainer.ckpt_path == "one.ckpt" and model.layer.weight.abs().sum() > 0


def test_a_registry_is_refused() -> None:
    trainer, model = fit(max_epochs=1, enable_checkpointing=False)
    with pytest.raises(ValueError, match="no model registry"):
        trainer.validate(model, ckpt_path="registry:mine")


@BOTH
def test_a_fit_refuses_weights_alone_and_more_epochs_than_it_trains(kind: Any) -> None:
    fit(kind, ModelCheckpoint("weights", save_weights_only=True), max_epochs=1)
    with pytest.raises(KeyError, match="no optimizer state to resume from|contains only the model"):
        fit(kind, ckpt_path="weights/epoch=0-step=6.ckpt")
    trainer, _ = fit(kind, enable_checkpointing=False)
    trainer.save_checkpoint("three.ckpt")
    message = r"saved after 3 epochs|restored a checkpoint with current_epoch=3"
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=message):
        fit(kind, max_epochs=1, ckpt_path="three.ckpt")


# ---- save_checkpoint ---------------------------------------------------------------------------------------------


@BOTH
def test_save_checkpoint_has_written_the_file_when_it_returns(kind: Any) -> None:
    class Saves(pl.Callback):
        def __init__(self) -> None:
            self.saved: list[tuple[str, int]] = []

        def save(self, trainer: Any, name: str) -> None:
            trainer.save_checkpoint(f"{name}.ckpt")
            self.saved.append((name, read(f"{name}.ckpt")["global_step"]))

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "start")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            self.save(trainer, "batch")

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            self.save(trainer, "backward")

        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "validation")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "end")

    trainer, model = fit(
        kind, callback := Saves(), max_epochs=1, limit_train_batches=2, enable_checkpointing=False
    )
    steps = [("backward", 0), ("batch", 1), ("backward", 1), ("batch", 2)]
    assert callback.saved == [("start", 0), *steps, ("validation", 2), ("end", 2)]
    trainer.save_checkpoint("after.ckpt", weights_only=True)
    entries = read("after.ckpt")
    assert (entries["epoch"], entries["global_step"]) == (1, 2)
    assert not {"optimizer_states", "callbacks", "hookline"} & entries.keys()
    trainer.save_checkpoint(Path("deep/er/after.ckpt"))
    assert read("deep/er/after.ckpt")["optimizer_states"]


@BOTH
def test_before_a_run_there_is_nothing_to_save(kind: Any) -> None:
    with pytest.raises(AttributeError, match="nothing to save|a model is attached"):
        make(kind).save_checkpoint("none.ckpt")
    assert not Path("none.ckpt").exists()


def test_saves_at_the_start_of_an_epoch_and_in_a_validation_can_be_resumed_from() -> None:
    class Saves(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(f"epoch-{trainer.current_epoch}.ckpt")

        def on_validation_batch_end(self, trainer: Any, *given: Any) -> None:
            trainer.save_checkpoint(f"validation-{trainer.current_epoch}.ckpt")

    whole = fit(Trainer, Saves())
    for path in sorted(Path().glob("epoch-*.ckpt")):
        assert_same(whole, fit(Trainer, seed=9, ckpt_path=path))
    files = sorted(Path().glob("validation-*.ckpt"))
    assert len(files) == 3
    for path in files:  # the validation is repeated, with other random numbers after it
        resumed = fit(Trainer, seed=9, ckpt_path=path)[0]
        assert (resumed.global_step, resumed.current_epoch) == (18, 3)


# ---- hooks and contents ------------------------------------------------------------------------------------------


@BOTH
def test_hooks_see_and_edit_the_entries_of_lightning(kind: Any) -> None:
    seen: list[Any] = []

    class Edits(pl.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            seen.append(("callback", sorted(checkpoint)))
            checkpoint["by callback"] = [1, {"a": 2}]

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            seen.append(("load", checkpoint["by callback"], sorted(checkpoint["callbacks"])))

        def state_dict(self) -> dict[str, Any]:
            return {"n": 5}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            seen.append(state)

    class Renames(Model):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            seen.append(("module", "by callback" in checkpoint, len(checkpoint["lr_schedulers"])))
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {f"old.{name}": each for name, each in weights.items()}

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.removeprefix("old."): each for name, each in weights.items()}

    pl.seed_everything(1, verbose=False)
    trainer, model = make(kind, Edits(), max_epochs=1, enable_checkpointing=False), Renames()
    trainer.fit(model)
    trainer.save_checkpoint("edited.ckpt")
    names = [
        *("callbacks", "epoch", "global_step", "hparams_name", "hyper_parameters", "loops"),
        *("lr_schedulers", "optimizer_states", "pytorch-lightning_version", "state_dict"),
    ]
    assert seen == [("callback", names), ("module", True, 1)]
    assert all(name.startswith("old.") for name in read("edited.ckpt")["state_dict"])
    seen.clear()
    again = Renames()
    make(kind, Edits(), max_epochs=2, limit_train_batches=1, enable_checkpointing=False).fit(
        again, ckpt_path="edited.ckpt"
    )
    assert seen[:2] == [("load", [1, {"a": 2}], [Edits.__qualname__]), {"n": 5}]
    assert torch.equal(Renames.load_from_checkpoint("edited.ckpt").layer.weight, model.layer.weight)


@BOTH
def test_a_data_module_has_its_state_and_its_arguments_in_the_file(kind: Any) -> None:
    class Data(pl.LightningDataModule):
        def __init__(self, path: str) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.loaded: list[Any] = []

        def train_dataloader(self) -> Any:
            return data(4)

        def val_dataloader(self) -> Any:
            return data(2)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded.append(state)

    trainer = make(kind, max_epochs=1, enable_checkpointing=False)
    trainer.fit(Model(), datamodule=Data("here"))
    trainer.save_checkpoint("data.ckpt")
    entries = read("data.ckpt")
    assert entries["datamodule_hyper_parameters"] == {"path": "here"}
    assert entries[Data.__qualname__] == {"seen": 3}
    again = Data("there")
    make(kind, max_epochs=2, enable_checkpointing=False).fit(Model(), datamodule=again, ckpt_path="data.ckpt")
    assert again.loaded == [{"seen": 3}]
    assert Data.load_from_checkpoint("data.ckpt").hparams["path"] == "here"


class Colour(Enum):
    RED = "red"


def test_no_object_is_pickled_and_a_warning_names_once_what_is_left_out() -> None:
    class Keeps(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"colour": Colour.RED, "made": lambda: 0, "at": Path("a/b")}

    trainer, model = make(Trainer, Keeps(), max_epochs=1, enable_checkpointing=False), Model(extra=nn.ReLU())
    trainer.fit(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.save_checkpoint("plain.ckpt")
    entries = read("plain.ckpt")
    assert entries["callbacks"][Keeps().state_key] == {"colour": "red", "at": "a/b"}
    assert entries["hyper_parameters"] == {"lr": 0.01, "width": 2}
    text = "".join(str(each.message) for each in found if each.category is UserWarning)
    assert text.count("hyper_parameters.extra (a torch.nn.modules.activation.ReLU)") == 1


# ---- a process that is killed ------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, io
import torch
from interop.test_lightning_checkpoints import fit, one_file
from hookline.interop.lightning import Trainer

def end(): os.kill(os.getpid(), signal.SIGKILL)

at, saves = sys.argv[1], 0
whole, renamed = torch.save, os.replace
def save(file, opened):
    global saves
    saves += 1
    if saves == 3 and at == "write":
        buffer = io.BytesIO()
        whole(file, buffer)
        opened.write(buffer.getvalue()[:2000])
        opened.flush()
        end()
    whole(file, opened)
def replace(*given):
    if saves == 3 and at == "rename": end()
    renamed(*given)
    if saves == 3 and at == "renamed": end()
torch.save, os.replace = save, replace
fit(Trainer, one_file())
"""


def one_file() -> ModelCheckpoint:
    return ModelCheckpoint("kept", "only", every_n_train_steps=6, enable_version_counter=False)


@pytest.mark.parametrize("at", ["write", "rename", "renamed"])
def test_a_kill_during_the_write_leaves_a_whole_file_and_the_resume_is_bit_exact(at: str) -> None:
    killed = preloaded.run([sys.executable, "-c", KILLED, at], env=environment(), capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    steps = 18 if at == "renamed" else 12
    assert read("kept/only.ckpt")["global_step"] == steps
    assert len(os.listdir("kept")) == (1 if at == "renamed" else 2)  # the file, and a hidden one
    resumed = fit(Trainer, one_file(), seed=8, max_epochs=4, ckpt_path="kept/only.ckpt")
    assert_same(fit(Trainer, max_epochs=4, enable_checkpointing=False), resumed)
    assert os.listdir("kept") == ["only.ckpt"]


class Sums(pl.LightningModule):
    """A model whose gradient is the mean of its batches, and which keeps the gradient of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer.weight * batch).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.layer.weight.grad is not None
        self.gradients.append(round(self.layer.weight.grad.item(), 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(1.0, 11.0), batch_size=1)


class SumsByHand(Sums):
    """Updates after every third batch itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class SavesAt(pl.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.current_epoch == 0:
            trainer.save_checkpoint("window.ckpt")


@pytest.mark.parametrize("model", [Sums, SumsByHand])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_resume_continues_an_open_accumulation_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, model: type[Sums]
) -> None:
    monkeypatch.chdir(tmp_path)
    windows = {"accumulate_grad_batches": 3} if model.automatic_optimization else {}
    whole, resumed = model(), model()
    make(Trainer, SavesAt(batch), max_epochs=1, **windows).fit(whole)
    make(Trainer, max_epochs=1, **windows).fit(resumed, ckpt_path="window.ckpt")
    assert resumed.gradients == whole.gradients[batch == 2 :]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.parametrize(("batch", "updates"), [(4, 7), (5, 6), (9, 4)])
def test_a_file_that_lightning_saved_inside_a_window_gives_as_many_updates_as_in_lightning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    batch: int,
    updates: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"max_epochs": 2, "accumulate_grad_batches": 3}
    make(pl.Trainer, SavesAt(batch), **options).fit(Sums())
    theirs, ours, native = Sums(), Sums(), Sums()
    make(pl.Trainer, **options).fit(theirs, ckpt_path="window.ckpt")
    make(Trainer, **options).fit(ours, ckpt_path="window.ckpt")
    hookline.Trainer(**options, logger=False, enable_progress_bar=False, checkpoint=False).fit(
        native, resume="window.ckpt"
    )
    assert [len(each.gradients) for each in (theirs, ours, native)] == [updates] * 3
    assert ("saved inside an accumulation window" in caplog.text) == (batch == 4)
