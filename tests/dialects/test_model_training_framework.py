"""Every code block of the Model Training Framework's page on hooks runs, with only its import line changed, as its text says."""

from __future__ import annotations

import ast
import inspect
import itertools
import pdb
import random
import re
import signal
import sys
import time
import types
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from test_budgets import per_step
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F

import hookline
from hookline import (
    CheckpointError,
    Hook,
    HookError,
    HooklineError,
    Logger,
    NonFiniteLoss,
    OptionError,
    Preempted,
)
from hookline.interop.model_training_framework import (
    CheckpointConfig,
    EarlyStoppingHook,
    EpochLengthPolicy,
    GenericTrainer,
    GenericTrainerConfig,
    GradientMonitorHook,
    HooksConfig,
    LoggingConfig,
    ModelCheckpointHook,
    MultiDataLoaderConfig,
    PerformanceConfig,
    PreemptionConfig,
    SamplingStrategy,
    TrainerHooks,
    ValAggregation,
    ValidationConfig,
    ValidationFrequency,
)
from hookline.interop.model_training_framework.settings import loggers_of

BLOCKS = {
    "Logging Hook": """\
from model_training_framework.config.schemas import HooksConfig

config = HooksConfig(
    enable_logging_hook=True
)
""",
    "Gradient Monitor Hook": """\
config = HooksConfig(
    enable_gradient_monitor=True,
    gradient_monitor_config={
        "log_frequency": 100,  # Log every N steps
        "log_histogram": True,  # Log gradient histograms
        "log_norm": True,  # Log gradient norms
        "param_filter": ["encoder", "decoder"],  # Monitor specific layers
        "percentiles": [10, 50, 90],  # Gradient percentiles to track
    }
)
""",
    "Model Checkpoint Hook": """\
config = HooksConfig(
    enable_model_checkpoint_hook=True,
    model_checkpoint_config={
        "save_top_k": 3,  # Keep best 3 checkpoints
        "monitor": "val/loss",  # Metric to monitor
        "mode": "min",  # min for loss, max for accuracy
        "save_last": True,  # Always keep last checkpoint
        "save_on_train_epoch_end": False,  # Only save after validation
        "filename": "epoch_{epoch}_loss_{val/loss:.2f}",
        "auto_insert_metric_name": False,
    }
)
""",
    "Early Stopping Hook": """\
config = HooksConfig(
    enable_early_stopping_hook=True,
    early_stopping_config={
        "monitor": "val/loss",
        "patience": 10,  # Epochs without improvement
        "mode": "min",  # min for loss, max for accuracy
        "min_delta": 0.0001,  # Minimum change to qualify as improvement
        "check_on_train_epoch_end": False,  # Check after validation
        "strict": True,  # Crash if monitor metric not found
        "verbose": True,  # Print early stopping messages
    }
)
""",
    "Learning Rate Monitor Hook": """\
config = HooksConfig(
    enable_lr_monitor=True,
    lr_monitor_config={
        "log_momentum": True,  # Also log momentum if available
        "log_weight_decay": True,  # Log weight decay
        "frequency": "epoch",  # "step" or "epoch"
    }
)
""",
    "Basic Custom Hook": '''\
from model_training_framework.trainer.hooks import TrainerHooks

class MyCustomHook(TrainerHooks):
    def __init__(self, threshold=10.0):
        super().__init__()
        self.threshold = threshold
        self.high_loss_count = 0

    def on_train_start(self, trainer):
        """Called once at the beginning of training."""
        print("Training started!")
        self.start_time = time.time()

    def on_epoch_start(self, trainer, epoch):
        """Called at the start of each epoch."""
        print(f"Starting epoch {epoch}")
        self.epoch_start_time = time.time()

    def on_train_batch_end(self, trainer, batch, loader_idx, loader_name, metrics):
        """Called after each training batch."""
        if metrics.get("loss", 0) > self.threshold:
            self.high_loss_count += 1
            print(f"High loss detected: {metrics['loss']:.4f}")

            if self.high_loss_count > 10:
                print("Too many high loss batches, reducing learning rate")
                for optimizer in trainer.optimizers:
                    for param_group in optimizer.param_groups:
                        param_group['lr'] *= 0.5

    def on_validation_end(self, trainer, epoch, metrics):
        """Called after validation."""
        print(f"Validation metrics: {metrics}")

        # Custom metric computation
        if "val/accuracy" in metrics:
            improvement = metrics["val/accuracy"] - trainer.best_accuracy
            print(f"Accuracy improvement: {improvement:.4f}")
            trainer.best_accuracy = max(trainer.best_accuracy, metrics["val/accuracy"])

    def on_training_end(self, trainer):
        """Called once at the end of training."""
        total_time = time.time() - self.start_time
        print(f"Training completed in {total_time:.2f} seconds")
''',
    "Registering Custom Hooks": """\
# 1. Via configuration (using class path)
config = HooksConfig(
    hook_classes=["mypackage.hooks.MyCustomHook"],
    hook_configs={
        "mypackage.hooks.MyCustomHook": {"threshold": 5.0}
    }
)

# 2. Direct registration after trainer creation
trainer = GenericTrainer(config, model, optimizers)
trainer.hook_manager.register_hook(MyCustomHook(threshold=5.0))

# 3. Register a class explicitly
class AutoRegisteredHook(TrainerHooks):
    def on_epoch_end(self, trainer, epoch):
        print(f"Epoch {epoch} completed")

trainer.hook_manager.register_hook(AutoRegisteredHook())
""",
    "Complete Hook Interface": '''\
class TrainerHooks:
    """Base class for all trainer hooks."""

    # Training lifecycle
    def on_train_start(self, trainer):
        """Called at the beginning of training."""
        pass

    def on_train_end(self, trainer):
        """Called at the end of training."""
        pass

    # Epoch boundaries
    def on_epoch_start(self, trainer, epoch):
        """Called at the start of each epoch."""
        pass

    def on_epoch_end(self, trainer, epoch):
        """Called at the end of each epoch."""
        pass

    # Training batches
    def on_train_batch_start(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name):
        """Called before processing a training batch."""
        pass

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        """Called after processing a training batch."""
        pass

    # Validation
    def on_validation_start(self, trainer, epoch):
        """Called before validation."""
        pass

    def on_validation_end(self, trainer, epoch, metrics):
        """Called after validation."""
        pass

    def on_validation_batch_start(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name):
        """Called before processing a validation batch."""
        pass

    def on_validation_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        """Called after processing a validation batch."""
        pass

    # Gradient computation
    def on_before_backward(self, trainer, loss):
        """Called before backward pass."""
        pass

    def on_after_backward(self, trainer):
        """Called after backward pass."""
        pass

    # Optimization
    def on_before_optimizer_step(self, trainer, optimizer_idx):
        """Called before optimizer step."""
        pass

    def on_after_optimizer_step(self, trainer, optimizer_idx):
        """Called after optimizer step."""
        pass

    # Gradient clipping
    def on_gradient_clip(self, trainer, grad_norm):
        """Called after gradient clipping."""
        pass

    # Checkpointing
    def on_checkpoint_save(self, trainer, checkpoint_path):
        """Called after saving a checkpoint."""
        pass

    def on_checkpoint_load(self, trainer, checkpoint_path):
        """Called after loading a checkpoint."""
        pass

    # Exception handling
    def on_exception(self, trainer, exception):
        """Called when an exception occurs."""
        pass
''',
    "Execution Order": """\
# Execution order example
trainer.hook_manager.register_hook(CustomHook1())  # Executes first
trainer.hook_manager.register_hook(CustomHook2())  # Executes second
# Built-in hooks execute last
""",
    "Stateful Hooks": """\
class StatefulHook(TrainerHooks):
    def __init__(self):
        super().__init__()
        self.batch_losses = []
        self.epoch_losses = []

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        self.batch_losses.append(metrics.get("loss", 0))

    def on_epoch_end(self, trainer, epoch):
        avg_loss = sum(self.batch_losses) / len(self.batch_losses)
        self.epoch_losses.append(avg_loss)
        self.batch_losses = []  # Reset for next epoch

        # Detect training plateau
        if len(self.epoch_losses) > 5:
            recent_losses = self.epoch_losses[-5:]
            if max(recent_losses) - min(recent_losses) < 0.001:
                print("Training plateau detected!")
""",
    "Hook Communication": """\
class ProducerHook(TrainerHooks):
    def on_epoch_end(self, trainer, epoch):
        # Store data for other hooks
        trainer.hook_data = {"important_metric": 0.95}

class ConsumerHook(TrainerHooks):
    def on_epoch_end(self, trainer, epoch):
        # Read data from other hooks
        if hasattr(trainer, "hook_data"):
            metric = trainer.hook_data.get("important_metric")
            print(f"Received metric: {metric}")
""",
    "Conditional Hooks": """\
class ConditionalHook(TrainerHooks):
    def __init__(self, enable_after_epoch=10):
        super().__init__()
        self.enable_after_epoch = enable_after_epoch
        self.enabled = False

    def on_epoch_start(self, trainer, epoch):
        if epoch >= self.enable_after_epoch:
            self.enabled = True

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        if not self.enabled:
            return

        # Hook logic only runs after specified epoch
        self._analyze_metrics(metrics)
""",
    "External Integration Hooks": """\
class SlackNotificationHook(TrainerHooks):
    def __init__(self, webhook_url, notify_on=["training_end", "best_model"]):
        super().__init__()
        self.webhook_url = webhook_url
        self.notify_on = notify_on
        self.best_metric = float('inf')

    def on_validation_end(self, trainer, epoch, metrics):
        val_loss = metrics.get("val/loss", float('inf'))
        if val_loss < self.best_metric:
            self.best_metric = val_loss
            if "best_model" in self.notify_on:
                self._send_notification(
                    f"New best model! Epoch {epoch}, Loss: {val_loss:.4f}"
                )

    def on_training_end(self, trainer):
        if "training_end" in self.notify_on:
            self._send_notification(
                f"Training completed! Best loss: {self.best_metric:.4f}"
            )

    def _send_notification(self, message):
        import requests
        try:
            # Add timeout to prevent hanging
            requests.post(self.webhook_url, json={"text": message}, timeout=10)
        except requests.exceptions.Timeout:
            print(f"Warning: Webhook notification timed out")
        except requests.exceptions.RequestException as e:
            print(f"Warning: Failed to send webhook notification: {e}")
""",
    "Debugging Hooks": """\
class DebugHook(TrainerHooks):
    def __init__(self, break_on_nan=True, log_shapes=False):
        super().__init__()
        self.break_on_nan = break_on_nan
        self.log_shapes = log_shapes

    def on_train_batch_start(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name):
        if self.log_shapes:
            for i, item in enumerate(batch):
                if torch.is_tensor(item):
                    print(f"Batch item {i} shape: {item.shape}")

    def on_after_backward(self, trainer):
        # Check for NaN gradients
        for name, param in trainer.model.named_parameters():
            if param.grad is not None:
                if torch.isnan(param.grad).any():
                    print(f"NaN gradient detected in {name}")
                    if self.break_on_nan:
                        import pdb; pdb.set_trace()

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        # Check for NaN loss
        if torch.isnan(torch.tensor(metrics.get("loss", 0))):
            print(f"NaN loss at batch {batch_idx}")
            if self.break_on_nan:
                import pdb; pdb.set_trace()
""",
    "1. Hook Organization": """\
# Organize hooks by functionality
hooks/
├── __init__.py
├── monitoring.py      # Monitoring and logging hooks
├── optimization.py    # Learning rate, gradient hooks
├── checkpointing.py   # Custom checkpoint hooks
├── debugging.py       # Debug and profiling hooks
└── integration.py     # External service hooks
""",
    "2. Hook Configuration": """\
# Use configuration for flexibility
class ConfigurableHook(TrainerHooks):
    def __init__(self, config=None):
        super().__init__()
        config = config or {}
        self.enabled = config.get("enabled", True)
        self.frequency = config.get("frequency", 100)
        self.verbose = config.get("verbose", False)

    def should_run(self, step):
        return self.enabled and step % self.frequency == 0
""",
    "3. Error Handling": """\
class RobustHook(TrainerHooks):
    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        try:
            # Hook logic that might fail
            self._process_metrics(metrics)
        except Exception as e:
            # Log error but don't crash training
            print(f"Hook error (non-fatal): {e}")
            if trainer.config.debug:
                import traceback
                traceback.print_exc()
""",
    "4. Performance Considerations": """\
class EfficientHook(TrainerHooks):
    def __init__(self, sample_rate=0.1):
        super().__init__()
        self.sample_rate = sample_rate

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        # Only run for a sample of batches
        if random.random() > self.sample_rate:
            return

        # Expensive computation only on sampled batches
        self._expensive_analysis(metrics)
""",
    "5. Testing Hooks": """\
def test_custom_hook():
    # Create mock trainer
    mock_trainer = Mock()
    mock_trainer.model = create_test_model()
    mock_trainer.optimizers = [torch.optim.Adam(mock_trainer.model.parameters())]

    # Test hook
    hook = MyCustomHook(threshold=5.0)

    # Test lifecycle methods
    hook.on_train_start(mock_trainer)
    assert hasattr(hook, 'start_time')

    # Test batch processing
    metrics = {"loss": 15.0}
    hook.on_train_batch_end(mock_trainer, None, 0, 0, "test", metrics)
    assert hook.high_loss_count == 1

    # Test threshold behavior
    for _ in range(10):
        hook.on_train_batch_end(mock_trainer, None, 0, 0, "test", metrics)

    # Check if learning rate was reduced
    assert mock_trainer.optimizers[0].param_groups[0]['lr'] < 0.001
""",
}
"""The blocks by their headings, letter for letter."""

