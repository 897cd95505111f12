"""Every callback of Lightning with the dialect's trainer, and the arguments that add them, against Lightning's trainer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset, RandomIterableDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

import hookline
from hookline.interop.lightning import Trainer

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
TRAINERS = (pl.Trainer, Trainer)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_epochs": 2}


class Model(BoringModel):
    """A model with a backbone with batch norm; its data is the same in every call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        self.layer = nn.Linear(32, 2)
        self.data = RandomDataset(32, 16)

    def forward(self, x: Any) -> Any:
        return self.layer(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", loss := self.loss(self(batch)), prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.current_epoch))

    def _loader(self) -> Any:
        return DataLoader(self.data, batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    def configure_optimizers(self) -> Any:
        parameters = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def fitted(kind: Any, made: Callable[[], Any], tmp_path: Path, **options: Any) -> tuple[Any, Any, Model]:
    callback, model = made(), Model()
    where = tmp_path / kind.__module__
    trainer = kind(**{**QUIET, "callbacks": callback, "default_root_dir": where, **options})
    trainer.fit(model)
    return callback, trainer, model


def weights(model: Model) -> Any:
    return {name: each.clone() for name, each in model.state_dict().items()}


class Bar(theirs.TQDMProgressBar):
    """A progress bar of a user."""

    shown: dict[str, Any]

    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        self.shown = {**super().get_metrics(trainer, pl_module), "mine": 1}
        return self.shown


CALLBACKS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], dict[str, Any]]] = {
    "EarlyStopping": (
        lambda: theirs.EarlyStopping("score", patience=0),
        lambda each: (each.stopped_epoch, float(each.best_score), each.wait_count),
        {"max_epochs": 5},
    ),
    "ModelCheckpoint": (
        lambda: theirs.ModelCheckpoint(monitor="score", mode="max"),
        lambda each: (Path(each.best_model_path).name, float(each.best_model_score)),
        {},
    ),
    "LearningRateMonitor": (lambda: theirs.LearningRateMonitor(), lambda each: each.lrs, {"logger": True}),
    "Timer": (lambda: theirs.Timer("00:01:00:00"), lambda each: each.time_elapsed("validate") > 0, {}),
    "TQDMProgressBar": (
        Bar,
        lambda each: (sorted(each.shown), each.train_progress_bar.n, each.val_progress_bar.total),
        {"enable_progress_bar": True},
    ),
    "RichProgressBar": (
        theirs.RichProgressBar,
        lambda each: each.train_progress_bar_id is not None,
        {"enable_progress_bar": True},
    ),
    "ModelSummary": (
        lambda: theirs.ModelSummary(max_depth=2),
        lambda each: each._max_depth,
        {"enable_model_summary": True},
    ),
    "GradientAccumulationScheduler": (
        lambda: theirs.GradientAccumulationScheduler({0: 2, 1: 4}),
        lambda each: each.scheduling,
        {},
    ),
    "StochasticWeightAveraging": (
        lambda: theirs.StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_epochs=1),
        lambda each: int(each.n_averaged),
        {"max_epochs": 5},
    ),
    "DeviceStatsMonitor": (lambda: theirs.DeviceStatsMonitor(), lambda each: None, {"logger": True}),
    "LambdaCallback": (lambda: theirs.LambdaCallback(), lambda each: None, {}),
    "BackboneFinetuning": (
        lambda: theirs.BackboneFinetuning(1, initial_denom_lr=10.0),
        lambda each: each.previous_backbone_lr,
        {"max_epochs": 3},
    ),
    "SpikeDetection": (lambda: SpikeDetection(warmup=1, atol=1e9), lambda each: len(each.bad_batches), {}),
    "ThroughputMonitor": (
        lambda: theirs.ThroughputMonitor(len, window_size=2),
        lambda each: dict(each._samples),
        {"logger": True, "log_every_n_steps": 2},
    ),
    "WeightAveraging": (
        lambda: theirs.WeightAveraging(),
        lambda each: int(each._average_model.n_averaged),
        {},
    ),
    "ModelPruning": (lambda: theirs.ModelPruning("l1_unstructured", amount=0.25), lambda each: None, {}),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_does_the_same(name: str, tmp_path: Path) -> None:
    make, read, options = CALLBACKS[name]
    results = []
    for kind in TRAINERS:
        logger = {"logger": CSVLogger(tmp_path / kind.__module__)} if options.get("logger") else {}
        callback, trainer, model = fitted(kind, make, tmp_path, **{**options, **logger})
        assert callback in trainer.callbacks
        results.append((read(callback), trainer.global_step, trainer.current_epoch, weights(model)))
    *first, kept = results[0]
    *second, ours = results[1]
    assert first == second
    assert kept.keys() == ours.keys()
    for each in kept:
        torch.testing.assert_close(kept[each], ours[each], msg=each)


