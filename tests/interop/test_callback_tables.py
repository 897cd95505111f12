"""The tables of docs/builtin-hooks.md: every callback of other trainers is there, and what they say is true."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.demos.boring_classes import BoringModel
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader
from transformers import trainer_callback, trainer_jit_checkpoint
from transformers.integrations import integration_utils

import hookline.hooks
import hookline.loggers

pytestmark = pytest.mark.filterwarnings("default")
PAGE = Path(__file__).parents[2] / "docs/builtin-hooks.md"
COMPOSER = (
    "ActivationMonitor OptimizerMonitor LRMonitor MemoryMonitor NaNMonitor SpeedMonitor CheckpointSaver MLPerfCallback EarlyStopper "
    "ExportForInferenceCallback ThresholdStopper ImageVisualizer RuntimeEstimator SystemMetricsMonitor Generate FreeOutputs MemorySnapshot "
    "OOMObserver LoadCheckpoint"
)
"""What `composer.callbacks` of Composer 0.32.1 exports. It cannot be installed beside this version of torch."""


def table(system: str) -> list[list[str]]:
    """The rows of a system's table, as cells."""
    section = PAGE.read_text().partition(f"\n### {system}\n")[2].partition("\n### ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def listed(system: str) -> list[str]:
    return [name for row in table(system) for name in names(row[0])]


def unchanged(system: str) -> set[str]:
    return {name for row in table(system) for name in names(row[0]) if row[2].startswith("yes")}


def transformers_callbacks() -> Iterator[str]:
    base = transformers.TrainerCallback
    for module in (trainer_callback, integration_utils, trainer_jit_checkpoint):
        yield from (
            name for name, each in vars(module).items() if inspect.isclass(each) and issubclass(each, base)
        )
    yield from NOTEBOOK


def ignite_handlers() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch.jit
        import ignite.handlers
    return list(ignite.handlers.__all__)


EXPORTED: dict[str, Callable[[], Any]] = {
    "Lightning": lambda: pl_callbacks.__all__,
    "transformers": transformers_callbacks,
    "Keras": lambda: [name for name in dir(keras.callbacks) if name[0].isupper()],
    "Composer": COMPOSER.split,
    "Ignite": ignite_handlers,
}


@pytest.mark.parametrize("system", EXPORTED)
def test_every_callback_of_the_package_has_a_row(system: str) -> None:
    assert sorted(listed(system)) == sorted(set(EXPORTED[system]()))


@pytest.mark.parametrize("system", EXPORTED)
def test_every_name_of_hookline_exists(system: str) -> None:
    named = [name for row in table(system) for name in names(row[1]) if name[0].isupper()]
    known = {*hookline.hooks.__all__, *hookline.loggers.__all__, *hookline.__all__}
    assert len(named) >= 10
    assert [name for name in named if name not in known] == []


# ---- what runs unchanged --------------------------------------------------------------------------------------------


class Backbone(BoringModel):  # type: ignore[misc]
    """A module with the part that BackboneFinetuning asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.layer(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.01)


class Finetunes(pl_callbacks.BaseFinetuning):  # type: ignore[misc]
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class WritesPredictions(pl_callbacks.BasePredictionWriter):  # type: ignore[misc]
    written = 0

    def write_on_batch_end(self, *given: Any) -> None:
        self.written += 1


class SavesItself(pl_callbacks.Checkpoint):  # type: ignore[misc]
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"by-itself-{trainer.current_epoch}")


LIGHTNING: dict[str, Callable[[], Any]] = {
    "BackboneFinetuning": lambda: pl_callbacks.BackboneFinetuning(1),
    "BaseFinetuning": Finetunes,
    "BasePredictionWriter": lambda: WritesPredictions("batch"),
    "Callback": pl_callbacks.Callback,
    "Checkpoint": SavesItself,
    "DeviceStatsMonitor": lambda: pl_callbacks.DeviceStatsMonitor(cpu_stats=False),
    "EarlyStopping": lambda: pl_callbacks.EarlyStopping("loss"),
    "EMAWeightAveraging": pl_callbacks.EMAWeightAveraging,
    "GradientAccumulationScheduler": lambda: pl_callbacks.GradientAccumulationScheduler({1: 2}),
    "LambdaCallback": lambda: pl_callbacks.LambdaCallback(on_train_start=lambda trainer, module: None),
    "LearningRateMonitor": pl_callbacks.LearningRateMonitor,
    "ModelCheckpoint": lambda: pl_callbacks.ModelCheckpoint(monitor="loss"),
    "ModelPruning": lambda: pl_callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "ModelSummary": pl_callbacks.ModelSummary,
    "OnExceptionCheckpoint": lambda: pl_callbacks.OnExceptionCheckpoint("failed"),
    "ProgressBar": pl_callbacks.ProgressBar,
    "RichModelSummary": pl_callbacks.RichModelSummary,
    "RichProgressBar": pl_callbacks.RichProgressBar,
    "SpikeDetection": lambda: pl_callbacks.SpikeDetection(exclude_batches_path="excluded.json"),
    "StochasticWeightAveraging": lambda: pl_callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1),
    "ThroughputMonitor": lambda: pl_callbacks.ThroughputMonitor(batch_size_fn=len),
    "Timer": lambda: pl_callbacks.Timer("00:01:00:00"),
    "TQDMProgressBar": pl_callbacks.TQDMProgressBar,
    "WeightAveraging": pl_callbacks.WeightAveraging,
}


def test_all_that_the_table_says_of_lightning_is_tried_here() -> None:
    assert set(LIGHTNING) == unchanged("Lightning")


@pytest.mark.parametrize("name", LIGHTNING)
def test_a_callback_of_lightning_runs_unchanged(name: str) -> None:
    callback = LIGHTNING[name]()
    data = DataLoader(torch.ones(8, 32), 2)
    model = Backbone()
    trainer = quiet(hooks=[callback], max_epochs=3, logger=pl.loggers.CSVLogger("logs"), log_every_n_steps=1)
    trainer.fit(model, data)
    assert trainer.status == "completed" and trainer.state.step >= 6
    if name == "BasePredictionWriter":
        trainer.predict(model, data)
        assert callback.written == 4


KERAS: dict[str, Callable[[], Any]] = {
    "Callback": keras.callbacks.Callback,
    "CSVLogger": lambda: keras.callbacks.CSVLogger("log.csv"),
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping("val_loss"),
    "History": keras.callbacks.History,
    "LambdaCallback": lambda: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    "ProgbarLogger": keras.callbacks.ProgbarLogger,
    "ReduceLROnPlateau": keras.callbacks.ReduceLROnPlateau,
    "RemoteMonitor": lambda: keras.callbacks.RemoteMonitor("http://127.0.0.1:9"),
    "TerminateOnNaN": keras.callbacks.TerminateOnNaN,
}
KERAS_REFUSED: dict[str, Callable[[], Any]] = {
    "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore("here"),
    "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint("here.keras"),
    "SwapEMAWeights": keras.callbacks.SwapEMAWeights,
    "TensorBoard": lambda: keras.callbacks.TensorBoard("here"),
}


def test_all_that_the_table_says_of_keras_is_tried_here() -> None:
    assert set(KERAS) == unchanged("Keras")
    # OrbaxCheckpoint cannot be made without the package orbax; CallbackList is not a callback
    assert set(KERAS_REFUSED) == set(listed("Keras")) - set(KERAS) - {"OrbaxCheckpoint", "CallbackList"}


@pytest.mark.parametrize("name", KERAS)
def test_a_callback_of_keras_runs_unchanged(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    callback, trainer = KERAS[name](), quiet(max_epochs=2)
    trainer.add_hook(callback)
    trainer.fit(Net(), batches(2), batches(1))
    assert trainer.status == "completed"
    if name == "History":
        assert callback.epoch == [0, 1] and len(callback.history["val_loss"]) == 2
    if name == "ProgbarLogger":
        assert "Epoch 2/2" in capsys.readouterr().out


@pytest.mark.parametrize("name", KERAS_REFUSED)
def test_a_callback_that_needs_a_keras_model_is_refused_when_it_is_added(name: str) -> None:
    with pytest.raises(hookline.HookError):
        quiet(hooks=[KERAS_REFUSED[name]()])


class StandIn(types.ModuleType):
    """A client of a service: everything that is asked for is there, may be called, and is kept."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = importlib.machinery.ModuleSpec(name, None), []
        self.__dict__["calls"] = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and not name.startswith(("__version", "__internal")):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}", self.calls)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append(self.__name__)
        return StandIn(f"{self.__name__}()", self.calls)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __setitem__(self, name: Any, value: Any) -> None:
        self.calls.append(f"{self.__name__}[...]")

    def __getitem__(self, name: Any) -> Any:
        return StandIn(f"{self.__name__}[...]", self.calls)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


