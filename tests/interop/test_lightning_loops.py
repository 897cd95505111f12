"""Hookline's trainer under Lightning's name against Lightning's own: every call of a hook, in its order, and
what the trainer shows in it.
"""

from __future__ import annotations

import functools
import inspect
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import hookline
import hookline.interop.lightning as dialect

Calls = list[tuple[Any, ...]]
calls: Calls = []
"""The calls of the run that is being recorded."""
shown: list[Any] = []
"""The trainer whose attributes are recorded with each call, if there is one."""


def record(who: str, method: str) -> None:
    calls.append((who, method, *(facts(shown[0], method) if shown else ())))


def recording(who: str, base: type[Any], methods: list[str]) -> type[Any]:
    """Return a subclass whose methods record themselves. They have real signatures, which both trainers read."""
    made: dict[str, Any] = {}
    for method in methods:
        original = getattr(base, method)
        parameters = list(inspect.signature(original).parameters.values())[1:]
        stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        passed = [stars.get(each.kind, "") + each.name for each in parameters]
        takes = [
            text + ("=None" if each.default is not each.empty else "")
            for text, each in zip(passed, parameters, strict=True)
        ]
        space = {"original": original, "record": record}
        source = (
            f"def {method}({', '.join(['self', *takes])}):\n"
            f"    record({who!r}, {method!r})\n"
            f"    return original({', '.join(['self', *passed])})\n"
        )
        exec(source, space)
        made[method] = space[method]
    return type(base.__name__, (base,), made)


class Steps(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 10), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 4), batch_size=2)

    def test_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 4), batch_size=2)

    def predict_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 4), batch_size=2)


def public(*owners: type[Any]) -> list[str]:
    return [
        name
        for owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("_") and inspect.isfunction(value)
    ]