IMPORTS = ("model_training_framework.config.schemas", "model_training_framework.trainer.hooks")
"""What only the import lines have changed to."""


def as_here(block: str) -> str:
    for module in IMPORTS:
        block = block.replace(
            f"from {module} import", "from hookline.interop.model_training_framework import"
        )
    return block


def run(title: str, **names: Any) -> dict[str, Any]:
    """What a block defines, given what the document takes as known around it."""
    known = {
        "time": time,
        "torch": torch,
        "random": random,
        "Mock": Mock,
        "HooksConfig": HooksConfig,
        "TrainerHooks": TrainerHooks,
        "GenericTrainer": GenericTrainer,
        **names,
    }
    exec(compile(as_here(BLOCKS[title]), title, "exec"), known)
    return known


class Coder(nn.Module):
    """An encoder, something between, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.between, self.decoder = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.between(self.encoder(x)))


def training_step(trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str) -> Any:
    return {"loss": F.mse_loss(trainer.model(batch[0]), batch[1])}


def scores(*losses: float) -> Any:
    """A validation step with these losses, then the last one for ever; accuracy is 1 - loss / 10."""
    left = list(losses)

    def step(trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str) -> Any:
        loss = left.pop(0) if len(left) > 1 else left[0]
        return {"loss": torch.tensor(loss), "accuracy": 1 - loss / 10}

    return step


class Rows(Logger):
    """Keeps what is logged."""

    queued = False

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.histograms: set[str] = set()

    def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
        self.rows.append((step, dict(metrics)))

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        self.histograms.add(tag)


def silent(**settings: Any) -> GenericTrainerConfig:
    """Saves and says nothing unless told to."""
    defaults = {"checkpoint": CheckpointConfig(save_every_n_epochs=None), "log_loss_every_n_steps": None}
    return GenericTrainerConfig(**{**defaults, **settings})


def make(
    config: Any = None,
    *hooks: Any,
    losses: tuple[float, ...] = (1.0,),
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    model = Coder() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    trainer = GenericTrainer(
        silent() if config is None else config, model, [optimizer], **{"logger": False, **options}
    )
    trainer.hook_manager.register_hooks(hooks)
    trainer.set_training_step(training_step)
    trainer.set_validation_step(scores(*losses))
    return trainer


def names(folder: str) -> list[str]:
    return sorted(each.name for each in Path(folder).iterdir())


@pytest.fixture
def mypackage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's package, laid out as the document says, with its first hook in it."""
    folder = tmp_path / "mypackage" / "hooks"
    files = re.findall(r"── (\w+\.py)", BLOCKS["1. Hook Organization"])
    assert files[0] == "__init__.py" and len(files) == 6
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    for file in files:
        (folder / file).write_text(
            "import time\n" + as_here(BLOCKS["Basic Custom Hook"]) if file == "monitoring.py" else ""
        )
    (folder / "__init__.py").write_text("from mypackage.hooks.monitoring import MyCustomHook\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [each for each in sys.modules if each.partition(".")[0] == "mypackage"]:
        del sys.modules[name]


# ---- the document's configurations -----------------------------------------------------------------------------------


def test_the_logging_hook_says_when_training_and_epochs_begin_and_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(run("Logging Hook")["config"]).fit([batches()], max_epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.split(":")[0].split(" in ")[0]
        for line in lines
        if "epoch" in line or line.startswith("training")
    ] == [
        "training started",
        "epoch 0 started",
        "epoch 0 completed",
        "epoch 1 started",
        "epoch 1 completed",
        "training completed",
    ]


def test_the_gradient_monitor_logs_norms_percentiles_and_histograms_of_the_layers_named_every_100_steps() -> (
    None
):
    rows = Rows()
    make(run("Gradient Monitor Hook")["config"], logger=rows).fit([batches(200)], max_epochs=1)
    found = {step: row for step, row in rows.rows if "grad_norm" in row}
    assert sorted(found) == [100, 200]
    kinds = ("grad_norm", "gradients/p10", "gradients/p50", "gradients/p90")
    assert {name for name in found[100] if name.startswith(kinds) and "/" in name} == {
        f"{kind}/{layer}" for kind in kinds for layer in ("encoder", "decoder")
    }
    assert {tag.rpartition("/")[2] for tag in rows.histograms} == {"encoder", "decoder"}


def test_the_checkpoint_hook_keeps_the_three_best_and_the_last_under_the_documented_names() -> None:
    losses = (3.0, 1.0, 2.0, 2.5, 5.0)
    make(run("Model Checkpoint Hook")["config"], losses=losses).fit([batches(2)], [batches(1)], max_epochs=5)
    assert names("checkpoints/experiment/best") == [
        "epoch_1_loss_1.00",
        "epoch_2_loss_2.00",
        "epoch_3_loss_2.50",
        "last",
    ]


def test_the_early_stopping_hook_waits_ten_epochs_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(run("Early Stopping Hook")["config"], losses=(2.0, 1.0, 0.99995))
    trainer.fit([batches(1)], [batches(1)], max_epochs=50)
    assert (
        trainer.status == "stopped" and trainer.state.epochs_seen == 12
    )  # the last gain was below min_delta
    assert "(10 of 10)" in capsys.readouterr().out


def test_the_early_stopping_hook_crashes_if_its_metric_is_not_found() -> None:
    trainer = make(run("Early Stopping Hook")["config"])
    trainer.set_validation_step(lambda trainer, batch, i, j, name: {"accuracy": 0.5})
    with pytest.raises(OptionError, match="val/loss"):
        trainer.fit([batches(1)], [batches(1)], max_epochs=3)


def test_the_rate_monitor_logs_rate_momentum_and_weight_decay_once_an_epoch() -> None:
    rows = Rows()
    make(run("Learning Rate Monitor Hook")["config"], logger=rows).fit([batches(3)], max_epochs=2)
    found = [{name: value for name, value in row.items() if name.startswith("lr-")} for _, row in rows.rows]
    expected = {"lr-SGD": 0.1, "lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01}
    assert [row for row in found if row] == [expected, expected]


def test_switches_alone_have_the_defaults_of_the_framework() -> None:
    stopping, saving = HooksConfig(
        enable_early_stopping_hook=True, enable_model_checkpoint_hook=True
    ).build()[::-1]
    assert isinstance(stopping, EarlyStoppingHook | ModelCheckpointHook)
    by_class = {type(each): each for each in (stopping, saving)}
    assert (
        by_class[EarlyStoppingHook].patience == 10 and by_class[EarlyStoppingHook].watch.min_delta == 0.0001
    )
    assert (
        by_class[ModelCheckpointHook].save_top_k == 3 and by_class[ModelCheckpointHook].monitor == "val/loss"
    )


# ---- the document's hooks --------------------------------------------------------------------------------------------


def test_the_custom_hook_counts_high_losses_lowers_the_rate_and_compares_accuracies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hook = run("Basic Custom Hook")["MyCustomHook"](threshold=-1.0)
    trainer = make(None, hook, losses=(5.0, 2.0))
    trainer.fit([batches(6)], [batches(1)], max_epochs=2)
    out = capsys.readouterr().out
    assert out.startswith("Training started!\nStarting epoch 0\nHigh loss detected: ")
    assert hook.high_loss_count == 12 and out.count("Too many high loss batches") == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    assert (
        "Accuracy improvement: 0.5000" in out
        and "Accuracy improvement: 0.3000" in out
        and trainer.best_accuracy == pytest.approx(0.8)
    )
    assert "'val/loss': 5.0" in out
    assert re.search(r"Training completed in \d+\.\d\d seconds\n$", out)


def test_hooks_are_registered_by_class_path_as_an_instance_and_as_a_class(
    mypackage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Coder()
    made = run(
        "Registering Custom Hooks",
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        MyCustomHook=run("Basic Custom Hook")["MyCustomHook"],
    )
    trainer = made["trainer"]
    trainer.hook_manager.register_hook(made["AutoRegisteredHook"])  # "register a class explicitly"
    by_path, by_hand = [each for each in trainer.hook_manager.hooks if type(each).__name__ == "MyCustomHook"]
    assert (
        by_path.threshold == by_hand.threshold == 5.0
    )  # 10.0 if the arguments under the dotted path were lost
    assert type(by_path).__module__ == "mypackage.hooks.monitoring"
    trainer.set_training_step(training_step)
    trainer.fit([batches(1)], max_epochs=1)
    out = capsys.readouterr().out
    assert out.count("Training started!") == 2 and out.count("Epoch 0 completed\n") == 2


class Recording(TrainerHooks):
    """Filled with the methods of the documented interface: each notes what it was called with."""


def recorder(theirs: type) -> Any:
    calls: list[tuple[str, dict[str, Any]]] = []

    def noting(name: str, parameters: list[str]) -> Any:
        source = f"lambda note: lambda {', '.join(parameters)}: note({name!r}, dict({', '.join(f'{p}={p}' for p in parameters[1:])}))"
        return eval(source)(lambda name, arguments: calls.append((name, arguments)))

    methods = {
        name: noting(name, list(inspect.signature(method).parameters))
        for name, method in vars(theirs).items()
        if name.startswith("on_")
    }
    return type("Recorder", (Recording,), methods)(), calls


def test_the_base_has_every_method_of_the_documented_interface_with_its_parameters() -> None:
    theirs = run("Complete Hook Interface")["TrainerHooks"]
    documented = {
        name: inspect.signature(method) for name, method in vars(theirs).items() if name.startswith("on_")
    }
    assert len(documented) == 18
    assert {name: inspect.signature(getattr(TrainerHooks, name)) for name in documented} == documented
    assert all(inspect.getdoc(getattr(TrainerHooks, name)) for name in documented)


def test_every_method_of_the_documented_interface_is_called_with_what_it_names() -> None:
    hook, calls = recorder(run("Complete Hook Interface")["TrainerHooks"])
    model = Coder()
    config = GenericTrainerConfig(log_loss_every_n_steps=None)
    config.val_loader_config.dataloader_names = ["held_out"]
    config.train_loader_config.dataloader_names = ["web", "code"]
    halves = [
        torch.optim.SGD(model.encoder.parameters(), lr=0.1),
        torch.optim.SGD(model.decoder.parameters(), lr=0.1),
    ]
    trainer = GenericTrainer(config, model, halves, logger=False)
    trainer.hook_manager.register_hook(hook)
    trainer.set_training_step(training_step)
    trainer.set_validation_step(scores(1.0))
    data = batches(1)
    trainer.fit([data, data], [data], max_epochs=1)

    assert [name for name, _ in calls] == [
        "on_train_start",
        "on_epoch_start",
        *[
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
            *["on_before_optimizer_step", "on_gradient_clip", "on_after_optimizer_step"] * 2,
            "on_train_batch_end",
        ]
        * 2,
        "on_validation_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_epoch_end",
        "on_checkpoint_save",
        "on_train_end",
    ]
    assert all(arguments["trainer"] is trainer for _, arguments in calls)
    heard: dict[str, list[dict[str, Any]]] = {}
    for name, arguments in calls:
        heard.setdefault(name, []).append(arguments)
    for when in ("on_train_batch_start", "on_train_batch_end"):
        facts = [(each["batch_idx"], each["dataloader_idx"], each["dataloader_name"]) for each in heard[when]]
        assert facts == [(0, 0, "web"), (1, 1, "code")] and heard[when][0]["batch"] is data[0]
    assert isinstance(heard["on_train_batch_end"][0]["metrics"]["loss"], float)
    assert [each["optimizer_idx"] for each in heard["on_before_optimizer_step"]] == [0, 1, 0, 1]
    assert (
        isinstance(heard["on_before_backward"][0]["loss"], Tensor)
        and heard["on_gradient_clip"][0]["grad_norm"] > 0
    )
    assert heard["on_validation_batch_end"][0]["dataloader_name"] == "held_out"
    assert heard["on_validation_end"][0]["metrics"]["val/loss"] == 1.0
    assert (
        heard["on_checkpoint_save"][0]["checkpoint_path"]
        == "checkpoints/experiment/checkpoints/epoch_000_step_000002.ckpt"
    )


def test_a_failure_and_the_load_that_follows_are_heard_and_everything_is_in_place_by_then() -> None:
    theirs = run("Complete Hook Interface")["TrainerHooks"]
    config = GenericTrainerConfig(log_loss_every_n_steps=None)

    def failing(trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str) -> Any:
        if trainer.current_epoch == 1:
            raise ValueError("lost the GPU")
        return training_step(trainer, batch, batch_idx, dataloader_idx, dataloader_name)

    hook, calls = recorder(theirs)
    trainer = make(config, hook)
    trainer.best_accuracy = 0.75
    trainer.set_training_step(failing)
    with pytest.raises(ValueError, match="lost the GPU") as failure:
        trainer.fit([batches(2)], max_epochs=3)
    assert calls[-1] == ("on_exception", {"trainer": trainer, "exception": failure.value})

    class Position(TrainerHooks):
        def on_checkpoint_load(self, trainer: Any, checkpoint_path: str) -> None:
            self.seen = (checkpoint_path, trainer.global_step, trainer.best_accuracy)

    position = Position()
    again = make(config, position)
    again.fit([batches(2)], max_epochs=3, resume_from_checkpoint="latest")
    assert position.seen == ("checkpoints/experiment/checkpoints/epoch_000_step_000002.ckpt", 2, 0.75)
    assert again.global_step == 6  # the first epoch was not trained again


def test_custom_hooks_run_in_the_order_of_registration_and_before_built_in_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Says(TrainerHooks):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            print(type(self).__name__)

    trainer = make(HooksConfig(enable_logging_hook=True))
    given = {name: type(name, (Says,), {}) for name in ("CustomHook1", "CustomHook2")}
    run("Execution Order", trainer=trainer, **given)
    trainer.fit([batches(1)], max_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" in ")[0] for line in lines if "Custom" in line or "epoch 0 completed" in line] == [
        "CustomHook1",
        "CustomHook2",
        "epoch 0 completed",
    ]


def test_a_stateful_hook_finds_a_plateau(capsys: pytest.CaptureFixture[str]) -> None:
    hook = run("Stateful Hooks")["StatefulHook"]()
    trainer = make(None, hook)
    trainer.optimizers[0].param_groups[0]["lr"] = 0.0
    trainer.fit([batches(3)], max_epochs=6)
    assert len(hook.epoch_losses) == 6 and hook.batch_losses == []
    assert all(type(each) is float for each in hook.epoch_losses)  # no tensor that holds a graph
    assert capsys.readouterr().out == "Training plateau detected!\n"


def test_one_hook_hands_data_to_the_next_in_the_same_event(capsys: pytest.CaptureFixture[str]) -> None:
    block = run("Hook Communication")
    make(None, block["ConsumerHook"](), block["ProducerHook"]()).fit([batches(1)], max_epochs=1)
    assert capsys.readouterr().out == ""  # the consumer came first: there was nothing yet
    make(None, block["ProducerHook"](), block["ConsumerHook"]()).fit([batches(1)], max_epochs=1)
    assert capsys.readouterr().out == "Received metric: 0.95\n"


def test_a_conditional_hook_begins_after_its_epoch() -> None:
    analysed: list[int] = []

    class Analyses(run("Conditional Hooks")["ConditionalHook"]):  # type: ignore[misc]
        def on_epoch_start(self, trainer: Any, epoch: int) -> None:
            super().on_epoch_start(trainer, epoch)
            self.epoch = epoch

        def _analyze_metrics(self, metrics: Any) -> None:
            analysed.append(self.epoch)

    make(None, Analyses(enable_after_epoch=2)).fit([batches(2)], max_epochs=4)
    assert analysed == [2, 2, 3, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_notifies_a_service_of_better_models_and_the_end(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[Any] = []
    service = types.ModuleType("requests")
    service.exceptions = types.SimpleNamespace(  # type: ignore[attr-defined]
        Timeout=type("Timeout", (TimeoutError,), {}), RequestException=OSError
    )

    def post(url: str, json: dict[str, str], timeout: int) -> None:
        if fails:
            raise service.exceptions.Timeout
        sent.append((url, json["text"], timeout))

    service.post = post  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "requests", service)
    hook = run("External Integration Hooks")["SlackNotificationHook"]("https://example.test/hook")
    trainer = make(None, hook, losses=(3.0, 4.0, 2.0))
    trainer.fit([batches(1)], [batches(1)], max_epochs=3)
    texts = [
        "New best model! Epoch 0, Loss: 3.0000",
        "New best model! Epoch 2, Loss: 2.0000",
        "Training completed! Best loss: 2.0000",
    ]
    assert sent == ([] if fails else [("https://example.test/hook", text, 10) for text in texts])
    assert capsys.readouterr().out == ("Warning: Webhook notification timed out\n" * 3 if fails else "")
    assert trainer.status == "completed"


def test_a_debugging_hook_breaks_on_the_first_nan_and_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks: list[str] = []
    monkeypatch.setattr(pdb, "set_trace", lambda: breaks.append("here"))
    data = batches(2)
    data[1][0].fill_(float("nan"))
    hook = run("Debugging Hooks")["DebugHook"](break_on_nan=True, log_shapes=True)
    config = silent(performance=PerformanceConfig(clip_grad_norm=None))
    with pytest.raises(NonFiniteLoss):
        make(config, hook).fit([data], max_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    shapes = ["Batch item 0 shape: torch.Size([3, 4])", "Batch item 1 shape: torch.Size([3, 2])"]
    parameters = [f"NaN gradient detected in {name}" for name, _ in Coder().named_parameters()]
    assert lines == [*shapes, *shapes, *parameters, "NaN loss at batch 1"]
    assert len(breaks) == len(parameters) + 1


def test_a_configurable_hook_runs_every_so_many_steps() -> None:
    cls = run("2. Hook Configuration")["ConfigurableHook"]
    assert [step for step in range(7) if cls({"frequency": 3}).should_run(step)] == [0, 3, 6]

    class Runs(cls):  # type: ignore[misc, valid-type]
        def on_after_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
            if self.should_run(trainer.global_step):
                ran.append(trainer.global_step)

    ran: list[int] = []
    make(None, Runs({"frequency": 2})).fit([batches(5)], max_epochs=1)
    make(None, Runs({"enabled": False})).fit([batches(5)], max_epochs=1)
    assert ran == [2, 4]


@pytest.mark.parametrize("debug", [False, True])
def test_a_hook_that_handles_its_own_errors_asks_the_configuration_for_details(
    debug: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(run("3. Error Handling")["RobustHook"]):  # type: ignore[misc]
        def _process_metrics(self, metrics: Any) -> None:
            raise ValueError(f"cannot read {sorted(metrics)}")

    trainer = make(silent(debug_mode=debug), Fails())
    trainer.fit([batches(2)], max_epochs=1)
    shown = capsys.readouterr()
    assert shown.out == "Hook error (non-fatal): cannot read ['loss']\n" * 2
    assert shown.err.count("Traceback") == (2 if debug else 0)
    assert trainer.status == "completed"


def test_expensive_work_is_done_for_a_sample_of_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[float] = []

    class Looks(run("4. Performance Considerations")["EfficientHook"]):  # type: ignore[misc]
        def _expensive_analysis(self, metrics: Any) -> None:
            analysed.append(metrics["loss"])

    drawn = iter([0.05, 0.5, 0.9, 0.01])
    monkeypatch.setattr(random, "random", lambda: next(drawn))
    make(None, Looks()).fit([batches(4)], max_epochs=1)
    assert len(analysed) == 2


def test_the_documents_own_test_passes() -> None:
    custom = run("Basic Custom Hook")["MyCustomHook"]
    run("5. Testing Hooks", MyCustomHook=custom, create_test_model=Coder)["test_custom_hook"]()
    assert (
        len(inspect.signature(inspect.unwrap(custom.on_train_batch_end)).parameters) == 6
    )  # self and five, called with six


def test_every_block_of_the_document_is_run_by_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    titles = [
        title
        for title in BLOCKS
        if re.search(rf'run\(\s*"{re.escape(title)}"|BLOCKS\["{re.escape(title)}"\]', source)
    ]
    assert titles == list(BLOCKS) and len(titles) == 19


# ---- forms of methods ------------------------------------------------------------------------------------------------


class AnyNames(TrainerHooks):
    """Parameters under names of the user's own, which the framework has always allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, tuple[Any, ...]] = {}

    def on_epoch_start(self, t: Any, e: int) -> None:
        self.heard["epoch_start"] = (t, e)

    def on_epoch_end(self, tr: Any, ep: int, results: Any) -> None:
        self.heard["epoch_end"] = (tr, ep, results["train/loss"])

    def on_train_batch_start(self, t: Any, b: Any, loader: int, name: str) -> None:
        self.heard["batch_start"] = (t, b, loader, name)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.heard["batch_end"] = (trainer, *rest)

    def on_validation_end(self, trainer: Any, metrics: Any, threshold: float = 0.5) -> None:
        self.heard["validation_end"] = (trainer, metrics["val/loss"], threshold)


def test_parameters_may_have_any_name_in_the_documented_places_or_any_place_under_their_names() -> None:
    hook = AnyNames()
    trainer = make(None, hook)
    data = batches(1)
    trainer.fit([data], [data], max_epochs=1)
    heard = hook.heard
    assert heard["epoch_start"] == (trainer, 0) and heard["epoch_end"][:2] == (trainer, 0)
    assert heard["batch_start"] == (trainer, data[0], 0, "dl0")
    assert heard["batch_end"][:5] == (trainer, data[0], 0, 0, "dl0") and set(heard["batch_end"][5]) == {
        "loss"
    }
    assert heard["validation_end"] == (trainer, 1.0, 0.5)


def test_a_method_in_its_short_form_can_be_called_with_all_documented_arguments_or_its_own() -> None:
    class Short(TrainerHooks):
        calls: ClassVar[list[Any]] = []

        def on_train_batch_end(
            self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: Any
        ) -> None:
            super().on_train_batch_end(trainer, batch, loader_idx, loader_name, metrics)
            self.calls.append((trainer, batch, loader_idx, loader_name, metrics))

        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            self.calls.append((trainer, epoch))

    hook: Any = Short()
    hook.on_train_batch_end("t", "b", 7, 1, "code", {})
    hook.on_train_batch_end("t", "b", 1, "code", {})
    hook.on_train_batch_end("t", "b", loader_idx=1, loader_name="code", metrics={})
    hook.on_epoch_end("t", 3, {"train/loss": 1.0})
    assert Short.calls == [("t", "b", 1, "code", {})] * 3 + [("t", 3)]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'metrics'"):
        hook.on_train_batch_end("t", "b", 1, "code")


def test_a_hook_of_the_framework_runs_in_hooklines_own_trainer_and_takes_no_sanity_check_for_a_result() -> (
    None
):
    seen: list[Any] = []

    class Hears(TrainerHooks):
        def on_validation_end(self, trainer: Any, epoch: int, metrics: Any) -> None:
            seen.append(("validated", epoch))

        @hookline.every("2 steps")
        def on_step_end(self, step: int) -> None:
            seen.append(("step", step))

    quiet(hooks=[Hears()], num_sanity_val_steps=1).fit(Net(), batches(3), batches(1))
    assert seen == [("step", 2), ("validated", 0)]


def test_before_and_after_forward_are_heard_around_every_step_function_with_its_duration() -> None:
    heard: list[Any] = []

    class Times(TrainerHooks):
        def on_before_forward(self, trainer: Any) -> None:
            heard.append("before")

        def on_after_forward(self, trainer: Any, duration_ms: float) -> None:
            heard.append(duration_ms)

    trainer = make(None, Times())
    trainer.set_training_step(lambda *arguments: time.sleep(0.005) or training_step(*arguments))
    trainer.fit([batches(1)], [batches(1)], max_epochs=1)
    assert heard[::2] == ["before", "before"]
    assert heard[1] >= 5 > 0 < heard[3]


def test_fewer_parameters_than_documented_get_the_first_ones_and_names_of_facts_go_by_their_names() -> None:
    class Few(TrainerHooks):
        heard: ClassVar[list[Any]] = []

        def on_epoch_end(self, t: Any) -> None:
            self.heard.append(t)

        def on_validation_end(self, trainer: Any, metrics: Any, e: int) -> None:
            self.heard.append((metrics["val/loss"], e))

    trainer = make(None, Few())
    trainer.fit([batches(1)], [batches(1)], max_epochs=1)
    assert Few.heard == [(1.0, 0), trainer]


def test_more_parameters_than_documented_are_refused_with_what_can_be_asked_for() -> None:
    class Many(TrainerHooks):
        def on_epoch_end(self, a: Any, b: Any, c: Any, d: Any) -> None: ...

    with pytest.raises(HookError, match=r"Many\.on_epoch_end: on_train_epoch_end has no argument 'c'"):
        make(None, Many())


def test_a_misspelt_method_is_refused_when_it_is_registered() -> None:
    class Wrong(TrainerHooks):
        def on_epoch_finish(self, trainer: Any, epoch: int) -> None: ...

    with pytest.raises(HookError, match="Did you mean 'on_epoch_"):
        make(None, Wrong())


def test_an_adapted_hook_costs_at_most_one_call_more_than_a_native_one() -> None:
    class Native(Hook):
        def on_train_batch_end(
            self,
            trainer: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
            dataloader_name: str,
            metrics: Any,
        ) -> None: ...

    class Whole(TrainerHooks):
        def on_train_batch_end(
            self,
            trainer: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
            dataloader_name: str,
            metrics: Any,
        ) -> None: ...

    class OwnNames(TrainerHooks):
        def on_train_batch_end(self, t: Any, b: Any, i: int, j: int, n: str, m: Any) -> None: ...

    class Short(TrainerHooks):
        def on_train_batch_end(
            self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: Any
        ) -> None: ...

    cost = {
        cls: per_step(lambda data, cls=cls: quiet(hooks=[cls()]).fit(Net(), data))
        for cls in (Native, Whole, OwnNames, Short)
    }
    assert cost[Whole] == cost[OwnNames] == cost[Native]
    assert cost[Short] == cost[Native] + 1


# ---- the manager -----------------------------------------------------------------------------------------------------


def test_a_hook_is_unregistered_by_itself_or_by_its_name_and_others_stay() -> None:
    first, second = AnyNames(), AnyNames()
    trainer = make(None, first, second)
    trainer.hook_manager.unregister_hook(first)
    assert first not in trainer.hook_manager.hooks and second in trainer.hook_manager.hooks
    trainer.hook_manager.unregister_hook("any_names_2")
    assert second not in trainer.hook_manager.hooks
    with pytest.raises(HookError, match="not registered"):
        trainer.hook_manager.unregister_hook(first)
    trainer.hook_manager.clear_hooks()
    assert trainer.hook_manager.hooks == []


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_happens_when_a_hook_fails_is_decided_by_the_configuration(
    goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(TrainerHooks):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            raise ValueError("broken on purpose")

    trainer = make(silent(hooks=HooksConfig(continue_on_hook_error=goes_on)), Fails)
    if goes_on:
        trainer.fit([batches(1)], max_epochs=2)
        assert caplog.text.count("hook 'fails' failed in on_train_epoch_end") == 2
    else:
        with pytest.raises(ValueError, match="broken on purpose"):
            trainer.fit([batches(1)], max_epochs=2)


# ---- the configuration -----------------------------------------------------------------------------------------------


def test_performance_keys_change_the_update() -> None:
    norms: list[float] = []

    class Clips(TrainerHooks):
        def on_gradient_clip(self, trainer: Any, grad_norm: float) -> None:
            norms.append(grad_norm)

    config = silent(performance=PerformanceConfig(gradient_accumulation_steps=2, clip_grad_norm=0.01), seed=7)
    trainer = make(config, Clips())
    trainer.fit([batches(4)], max_epochs=1)
    assert trainer.global_step == len(norms) == 2 and trainer.options.seed == 7
    make(silent(performance=PerformanceConfig(clip_grad_norm=None)), Clips()).fit([batches(1)], max_epochs=1)
    assert len(norms) == 2


def test_checkpoints_are_kept_by_epoch_by_step_and_by_metric_without_removing_each_others() -> None:
    checkpoint = CheckpointConfig(
        root_dir="saved", save_every_n_steps=2, max_checkpoints=2, monitor_metric="val_loss"
    )
    make(silent(experiment_name="mine", checkpoint=checkpoint), losses=(3.0, 1.0, 2.0)).fit(
        [batches(2)], [batches(1)], max_epochs=3
    )
    assert names("saved/mine/checkpoints") == ["epoch_001_step_000004.ckpt", "epoch_002_step_000006.ckpt"]
    assert names("saved/mine/checkpoints_by_step") == [
        "epoch_001_step_000004.ckpt",
        "epoch_002_step_000006.ckpt",
    ]
    assert names("saved/mine/checkpoints_best") == ["epoch_001_step_000004.ckpt"]


def test_a_second_trainer_in_the_same_folder_trains_its_own_model(caplog: pytest.LogCaptureFixture) -> None:
    make(GenericTrainerConfig()).fit([batches(4)], max_epochs=1)
    second = make(GenericTrainerConfig(), model=nn.Linear(4, 2))  # not even of the same shape
    before = second._net.weight.detach().clone()
    second.fit([batches(2)], max_epochs=1)
    assert second.global_step == 2 and not torch.equal(second._net.weight, before)
    assert 'resume_from_checkpoint="latest"' in caplog.text and "completed at step 4" in caplog.text
    again = make(GenericTrainerConfig(), model=nn.Linear(4, 2))
    again.fit([batches(2)], max_epochs=1, resume_from_checkpoint="latest")
    assert again.global_step == 2 and torch.equal(again._net.weight, second._net.weight)


def test_a_job_that_slurm_has_started_again_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    make(GenericTrainerConfig()).fit([batches(4)], max_epochs=1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trainer = make(GenericTrainerConfig())
    trainer.fit([batches(4)], max_epochs=2)
    assert trainer.state.resumed and trainer.global_step == 8
    for config in (PreemptionConfig(resume_from_latest_symlink=False), PreemptionConfig(requeue_job=False)):
        anew = make(GenericTrainerConfig(preemption=config))
        anew.fit([batches(4)], max_epochs=1)
        assert not anew.state.resumed and anew.global_step == 4


def test_a_preempted_run_that_was_told_to_goes_on_where_it_was_and_a_finished_one_trains_nothing() -> None:
    class Preempts(TrainerHooks):
        def on_train_batch_end(
            self,
            trainer: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
            dataloader_name: str,
            metrics: Any,
        ) -> None:
            batches_seen.append(batch_idx)
            if len(batches_seen) == 3:
                signal.raise_signal(signal.SIGUSR1)

    batches_seen: list[int] = []
    config = GenericTrainerConfig(preemption=PreemptionConfig(resume_from_latest_symlink=True))
    with pytest.raises(Preempted):
        make(config, Preempts()).fit([batches(4)], max_epochs=2)
    for expected in (8, 8):
        trainer = make(config, Preempts())
        trainer.fit([batches(4)], max_epochs=2)
        assert len(batches_seen) == expected and trainer.global_step == 8
    assert batches_seen == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(CheckpointError) as failure:
        make(config, model=nn.Linear(4, 2)).fit([batches(4)], max_epochs=2)
    assert "to start a new run, give it another experiment_name" in failure.value.__notes__[-1]
    anew = make(GenericTrainerConfig(preemption=PreemptionConfig(resume_from_latest_symlink=False)))
    anew.fit([batches(1)], max_epochs=1)
    assert anew.global_step == 1


def test_a_run_resumes_from_the_checkpoint_it_is_given() -> None:
    make(GenericTrainerConfig()).fit([batches(2)], max_epochs=3)
    trainer = make(GenericTrainerConfig())
    trainer.fit(
        [batches(2)],
        max_epochs=3,
        resume_from_checkpoint="checkpoints/experiment/checkpoints/epoch_000_step_000002.ckpt",
    )
    assert trainer.global_step == 6 and trainer.state.resumed
    trainer.fit([batches(2)], max_epochs=4, resume_from_checkpoint="latest")
    assert trainer.global_step == 8


def test_a_job_is_put_back_into_its_queue_unless_told_otherwise() -> None:
    assert "slurm_requeue" in make(GenericTrainerConfig()).hooks.list_hooks()
    assert (
        "slurm_requeue"
        not in make(GenericTrainerConfig(preemption=PreemptionConfig(requeue_job=False))).hooks.list_hooks()
    )


def test_validation_every_n_steps_counts_updates() -> None:
    seen: list[int] = []

    class Notes(TrainerHooks):
        def on_validation_start(self, trainer: Any, epoch: int) -> None:
            seen.append(trainer.global_step)

    validation = ValidationConfig(frequency=ValidationFrequency.EVERY_N_STEPS, every_n_steps=2)
    config = silent(validation=validation, performance=PerformanceConfig(gradient_accumulation_steps=2))
    make(config, Notes()).fit([batches(8)], [batches(1)], max_epochs=1)
    assert seen == [2, 4]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2.0),  # over all samples: 3 of them at 1, 3 at 2 and 3 at 3
        ({"aggregation": ValAggregation.MACRO_AVG_EQUAL_LOADERS}, 1.75),
        ({"aggregation": ValAggregation.PRIMARY_METRIC_PER_LOADER}, 1.0),
        (
            {
                "aggregation": ValAggregation.CUSTOM,
                "aggregation_fn": lambda found: {"loss": max(each["loss"] for each in found.values())},
            },
            2.5,
        ),
        ({"validation_weights": [3.0, 1.0]}, 1.375),
    ],
)
def test_the_results_of_several_validation_loaders_become_one_as_configured(
    settings: dict[str, Any], expected: float
) -> None:
    config = silent(validation=ValidationConfig(**settings))
    config.val_loader_config.dataloader_names = ["short", "long"]
    trainer = make(config, losses=(1.0, 2.0, 3.0))
    found = trainer.fit(
        [batches(1)], [batches(1), batches(2)], max_epochs=1
    )  # each batch once, however unequal the loaders
    assert found["val/loss"] == pytest.approx(expected)
    assert found["val/dl_short/loss"] == 1.0 and found["val/dl_long/loss"] == 2.5


def test_the_trainers_own_early_stopping_works_with_its_default_metric() -> None:
    trainer = make(silent(early_stopping_patience=2))
    trainer.fit([batches(1)], [batches(1)], max_epochs=9)
    assert trainer.status == "stopped" and trainer.state.epochs_seen == 3


@pytest.mark.parametrize(
    ("source", "hooks_own", "trainers_own", "epochs"),
    [("both", 1, 3, 2), ("both", 3, 1, 2), ("hook", 3, 1, 4), ("legacy", 1, 3, 4)],
)
def test_which_early_stopping_counts_can_be_chosen(
    source: str, hooks_own: int, trainers_own: int, epochs: int
) -> None:
    hooks = HooksConfig(enable_early_stopping_hook=True, early_stopping_config={"patience": hooks_own})
    validation = ValidationConfig(early_stopping_source=source)
    trainer = make(silent(early_stopping_patience=trainers_own, hooks=hooks, validation=validation))
    trainer.fit([batches(1)], [batches(1)], max_epochs=9)
    assert trainer.state.epochs_seen == epochs


def test_loggers_are_those_of_the_configuration(tmp_path: Path) -> None:
    logging_config = LoggingConfig(
        logger_type="composite",
        composite_loggers=["csv", "tensorboard"],
        tensorboard_dir="tb",
        log_scalars_every_n_steps=1,
    )
    trainer = make(silent(logging=logging_config))
    assert [type(each).__name__ for each in loggers_of(logging_config, "experiment")] == [
        "CSV",
        "TensorBoard",
    ]
    assert trainer.options.log_every_n_steps == 1
    model = Coder()
    trainer = GenericTrainer(
        silent(logging=LoggingConfig(log_scalars_every_n_steps=1)),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    trainer.set_training_step(training_step)
    trainer.fit([batches(3)])
    assert (tmp_path / "checkpoints/experiment/metrics.csv").read_text().startswith("step")


def test_a_line_with_the_loss_comes_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hookline"):
        make(silent(log_loss_every_n_steps=2)).fit([batches(5)], max_epochs=1)
    assert [record.message.split(":")[0] for record in caplog.records if "loss" in record.message] == [
        "step 2",
        "step 4",
    ]


def test_keys_that_ask_for_more_to_be_seen_add_hooks() -> None:
    more = silent(profile_training=True, logging=LoggingConfig(log_gradients=True, log_system_metrics=True))
    assert {"profiler", "gradient_monitor_hook", "device_stats"} <= set(make(more).hooks.list_hooks())
    more.hooks = HooksConfig(enable_gradient_monitor=True, gradient_monitor_config={"log_frequency": 7})
    assert [
        each.log_frequency for each in make(more).hook_manager.hooks if isinstance(each, GradientMonitorHook)
    ] == [7]
    by_time = silent(checkpoint=CheckpointConfig(save_every_n_epochs=None, save_every_n_minutes=0.5))
    assert "every 30.000000 seconds" in str(make(by_time).explain())


def test_a_dry_run_does_one_batch_of_everything() -> None:
    trainer = make(silent(dry_run=True))
    found = trainer.fit([batches(5)], [batches(3)], max_epochs=7)
    assert trainer.global_step == 1 and trainer.state.batches_in_pass == 1 and "val/loss" in found


def test_schedulers_advance_once_an_epoch() -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = GenericTrainer(
        silent(), model, [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], logger=False
    )
    trainer.set_training_step(training_step)
    trainer.fit([batches(3)], max_epochs=3)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_every_key_of_the_configuration_is_read_or_refused_with_what_to_do_instead() -> None:
    folder = Path(inspect.getfile(TrainerHooks)).parent
    trees = [ast.parse((folder / f"{name}.py").read_text()) for name in ("settings", "trainer", "loaders")]
    source = "\n".join(
        ast.unparse(node)
        for tree in trees
        for node in tree.body
        if not (
            isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        )  # which only declares the keys
    )
    whole = GenericTrainerConfig()
    tables = [
        whole,
        *(getattr(whole, each.name) for each in fields(whole) if is_dataclass(getattr(whole, each.name))),
    ]
    for table in [each for each in tables if not isinstance(each, HooksConfig)]:
        for each in fields(table):
            if "instead" in each.metadata:
                setattr(table, each.name, 1)
                with pytest.raises(OptionError, match=f"{each.name}=1 is not taken here: .+"):
                    GenericTrainer(whole, Coder(), [])
                setattr(table, each.name, None)
            elif not each.name.startswith("use_") and each.name not in ("debug_mode", "fault_tolerance"):
                assert re.search(rf"\.{each.name}\b", source), f"{each.name} is never read"


# ---- several loaders -------------------------------------------------------------------------------------------------


class Draws(TrainerHooks):
    """Notes which loader each batch came from, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[str] = []

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        self.epochs.append("")

    def on_train_batch_end(
        self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: Any
    ) -> None:
        assert trainer.multi_loader_manager.names[loader_idx] == loader_name
        self.epochs[-1] += loader_name[0]


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({}, "webwww"),
        ({"sampling_strategy": SamplingStrategy.SEQUENTIAL}, "wwwweb"),
        ({"sampling_strategy": SamplingStrategy.ALTERNATING, "alternating_pattern": [0, 0, 1, 2]}, "wwebww"),
        (
            {
                "sampling_strategy": SamplingStrategy.WEIGHTED,
                "dataloader_weights": [2, 1, 1],
                "steps_per_epoch": 4,
                "epoch_length_policy": EpochLengthPolicy.FIXED_NUM_STEPS,
            },
            "wewb",
        ),
        ({"epoch_length_policy": EpochLengthPolicy.MIN_OF_LENGTHS}, "w"),
        ({"epoch_length_policy": EpochLengthPolicy.MAX_OF_LENGTHS, "burst_size": 2}, "wwee"),
        ({"cycle_short_loaders": True}, "webweb"),
        ({"sampling_strategy": "sequential", "cycle_short_loaders": False}, "wwwweb"),
    ],
)
def test_several_loaders_are_drawn_from_as_configured(settings: dict[str, Any], drawn: str) -> None:
    draws = Draws()
    config = silent(
        train_loader_config=MultiDataLoaderConfig(dataloader_names=["web", "extra", "books"], **settings)
    )
    make(config, draws).fit([batches(4), batches(1), batches(1)], max_epochs=1)
    assert draws.epochs == [drawn]


def test_a_fixed_number_of_steps_is_drawn_from_endless_loaders() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return itertools.cycle(batches(1))

    draws = Draws()
    config = silent()
    config.train_loader_config = MultiDataLoaderConfig(
        epoch_length_policy=EpochLengthPolicy.FIXED_NUM_STEPS, steps_per_epoch=5
    )
    make(config, draws).fit({"web": Endless(), "extra": Endless()}, max_epochs=2)
    assert draws.epochs == ["wewew", "wewew"] or draws.epochs == ["wewew", "ewewe"]


def test_weights_of_losses_change_the_training_and_each_loader_trains_its_own_optimizer() -> None:
    def trained(**settings: Any) -> Coder:
        torch.manual_seed(1)
        model = Coder()
        parts = [
            torch.optim.SGD(model.encoder.parameters(), lr=0.1),
            torch.optim.SGD(model.decoder.parameters(), lr=0.1),
        ]
        performance = PerformanceConfig(clip_grad_norm=None, gradient_accumulation_steps=2)
        trainer = GenericTrainer(silent(performance=performance, **settings), model, parts, logger=False)
        trainer.set_training_step(training_step)
        trainer.fit([batches(2), batches(2)], max_epochs=1)
        return model

    plain, weighted = trained(), trained(loss_weights_per_loader=[1.0, 1000.0])
    assert not torch.equal(plain.encoder.weight, weighted.encoder.weight)
    torch.manual_seed(1)
    untrained, first, both = (
        Coder(),
        trained(per_loader_optimizer_id=[0, 0]),
        trained(per_loader_optimizer_id=[0, 1]),
    )
    assert torch.equal(first.decoder.weight, untrained.decoder.weight) and not torch.equal(
        first.encoder.weight, untrained.encoder.weight
    )
    assert not torch.equal(both.decoder.weight, untrained.decoder.weight) and not torch.equal(
        both.encoder.weight, untrained.encoder.weight
    )


def test_a_hook_changes_weights_strategy_and_loaders_from_the_next_epoch_on() -> None:
    class Curriculum(TrainerHooks):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            if epoch == 0:
                trainer.multi_loader_manager.update_weights([1, 3])
            if epoch == 1:
                trainer.add_dataloader(loader=batches(2), name="hard", weight=4)

        def on_epoch_start(self, trainer: Any, epoch: int) -> None:
            if epoch == 3:
                trainer.multi_loader_config.sampling_strategy = SamplingStrategy.SEQUENTIAL
                trainer.multi_loader_config.dataloader_weights = None
                trainer.multi_loader_manager.rebuild_schedule()

    draws = Draws()
    weighted = MultiDataLoaderConfig(
        SamplingStrategy.WEIGHTED,
        [3, 1],
        dataloader_names=["easy", "medium"],
        epoch_length_policy=EpochLengthPolicy.FIXED_NUM_STEPS,
        steps_per_epoch=8,
    )
    make(silent(train_loader_config=weighted), Curriculum(), draws).fit(
        [batches(2), batches(2)], max_epochs=4
    )
    assert [dict(sorted(Counter(epoch).items())) for epoch in draws.epochs[:3]] == [
        {"e": 6, "m": 2},
        {"e": 2, "m": 6},
        {"e": 1, "h": 4, "m": 3},
    ]
    assert draws.epochs[3] == "eemmhhee"  # one after the other, and from the start


# ---- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: GenericTrainer({}, Coder(), []),
            "takes a GenericTrainerConfig or a HooksConfig first, not dict",
        ),
        (lambda: GenericTrainer(silent(), Net(), []), "trained by hookline.Trainer"),
        (lambda: GenericTrainer(silent(), Coder(), ["adam"]), "str is no torch.optim.Optimizer"),
        (lambda: GenericTrainerConfig(experiment="mine"), "Did you mean 'experiment_name'"),
        (lambda: HooksConfig(enable_loging_hook=True), "Did you mean 'enable_logging_hook'"),
        (lambda: make(fabric=object()), "Leave it out and pass strategy="),
        (
            lambda: make().set_training_step(lambda batch: None),
            r"called with \(trainer, batch, batch_idx, dataloader_idx, dataloader_name\)",
        ),
        (lambda: make().set_validation_step("step"), "takes a function"),
        (lambda: make().fit([]), "train_loaders is an empty list"),
        (lambda: make().fit([batches()], max_epochs=0), "max_epochs=0 must be a whole number from 1"),
        (
            lambda: make().hook_manager.register_hook("mypackage.Hook"),
            r"HooksConfig\(hook_classes=\['mypackage.Hook'\]\)",
        ),
        (lambda: make().hook_manager.register_hook(object()), "has no event method"),
        (lambda: make(silent(preemption=PreemptionConfig(signal=9))), "allowed: SIGUSR1, SIGTERM"),
        (
            lambda: make(silent(logging=LoggingConfig(logger_type="wanbd")), logger=True),
            "Did you mean 'wandb'",
        ),
        (lambda: make(silent(logging=LoggingConfig(logger_type="composite"))), "needs composite_loggers"),
        (
            lambda: make(silent(logging=LoggingConfig(composite_loggers=["csv"]))),
            "needs logger_type='composite'",
        ),
        (
            lambda: make(
                silent(
                    logging=LoggingConfig(console_log_level="LOUD"),
                    hooks=HooksConfig(enable_logging_hook=True),
                )
            ),
            "log_level='LOUD'",
        ),
        (
            lambda: make(silent(validation=ValidationConfig(every_n_steps=3))),
            "EVERY_N_STEPS needs every_n_steps",
        ),
        (
            lambda: make(silent(validation=ValidationConfig(early_stopping_source="hooks"))),
            "Did you mean 'hook'",
        ),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(wrong: Any, message: str) -> None:
    with pytest.raises(HooklineError, match=message):
        wrong()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataloader_names": ["only"]}, r"there are 2 loaders and 1 dataloader_names \(only\)"),
        ({"dataloader_names": ["same", "same"]}, "has a name twice"),
        ({"dataloader_weights": [1.0]}, "has 1 entries for 2 loaders"),
        ({"sampling_strategy": "wieghted"}, "Did you mean 'weighted'"),
        ({"sampling_strategy": SamplingStrategy.WEIGHTED}, "needs weights"),
        (
            {"sampling_strategy": SamplingStrategy.ALTERNATING, "alternating_pattern": [0, 2]},
            "numbered from 0 to 1",
        ),
        ({"epoch_length_policy": EpochLengthPolicy.FIXED_NUM_STEPS}, "FIXED_NUM_STEPS needs steps_per_epoch"),
    ],
)
def test_settings_of_loaders_that_cannot_be_meant_are_refused_before_the_first_step(
    settings: dict[str, Any], message: str
) -> None:
    trainer = make(silent(train_loader_config=MultiDataLoaderConfig(**settings)))
    with pytest.raises(OptionError, match=message):
        trainer.fit([batches(1), batches(1)])
    assert trainer.global_step == 0


def test_a_run_without_a_step_says_which_one_is_missing() -> None:
    model = Coder()
    trainer = GenericTrainer(silent(), model, torch.optim.SGD(model.parameters(), lr=0.1), logger=False)
    with pytest.raises(OptionError, match="call trainer.set_training_step"):
        trainer.fit([batches(1)])
    trainer.set_training_step(training_step)
    with pytest.raises(OptionError, match="call trainer.set_validation_step"):
        trainer.fit([batches(1)], [batches(1)])
    with pytest.raises(OptionError, match="aggregation=CUSTOM needs aggregation_fn"):
        trainer.set_validation_step(scores(1.0))
        trainer.config.validation.aggregation = ValAggregation.CUSTOM
        trainer.fit([batches(1)], [batches(1)])