@pytest.mark.parametrize(
    "name", ["StochasticWeightAveraging", "ThroughputMonitor", "TQDMProgressBar", "RichProgressBar"]
)
def test_callbacks_that_use_lightnings_loops_run_in_hooklines_trainer(name: str, tmp_path: Path) -> None:
    make, _, options = CALLBACKS[name]
    logger = {"logger": CSVLogger(tmp_path)} if options.get("logger") else {}
    *_, theirs_trained = fitted(pl.Trainer, make, tmp_path, **{**options, **logger})
    ours, epochs = Model(), options.get("max_epochs", 2)
    hookline.Trainer(hooks=[make()], max_epochs=epochs, logger=False, enable_progress_bar=False).fit(ours)
    for key, value in weights(theirs_trained).items():
        torch.testing.assert_close(weights(ours)[key], value, msg=key)


def test_the_epoch_that_only_measures_batch_norm_shows_its_losses(tmp_path: Path) -> None:
    shown = []
    for kind in TRAINERS:
        losses: list[Any] = []
        keep = theirs.LambdaCallback(
            on_train_batch_end=lambda trainer, module, outputs, *_, to=losses: to.append(  # type: ignore[misc]
                (trainer.current_epoch, outputs["loss"].item(), outputs["loss"].requires_grad)
            )
        )
        average = theirs.StochasticWeightAveraging(1e-2, swa_epoch_start=1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fitted(kind, lambda: [average, keep], tmp_path, limit_val_batches=0)  # noqa: B023
        assert not [each for each in found if "returned `None`" in str(each.message)]
        shown.append(losses)
    assert len(shown[0]) == 12 and shown[0] == shown[1]


def test_predictions_are_written_with_the_positions_of_their_samples(tmp_path: Path) -> None:
    class Writer(theirs.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.seen: list[Any] = []

        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *given: Any) -> None:
            indices, _, *position = given
            self.seen.append((prediction.shape, list(indices), *position))

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, indices: Any) -> None:
            self.seen.append((len(predictions), indices))

    seen = []
    for kind in TRAINERS:
        writer, model = Writer(), Model()
        model.predict_step = lambda batch, batch_idx: batch  # type: ignore[method-assign]
        trainer = kind(**{**QUIET, "callbacks": writer, "limit_predict_batches": 3})
        assert len(trainer.predict(model)) == 3
        assert trainer.predict(model, return_predictions=False) is None  # the callback gets them all the same
        seen.append(writer.seen)
    assert seen[0] == seen[1] and len(seen[0]) == 8 and seen[0][3] == seen[0][7]


def test_a_failed_fit_leaves_the_checkpoint_of_an_exception(tmp_path: Path) -> None:
    class Failing(Model):
        def on_train_batch_end(self, *given: Any) -> None:
            raise ZeroDivisionError

    for kind in TRAINERS:
        where = tmp_path / kind.__module__
        with pytest.raises(ZeroDivisionError):
            kind(**QUIET, callbacks=theirs.OnExceptionCheckpoint(where)).fit(Failing())
        assert (where / "on_exception.ckpt").exists()