OPTIMIZATION = ["backward", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping"]
STEPS = ["configure_optimizers", "training_step", "validation_step", "test_step", "predict_step", "forward"]
RecordedModel = recording(
    "module",
    Steps,
    [
        *(
            each
            for each in public(ModelHooks, DataHooks, CheckpointHooks)
            if each != "configure_sharded_model"
        ),
        "configure_callbacks",
        *OPTIMIZATION,
        *STEPS,
    ],
)
RecordedCallback = recording("callback", pl.Callback, public(pl.Callback))
RecordedData = recording(
    "data", Data, [*public(DataHooks), *public(Data), "setup", "teardown", "on_exception"]
)


class StopsAt2(pl.Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            trainer.should_stop = True


class RaisesAt2(pl.Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            raise RuntimeError("as planned")


CASES: dict[str, dict[str, Any]] = {
    "two epochs": {"max_epochs": 2},
    "accumulated": {"max_epochs": 2, "accumulate_grad_batches": 2},
    "manual": {"max_epochs": 2, "manual": True},
    "no sanity check": {"max_epochs": 2, "num_sanity_val_steps": 0},
    "validation every 2 epochs": {"max_epochs": 4, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 2},
    "validation every 2 batches": {"max_epochs": 2, "val_check_interval": 2},
    "validation across epochs": {"max_epochs": 2, "val_check_interval": 7, "check_val_every_n_epoch": None},
    "clipped": {"max_epochs": 1, "gradient_clip_val": 1.0},
    "max_steps in the first epoch": {"max_steps": 3},
    "max_steps in the second epoch": {"max_steps": 7},
    "reloaded every 2 epochs": {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2},
    "reloaded every epoch": {
        "max_epochs": 3,
        "reload_dataloaders_every_n_epochs": 1,
        "check_val_every_n_epoch": 2,
    },
    "stopped": {"max_epochs": 3, "callbacks": [StopsAt2]},
    "stopped, but at least 2 epochs": {"max_epochs": 3, "min_epochs": 2, "callbacks": [StopsAt2]},
    "stopped, but at least 4 steps": {"max_epochs": 3, "min_steps": 4, "callbacks": [StopsAt2]},
    "stopped, but at least 7 steps": {"max_epochs": 3, "min_steps": 7, "callbacks": [StopsAt2]},
    "no training batches": {"max_epochs": 1, "limit_train_batches": 0},
    "no validation batches": {"max_epochs": 1, "limit_val_batches": 0},
    "no epochs": {"max_epochs": 0},
    "fast_dev_run": {"fast_dev_run": True},
    "fit again": {"max_epochs": 2, "again": 3},
    "fit again in vain": {"max_epochs": 2, "again": 2},
    "fit again after a stop": {"max_epochs": 2, "again": 3, "callbacks": [StopsAt2]},
    "validate": {"stage": "validate"},
    "test": {"stage": "test"},
    "predict": {"stage": "predict"},
    "validate nothing": {"stage": "validate", "limit_val_batches": 0},
    "test nothing": {"stage": "test", "limit_test_batches": 0},
    "predict nothing": {"stage": "predict", "limit_predict_batches": 0},
}


def run(kind: type[Any], name: str) -> Any:
    """Train, record every call and what the trainer shows in it, and return the trainer."""
    options = {"stage": "fit", "again": None, "callbacks": [], "manual": False, **CASES[name]}
    stage, again, others = options.pop("stage"), options.pop("again"), options.pop("callbacks")
    pl.seed_everything(1, verbose=False)
    model = RecordedModel()
    model.automatic_optimization = not options.pop("manual")
    data = RecordedData()
    trainer = kind(
        **options,
        callbacks=[RecordedCallback(), *(each() for each in others)],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    calls.clear()
    shown[:] = [trainer]
    try:
        getattr(trainer, stage)(model, datamodule=data)
        if again is not None:
            trainer.fit_loop.max_epochs = again
            trainer.fit(model, datamodule=data)
    finally:
        shown.clear()
    return trainer


@dataclass(frozen=True)
class Recorded:
    """A run: its calls with what the trainer shows in them, and what it shows afterwards."""

    calls: Calls
    limits: tuple[Any, ...]
    progress: tuple[Any, ...]


@functools.cache
def both(name: str) -> tuple[Recorded, Recorded]:
    """Lightning's run and Hookline's. Several tests look at them."""
    found = []
    for kind in (pl.Trainer, dialect.Trainer):
        trainer = run(kind, name)
        progress = () if trainer.fast_dev_run else progress_of(trainer)
        found.append(Recorded(list(calls), limits(trainer), progress))
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_all_hooks_are_called_in_lightnings_order(name: str) -> None:
    theirs, ours = ([call[:2] for call in each.calls] for each in both(name))
    assert len(theirs) >= 10
    assert ours == theirs


@pytest.mark.filterwarnings("ignore")
def test_a_failure_calls_the_same_hooks() -> None:
    CASES["failing"] = {"max_epochs": 1, "callbacks": [RaisesAt2]}
    try:
        found = []
        for kind in (pl.Trainer, dialect.Trainer):
            with pytest.raises(RuntimeError, match="as planned"):
                run(kind, "failing")
            found.append(list(calls))
    finally:
        del CASES["failing"]
    theirs, ours = found
    assert ours == theirs


# ---- what the trainer shows in each hook


def tracker(progress: Any) -> tuple[int, ...]:
    return progress.ready, progress.started, progress.processed, progress.completed


BETWEEN = ("on_validation_model_zero_grad", "val_dataloader")
"""Calls before a validation, which Hookline's trainer makes while it is still training."""
IN_BATCHES = ("on_train_batch_start", "training_step", "on_train_batch_end", "on_train_epoch_end")


def facts(trainer: Any, method: str) -> tuple[Any, ...]:
    if method in BETWEEN:
        return trainer.current_epoch, trainer.global_step, trainer.sanity_checking
    if method in IN_BATCHES:
        return trainer.is_last_batch, *progress_of(trainer), trainer.current_epoch, trainer.global_step
    return (
        trainer.current_epoch,
        trainer.global_step,
        trainer.training,
        trainer.sanity_checking,
        trainer.evaluating,
    )


def progress_of(trainer: Any) -> tuple[Any, ...]:
    loop = trainer.fit_loop
    return (
        tracker(loop.epoch_loop.batch_progress.total),
        tracker(loop.epoch_loop.batch_progress.current),
        tracker(loop.epoch_progress.current),
        loop.epoch_loop.total_batch_idx,
        loop.epoch_loop.batch_idx,
        loop.epoch_loop.global_step,
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps,
    )


def limits(trainer: Any) -> tuple[Any, ...]:
    return (
        trainer.max_epochs,
        trainer.min_epochs,
        trainer.max_steps,
        trainer.min_steps,
        trainer.num_training_batches,
        list(trainer.num_val_batches),
        list(trainer.num_sanity_val_batches),
        list(trainer.num_test_batches),
        list(trainer.num_predict_batches),
        trainer.check_val_every_n_epoch,
        trainer.val_check_batch,
        trainer.accumulate_grad_batches,
        trainer.should_stop,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_shows_the_same_in_every_hook(name: str) -> None:
    theirs, ours = both(name)
    assert ours.calls == theirs.calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, each in CASES.items() if "stage" not in each])
def test_limits_and_progress_after_a_fit(name: str) -> None:
    theirs, ours = both(name)
    assert ours.limits == theirs.limits
    assert ours.progress == theirs.progress


@pytest.mark.parametrize("options", [{}, {"max_epochs": 3}, {"max_steps": 5}, {"min_steps": 2}])
def test_limits_before_a_fit(options: dict[str, Any]) -> None:
    kinds = (dialect.Trainer, pl.Trainer)
    ours, theirs = (kind(**options, logger=False, enable_progress_bar=False) for kind in kinds)
    assert limits(ours) == limits(theirs)


# ---- further behaviour of the loops


def quiet(kind: type[Any], **options: Any) -> Any:
    off = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return kind(**{**off, **options})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_epochs": 3, "max_steps": 7},
        {"max_steps": 7},
        {"max_epochs": -1},
        {"max_epochs": 0},
        {"max_epochs": 2, "limit_train_batches": 0.5},
        {"fast_dev_run": 2},
        {},
    ],
    ids=str,
)
def test_the_estimated_number_of_updates_is_lightnings(options: dict[str, Any]) -> None:
    found: list[Any] = []

    class Estimates(BoringModel):
        def configure_optimizers(self) -> Any:
            found.append(self.trainer.estimated_stepping_batches)
            self.trainer.should_stop = True
            return super().configure_optimizers()

        def on_train_start(self) -> None:
            found.append((self.trainer.estimated_stepping_batches, self.trainer.max_epochs))
            self.trainer.should_stop = True

    for kind in (pl.Trainer, dialect.Trainer):
        trainer = quiet(kind, **options)
        trainer.fit(Estimates(), DataLoader(RandomDataset(32, 10), batch_size=2))
        found.append(trainer.max_epochs)
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.filterwarnings("ignore")
def test_a_stream_has_infinitely_many_batches() -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield torch.ones(2, 32)

    found = []
    for kind in (pl.Trainer, dialect.Trainer):
        trainer = quiet(kind, max_steps=3)
        trainer.fit(BoringModel(), Endless())
        found.append((trainer.num_training_batches, trainer.global_step, trainer.current_epoch))
    assert found[0] == found[1] == (float("inf"), 3, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batches", [1, 0.5])
def test_overfitting_a_loader_of_another_class(batches: float) -> None:
    class Own:
        def __iter__(self) -> Any:
            return iter(torch.full((2, 32), float(number)) for number in range(4))

        def __len__(self) -> int:
            return 4

    class Notes(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found.append(batch[0, 0].item())
            return super().training_step(batch, batch_idx)

    seen = []
    for kind in (pl.Trainer, dialect.Trainer):
        found: list[float] = []
        quiet(kind, max_epochs=2, overfit_batches=batches).fit(Notes(), Own(), Own())
        seen.append(found)
    assert seen[0] == seen[1]
    assert seen[0] == ([0.0, 0.0] if batches == 1 else [0.0, 1.0] * 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interval", [{"seconds": 0.001}, "00:00:00:00"])
def test_a_validation_interval_in_seconds(interval: Any) -> None:
    trainer = quiet(
        dialect.Trainer, max_epochs=1, val_check_interval=interval, callbacks=[validations := Counts()]
    )
    trainer.fit(Slow(), DataLoader(RandomDataset(32, 6), batch_size=2), DataLoader(RandomDataset(32, 2)))
    assert validations.number == 3


@pytest.mark.filterwarnings("ignore")
def test_a_long_validation_interval_in_seconds_is_not_reached() -> None:
    keep = pl.callbacks.ModelCheckpoint("kept")  # it saves after validations only
    trainer = quiet(
        dialect.Trainer,
        max_epochs=2,
        val_check_interval="00:01:00:00",
        enable_checkpointing=True,
        callbacks=[validations := Counts(), keep],
    )
    trainer.fit(Slow(), DataLoader(RandomDataset(32, 6), batch_size=2), DataLoader(RandomDataset(32, 2)))
    assert validations.number == 0 and keep.best_model_path == ""


def test_a_misspelled_time_is_refused() -> None:
    with pytest.raises(Exception, match="DD:HH:MM:SS"):
        dialect.Trainer(val_check_interval="1 hour")


class Counts(pl.Callback):
    number = 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.number += not trainer.sanity_checking


class Slow(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_modes_of_submodules_are_restored_after_a_validation() -> None:
    class Frozen(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).eval()

        def on_validation_start(self) -> None:
            assert not self.layer.training
            assert not self.part.training

        def on_train_epoch_end(self) -> None:
            modes.append([each.training for each in self.modules()])

    found = []
    for kind in (pl.Trainer, dialect.Trainer):
        modes: list[list[bool]] = []
        quiet(kind, max_epochs=2, limit_train_batches=2, limit_val_batches=1).fit(Frozen())
        found.append(modes)
    assert found[0] == found[1]
    assert found[0][0] == [True, True, False, False, False]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [pl.Trainer, dialect.Trainer])
def test_a_resumed_run_begins_at_the_next_epoch(kind: type[Any], tmp_path: Any) -> None:
    class Notes(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found.append((trainer.current_epoch, trainer.global_step))

        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            found.append("sanity check")

    found: list[Any] = []
    data = {
        "train_dataloaders": DataLoader(RandomDataset(32, 6), batch_size=2),
        "val_dataloaders": DataLoader(RandomDataset(32, 2)),
    }
    saves = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", save_top_k=-1, filename="{epoch}")
    first = quiet(kind, max_epochs=2, callbacks=[saves, Notes()], enable_checkpointing=True)
    first.fit(BoringModel(), **data)
    again = quiet(kind, max_epochs=4, callbacks=[Notes()])
    again.fit(BoringModel(), **data, ckpt_path=saves.best_model_path)
    assert found == ["sanity check", (0, 0), "sanity check", (2, 6)]
    assert (again.current_epoch, again.global_step) == (4, 12)


@pytest.mark.filterwarnings("ignore")
def test_hooklines_own_trainer_shows_the_progress_to_callbacks_too() -> None:
    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            loop = trainer.fit_loop.epoch_loop
            found.append((loop.total_batch_idx, loop.batch_idx, tracker(loop.batch_progress.current)))

    found: list[Any] = []
    trainer = hookline.Trainer(max_epochs=2, hooks=[Notes()], logger=False, enable_progress_bar=False)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 4), batch_size=2))
    ready = [(1, 1, 1, 0), (2, 2, 2, 1)]
    assert found == [(0, 0, ready[0]), (1, 1, ready[1]), (2, 0, ready[0]), (3, 1, ready[1])]


@pytest.mark.filterwarnings("ignore")
def test_losses_of_an_accumulation_window_are_divided_where_lightning_divides_them() -> None:
    class Losses(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, float]] = []

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            self.seen.append(("backward", float(loss)))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
            self.seen.append(("end", float(outputs["loss"])))

    found = []
    for kind in (pl.Trainer, dialect.Trainer):
        pl.seed_everything(3, verbose=False)
        options: dict[str, Any] = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        trainer = kind(
            **options,
            max_epochs=1,
            limit_train_batches=5,
            accumulate_grad_batches=2,
            callbacks=(c := Losses()),
        )
        trainer.fit(BoringModel())
        found.append(c.seen)
    assert found[0] == found[1] and len(found[0]) == 10


class Fails(BoringModel):
    """Fails in a training or validation batch of its second epoch."""

    def __init__(self, stage: str, batch: int) -> None:
        super().__init__()
        self.where = (stage, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and self.where == ("train", batch_idx):
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:  # type: ignore
        if self.current_epoch == 1 and self.where == ("val", 2 * dataloader_idx + batch_idx):
            raise ZeroDivisionError
        return super().validation_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return [super(Fails, self).val_dataloader() for _ in range(2)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage, batch", [("train", 1), ("train", 2), ("val", 1), ("val", 3)])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_checkpoint_of_a_failed_run_has_the_progress_of_lightnings_loops(
    stage: str, batch: int, accumulate: int, tmp_path: Any
) -> None:
    states = []
    for trainer in (pl.Trainer, dialect.Trainer):
        folder = tmp_path / trainer.__module__  # the callback resumes a fit whose file is there
        made: Any = trainer(
            default_root_dir=folder,
            max_epochs=3,
            limit_train_batches=3,
            limit_val_batches=2,
            accumulate_grad_batches=accumulate,
            callbacks=pl.callbacks.OnExceptionCheckpoint(folder),
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
        )
        with pytest.raises(ZeroDivisionError):
            made.fit(Fails(stage, batch))
        state = torch.load(folder / "on_exception.ckpt", weights_only=True)["loops"]["fit_loop"]
        assert made.fit_loop.state_dict() == state or trainer is pl.Trainer
        progress = made.fit_loop.epoch_loop.scheduler_progress
        assert progress.total.completed == state["epoch_loop.scheduler_progress"]["total"]["completed"]
        del state["epoch_loop.state_dict"]  # the step of loggers, which each counts in its own way
        if stage == "val":  # Lightning counts an epoch's update of schedulers before its validation, too
            del state["epoch_loop.scheduler_progress"]
        states.append(state)
    assert states[1] == states[0]