SERVICES: dict[str, tuple[str, ...]] = {
    "AzureMLCallback": ("azureml", "azureml.core", "azureml.core.run"),
    "CodeCarbonCallback": ("codecarbon",),
    "CometCallback": ("comet_ml", "comet_ml.config"),
    "DagsHubCallback": ("dagshub", "dagshub.upload"),
    "DVCLiveCallback": ("dvclive", "dvclive.plots", "dvclive.utils"),
    "FlyteCallback": ("flytekit", "flytekitplugins.deck", "flytekitplugins.deck.renderer"),
    "KubeflowCallback": (),
    "NeptuneCallback": (
        "neptune",
        "neptune.internal",
        "neptune.internal.utils",
        "neptune.utils",
        "neptune.exceptions",
    ),
    "SwanLabCallback": ("swanlab",),
}
"""Callbacks of services without a client in this environment: what they import."""
REAL = {"MLflowCallback", "TensorBoardCallback", "WandbCallback"}
ELSEWHERE = {"EarlyStoppingCallback", "PrinterCallback", "ProgressCallback", "TrainerCallback"}
"""Tried in tests/interop/transformers/test_callbacks.py."""
NOTEBOOK = {"NotebookProgressCallback"}


def test_all_that_the_table_says_of_transformers_is_tried() -> None:
    assert unchanged("transformers") == {*SERVICES, *REAL, *ELSEWHERE, *NOTEBOOK}