# ---- which callbacks a trainer has -------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "all by default": {"enable_progress_bar": True, "enable_model_summary": True},
    "max_time": {"max_time": {"minutes": 5}},
    "max_time as text": {"max_time": "00:00:05:00", "max_epochs": None},
    "max_time and a Timer": {"max_time": {"minutes": 5}, "callbacks": theirs.Timer()},
    "a bar": {"callbacks": [theirs.TQDMProgressBar()], "enable_progress_bar": True},
    "a summary": {"callbacks": [theirs.ModelSummary(3)], "enable_model_summary": True},
    "checkpoints last": {"callbacks": [theirs.ModelCheckpoint(), theirs.EarlyStopping("score")]},
    "tuners first": {"callbacks": [theirs.Timer(), theirs.LearningRateFinder(), theirs.BatchSizeFinder()]},
    "nothing": {"enable_checkpointing": False},
    "barebones": {
        "barebones": True,
        "enable_progress_bar": None,
        "enable_model_summary": None,
        "logger": None,
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_trainer_has_lightnings_callbacks_in_its_order(name: str) -> None:
    kinds = []
    for kind in TRAINERS:
        trainer = kind(**{**QUIET, **ARGUMENTS[name]})
        kinds.append([type(each).__name__ for each in trainer.callbacks])
        assert trainer.progress_bar_callback in (*trainer.callbacks, None)
    assert kinds[0] == kinds[1]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "two bars": (
        {"callbacks": [theirs.TQDMProgressBar(), Bar()], "enable_progress_bar": True},
        MisconfigurationException,
        "multiple progress bar callbacks",
    ),
    "a bar that is off": (
        {"callbacks": theirs.TQDMProgressBar(), "enable_progress_bar": False},
        MisconfigurationException,
        "enable_progress_bar=False` but found `TQDMProgressBar",
    ),
    "a checkpoint callback that is off": (
        {"callbacks": theirs.ModelCheckpoint(), "enable_checkpointing": False},
        MisconfigurationException,
        "ModelCheckpoint",
    ),
    "two states of one key": (
        {"callbacks": [theirs.Timer(), theirs.Timer()]},
        RuntimeError,
        "several callbacks of the class|more than one",
    ),
    "profiler": ({"profiler": "fast"}, MisconfigurationException, "it can only be one of"),
    "devices": ({"devices": 0}, MisconfigurationException, "is not a valid input"),
    "devices of a CPU": ({"devices": [0], "accelerator": "cpu"}, TypeError, "should be an int > 0"),
    "accelerator": ({"accelerator": "abacus"}, ValueError, "invalid accelerator name"),
    "strategy": ({"strategy": "chess"}, ValueError, "invalid strategy name"),
    "num_nodes": ({"num_nodes": 0}, ValueError, "positive integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_with_lightnings_error(name: str) -> None:
    options, error, text = REFUSED[name]
    for kind in TRAINERS:
        with pytest.raises(error, match=text):
            kind(**{**QUIET, **options})


@pytest.mark.parametrize("name", ["logger", "enable_checkpointing", "detect_anomaly", "fast_dev_run"])
def test_barebones_refuses_what_it_switches_off(name: str) -> None:
    for kind in TRAINERS:
        with pytest.raises(ValueError, match=rf"{name}=True"):
            kind(barebones=True, **{name: True})


@pytest.mark.parametrize(
    "options", [{"max_epochs": -7}, {"limit_val_batches": 1.2}, {"fast_dev_run": -1}], ids=str
)
def test_errors_about_options_are_lightnings_own_too(options: dict[str, Any]) -> None:
    for kind in TRAINERS:
        with pytest.raises(MisconfigurationException):
            kind(**{**QUIET, **options})


def test_a_fraction_of_the_data_that_is_no_batch_is_lightnings_error_too() -> None:
    for kind in TRAINERS:
        with pytest.raises(MisconfigurationException):
            kind(**{**QUIET, "limit_train_batches": 0.001}).fit(Model())


def test_the_sharding_of_the_data_cannot_be_switched_off_with_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Trainer(**QUIET, use_distributed_sampler=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match="use_distributed_sampler=False: Hookline gives each of the 2 processes"
    ):
        Trainer(**QUIET, use_distributed_sampler=False, devices=2)


def test_several_devices_need_torchrun_and_the_error_has_the_command() -> None:
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node=2 .*\.py"):
        Trainer(**QUIET, devices=2, strategy="ddp_spawn")
    assert Trainer(**QUIET, devices=1, strategy="ddp_spawn").world_size == 1


def test_a_module_replaces_callbacks_of_its_classes(tmp_path: Path) -> None:
    class Own(theirs.EarlyStopping):
        pass

    class Configured(Model):
        def configure_callbacks(self) -> Any:
            return [Own("score", patience=7), theirs.ModelCheckpoint(tmp_path)]

    kinds = []
    for kind in TRAINERS:
        trainer = kind(**QUIET, callbacks=[theirs.EarlyStopping("score"), theirs.Timer()])
        trainer.fit(Configured())
        kinds.append([type(each).__name__ for each in trainer.callbacks])
    assert kinds[0] == kinds[1]


def test_hooks_that_are_added_before_a_stage_are_called_until_they_are_removed() -> None:
    class Seen(hookline.Hook):
        def on_test_end(self) -> None:
            calls.append("test end")

    class Theirs(theirs.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            calls.append("callback")

    calls: list[str] = []
    trainer = Trainer(**QUIET)
    function = trainer.on("train_end")(lambda: calls.append("function"))
    added = trainer.add_hook(Seen())
    trainer.callbacks.append(Theirs())
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model := Model())
        trainer.test(model, verbose=False)
    assert calls == ["function", "callback", "test end"] * 2
    function.remove()
    added.remove()
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, Theirs)]
    trainer.test(model, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    assert len(calls) == 6


def test_an_attribute_that_no_trainer_has_is_an_error_where_it_is_used() -> None:
    class Curious(theirs.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.no_such_thing  # noqa: B018

    for kind in TRAINERS:
        trainer = kind(**QUIET, callbacks=[Curious()])
        with pytest.raises(AttributeError, match="no_such_thing"):
            trainer.fit(Model())


# ---- other arguments ---------------------------------------------------------------------------------------------


def test_environment_variables_set_arguments_as_python_literals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LIMIT_VAL_BATCHES", "0.5")
    monkeypatch.setenv("PL_TRAINER_MIN_STEPS", "")
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")
    monkeypatch.setenv("PL_TRAINER_GRADIENT_CLIP_VAL", "None")
    for kind in TRAINERS:
        trainer = kind(**QUIET)
        assert (trainer.max_steps, trainer.limit_val_batches, trainer.min_steps) == (7, 0.5, None)
        assert kind(**QUIET, max_steps=3).max_steps == 3
        assert trainer.gradient_clip_val is None


@pytest.mark.parametrize("given", [{"min_steps": 6}, {"min_epochs": 2}, {"min_epochs": 2, "min_steps": 9}])
def test_a_stop_waits_for_the_least_number_of_steps(given: dict[str, int]) -> None:
    class Stop(theirs.Callback):
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            trainer.should_stop = True

    seen = []
    for kind in TRAINERS:
        trainer = kind(**{**QUIET, "max_epochs": 5, **given}, callbacks=Stop())
        trainer.fit(Model())
        seen.append((trainer.global_step, trainer.current_epoch, trainer.min_steps))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("inference", [True, False])
def test_evaluations_run_in_inference_mode_unless_it_is_off(inference: bool) -> None:
    class Seen(Model):
        def _look(self, batch: Any, batch_idx: int) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        validation_step = test_step = predict_step = _look

    modes = []
    for kind in TRAINERS:
        seen: list[tuple[bool, bool]] = []
        limits = {f"limit_{name}_batches": 1 for name in ("train", "val", "test", "predict")}
        trainer = kind(**{**QUIET, "max_epochs": 1}, **limits, inference_mode=inference)
        for stage in ("fit", "validate", "test", "predict"):
            getattr(trainer, stage)(Seen())
        modes.append(seen)
    assert modes[0] == modes[1]


def test_torchs_switches_are_set_when_a_trainer_is_made() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        for kind in TRAINERS:
            kind(**QUIET, deterministic="warn", benchmark=True)
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.backends.cudnn.benchmark
            kind(**QUIET, deterministic=True)
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.backends.cudnn.benchmark
            kind(**QUIET, deterministic=False)
            assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if config is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_a_profiler_measures_hooks_and_steps(tmp_path: Path) -> None:
    measured = []
    for kind in TRAINERS:
        profiler = pl.profilers.SimpleProfiler(dirpath=tmp_path / kind.__module__, filename="report")
        trainer = kind(**QUIET, profiler=profiler, callbacks=theirs.EarlyStopping("score"))
        trainer.fit(Model())
        assert trainer.profiler is profiler
        assert (tmp_path / kind.__module__ / "fit-report.txt").exists()
        measured.append(profiler.recorded_durations)
    for action in (
        "[Strategy]SingleDeviceStrategy.training_step",
        "[Strategy]SingleDeviceStrategy.validation_step",
    ):
        assert len(measured[0][action]) == len(measured[1][action]) > 0
    stopping = [each for each in measured[1] if "EarlyStopping" in each and "on_validation_end" in each]
    assert len(measured[0][stopping[0]]) == len(measured[1][stopping[0]])
    assert type(Trainer(**QUIET, profiler="simple").profiler) is pl.profilers.SimpleProfiler
    assert type(Trainer(**QUIET).profiler) is pl.profilers.PassThroughProfiler


def test_a_module_is_made_on_the_device_and_without_values() -> None:
    for kind in TRAINERS:
        with kind(**QUIET).init_module(empty_init=True):
            torch.manual_seed(3)
            empty = nn.Linear(4, 4)
        torch.manual_seed(3)
        assert not torch.equal(nn.Linear(4, 4).weight, empty.weight)


def test_plugins_stand_for_arguments() -> None:
    for kind in TRAINERS:
        plugin = pl.plugins.MixedPrecision("bf16-mixed", "cpu")
        assert kind(**QUIET, plugins=[plugin]).precision == "bf16-mixed"
        with pytest.raises(ValueError, match="both"):
            kind(**QUIET, plugins=plugin, precision=32)
    with pytest.raises(MisconfigurationException, match="XLACheckpointIO"):
        Trainer(**QUIET, plugins=[type("XLACheckpointIO", (), {})()])


def test_a_mock_of_a_callback_records_the_calls_of_lightning() -> None:
    calls = []
    for kind in TRAINERS:
        recorded = Mock(spec=pl.Callback, model=pl.Callback())
        trainer = kind(**QUIET, callbacks=[recorded], enable_checkpointing=False, limit_train_batches=1)
        trainer.fit(Model())
        trainer.test(Model())
        calls.append([name for name, _, _ in recorded.method_calls if not name.endswith("state_dict")])
    assert calls[0] == calls[1] and "on_train_batch_end" in calls[0]


class Writer(theirs.BasePredictionWriter):
    """Keeps the positions of the samples."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, *given: Any) -> None:
        self.batches.append(given[3])

    def write_on_epoch_end(self, *given: Any) -> None:
        self.epochs.append(given[3])


@pytest.mark.filterwarnings("default")
def test_the_positions_of_predicted_samples_are_known_where_the_loader_knows_them() -> None:
    found = []
    for kind in TRAINERS:
        seen: list[Any] = []
        for interval in ("batch", "epoch", "batch_and_epoch"):
            writer = Writer(interval)
            trainer = kind(**QUIET, callbacks=writer, limit_predict_batches=2)
            trainer.predict(Model(), return_predictions=False)
            seen.append((writer.batches, writer.epochs))
        writer = Writer("batch_and_epoch")
        with pytest.warns(UserWarning, match="infer the batch indices fetched from your dataloader"):
            kind(**QUIET, callbacks=writer).predict(Model(), DataLoader(RandomIterableDataset(32, 2)))
        seen.append((writer.batches, writer.epochs))
        found.append(seen)
    assert found[0] == found[1]


def test_batches_of_evaluations_add_up() -> None:
    found = []
    for kind in TRAINERS:
        counts: list[int] = []

        class Counting(pl.Callback):
            def on_predict_batch_end(self, trainer: Any, *given: Any) -> None:
                progress = trainer.predict_loop.batch_progress
                counts.extend((progress.current.ready, progress.total.ready))  # noqa: B023
                counts.append(trainer._logger_connector.should_update_logs)  # noqa: B023

            def on_validation_batch_end(self, trainer: Any, *given: Any) -> None:
                progress = trainer._evaluation_loop.batch_progress
                counts.extend((progress.current.ready, progress.total.ready))  # noqa: B023

        trainer = kind(
            **QUIET,
            callbacks=Counting(),
            log_every_n_steps=2,
            val_check_interval=2,
            enable_checkpointing=False,
        )
        trainer.fit(Model())
        trainer.validate(Model())
        trainer.validate(Model())
        trainer.predict(Model())
        trainer.predict(Model())
        found.append(counts)
    assert found[0] == found[1]