def test_the_progress_of_transformers_in_a_notebook_runs_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import notebook

    shown: list[str] = []
    monkeypatch.setattr(notebook.disp, "display", lambda page, **options: shown.append(page.data))
    quiet(max_epochs=1, hooks=[notebook.NotebookProgressCallback()]).fit(Net(), batches(3), batches(1))
    assert "Training Loss" in shown[0]
    assert "0.0" in shown[-1] or "3/3" in shown[-1]


@pytest.mark.parametrize("name", SERVICES)
def test_a_callback_of_a_service_runs_unchanged_with_a_stand_in_for_its_client(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for module in SERVICES[name]:
        monkeypatch.setitem(sys.modules, module, StandIn(module, calls))
    if name == "DVCLiveCallback":
        monkeypatch.setattr(sys.modules["dvclive"], "Live", type("Live", (StandIn,), {}), raising=False)
    for check in dir(integration_utils):
        if re.fullmatch(r"is_\w+_available", check) and "torch" not in check:
            monkeypatch.setattr(integration_utils, check, lambda: True)
    for each in ("_is_comet_configured", "_is_comet_installed", "_is_comet_recent_enough"):
        monkeypatch.setattr(integration_utils, each, True)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/status")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///ml.db")
    trainer = quiet(max_epochs=2)
    trainer.add_hook(_make(name, calls))
    trainer.fit(Net(), batches(2), batches(1))
    assert trainer.status == "completed"
    assert calls or name in ("KubeflowCallback", "DagsHubCallback")
    end_tracked_runs()


def end_tracked_runs() -> None:
    """End the runs that transformers leaves open: later tests of this process would use or end them."""
    for module, end in (("wandb", "finish"), ("mlflow", "end_run")):
        if module in sys.modules:
            getattr(sys.modules[module], end)()


def _make(name: str, calls: list[str]) -> Any:
    make = getattr(integration_utils, name)
    if name == "DVCLiveCallback":
        return make(live=sys.modules["dvclive"].Live("live", calls))
    if name == "NeptuneCallback":
        return make(run=None)
    return make()


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_callback_of_a_tracker_runs_unchanged_with_its_client(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///ml.db")
    trainer = quiet(hooks=[getattr(integration_utils, name)()], max_epochs=2, log_every_n_steps=1)
    trainer.fit(Net(), batches(2), batches(1))
    assert trainer.status == "completed"
    end_tracked_runs()
    if name == "TensorBoardCallback":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        [file] = Path().rglob("events.out.tfevents.*")
        events = EventAccumulator(str(file))
        events.Reload()
        assert "train/loss" in events.Tags()["scalars"] and "eval/loss" in events.Tags()["scalars"]


@pytest.mark.parametrize("name", ["ClearMLCallback", "DefaultFlowCallback"])
def test_a_callback_that_needs_training_arguments_runs_with_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "clearml", StandIn("clearml", calls))
    monkeypatch.setattr(integration_utils, "is_clearml_available", lambda: True)
    make = getattr(transformers, name, None) or getattr(integration_utils, name)
    config = transformers.TrainingArguments(output_dir="out", report_to=[], max_steps=4)
    trainer = quiet(hooks=[make()], config=config, max_epochs=2)
    trainer.fit(Net(), batches(2), batches(1))
    assert trainer.status in ("completed", "stopped")
    assert calls or name != "ClearMLCallback"


def test_the_callbacks_that_the_table_says_are_refused_are() -> None:
    trackio = integration_utils.TrackioCallback.__new__(integration_utils.TrackioCallback)
    with pytest.raises(hookline.HookError, match="on_push_begin"):
        quiet(hooks=[trackio])
    for make in (lambda: pl_callbacks.BatchSizeFinder(), lambda: pl_callbacks.LearningRateFinder()):
        with pytest.raises(hookline.HookError):
            quiet(hooks=[make()])
