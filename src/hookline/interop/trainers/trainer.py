"""`BaseTrainer`, `SimpleTrainer`, `AccelerateTrainer`: the documented methods of `trainers`, run by
`hookline.Trainer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from hookline.distributed.accelerate import Accelerated
from hookline.engine.hook import Hook
from hookline.engine.hook_list import Handle
from hookline.hooks.console_log import perplexity_of
from hookline.interop.trainers.hooks import (
    LEDGER,
    CheckpointHook,
    ConsoleLogHook,
    HookManager,
    JSONLogHook,
    NamedHooks,
    StateDict,
)
from hookline.metrics.metric_log import Metrics
from hookline.run.module import Module
from hookline.run.option_tables import OLD_NAMES, OLD_SAVING
from hookline.run.options import ARGUMENT_NAMES, refuse_unknown_options
from hookline.run.state import State
from hookline.run.state_parts import fact
from hookline.training.trainer import Trainer
from hookline.util.errors import OptionError

# ---- From a batch to its loss


Loss = Callable[[Any, Any], Any]


class ModelStep:
    """The step of a plain model. A batch is a dictionary of the model's arguments, (inputs, targets), or its
    one input.
    """

    def __init__(self, loss: Loss | None) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the batch's loss."""
        targets = None
        if isinstance(batch, Mapping):
            outputs = model(**batch)
            targets = batch.get("labels", batch.get("targets"))
        elif isinstance(batch, list | tuple) and len(batch) == 2:
            outputs, targets = model(batch[0]), batch[1]
        else:
            outputs = model(batch)
        if self.loss is not None:
            return self.loss(outputs, targets)
        own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        return own if isinstance(own, Tensor) and own.dim() == 0 else default_loss(outputs, targets)


def default_loss(outputs: Any, targets: Any) -> Tensor:
    """Return the cross entropy for integer targets, the mean squared error for others, if the shapes
    match.
    """
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        if not targets.is_floating_point() and outputs.shape[:-1] == targets.shape:
            return cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
        if targets.is_floating_point() and outputs.shape == targets.shape:
            return mse_loss(outputs, targets)
    raise OptionError(
        f"The model returns {_describe_shape(outputs)} and no loss, and the targets are "
        f"{_describe_shape(targets)}, so no loss function can be chosen. "
        "Return {'loss': ...} from the model, or pass loss=torch.nn.functional.cross_entropy (or another "
        "function of outputs and targets) to get_trainer."
    )


def _describe_shape(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
    )


OPTION_NAMES = {
    "num_epochs": "max_epochs",
    "output_dir": "run_dir",
    "clip_grad_norm": "gradient_clip_val",
    "log_interval": "log_every_n_steps",
    "validate_every_n_epochs": "check_val_every_n_epoch",
}
"""The options of `trainers`, and Hookline's names for them."""
SET_HERE = {*OPTION_NAMES.values(), "device", "strategy", "callbacks"}
KNOWN = (*OPTION_NAMES, "val_dataloader", "loss", *(name for name in ARGUMENT_NAMES if name not in SET_HERE))
"""The options of a trainer here: its own, and those of `hookline.Trainer` that it does not set itself."""


class BaseTrainer(NamedHooks):
    """A model, its data and its optimizer, with hooks by name. Options beside the documented ones are
    `hookline.Trainer`'s.
    """

    def __init__(
        self,
        model: nn.Module,
        dataloader: Any,
        optimizer: Any,
        device: Any = "auto",
        *,
        num_epochs: int = 5,
        val_dataloader: Any = None,
        loss: Loss | None = None,
        hooks: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        """model: the model. dataloader, val_dataloader: the training and the validation loader. optimizer:
        the optimizer. device: 'auto', or the name of one. num_epochs: epochs to train. loss: a function of
        outputs and targets, for a model that does not return its loss. hooks: the hooks. options:
        `output_dir`, where a run writes, and those of `hookline.Trainer`.
        """
        _refuse_arguments(self, model, options)
        self.model, self.dataloader, self.optimizer, self.val_dataloader = (
            model,
            dataloader,
            optimizer,
            val_dataloader,
        )
        settings = {OPTION_NAMES.get(name, name): value for name, value in options.items()}
        quiet = {"logger": "run_dir" in settings, "enable_progress_bar": False, "num_sanity_val_steps": 0}
        if not settings.keys() & OLD_SAVING:
            quiet["checkpoint"] = False  # `add_checkpointing` saves
        self.trainer = self.make_trainer(device, {"max_epochs": num_epochs, **quiet, **settings})
        self._step = ModelStep(loss)
        self._ledger = _Ledger(self)
        self.trainer.add_hook(self._ledger)
        self._ledger.setup(self.trainer.state)
        self._hooks = self.trainer.hooks
        self.hooks = HookManager(self._hooks)
        for hook in hooks:
            self.hooks.add_hook(hook)

    def make_trainer(self, device: Any, settings: dict[str, Any]) -> Trainer:
        """Return the trainer that runs the training."""
        return Trainer(device=device, **settings)

    def train(self) -> dict[str, Any]:
        """Train for `num_epochs` epochs; return the mean loss of each, the last one, seconds, batches and
        samples.
        """
        began = time.monotonic()
        losses: list[float] = []
        self._ledger.losses = losses
        self.trainer.fit(
            self.model, self.dataloader, self.val_dataloader, step=self._step, optimizer=self.optimizer
        )
        live = self.trainer.state
        return {
            "epoch_losses": losses,
            "final_loss": losses[-1] if losses else math.nan,
            "training_time": time.monotonic() - began,
            "total_batches": live.batches_seen,
            "total_samples": live.samples_seen,
        }

    def evaluate(self, dataloader: Any = None) -> dict[str, float]:
        """Return loss, perplexity and other metrics on this loader, the validation data, or the training
        data.

        A hook may call it without a loader at the end of a batch or epoch, if there is validation data.
        """
        if dataloader is None and self.trainer.status == "training":
            measured = self.trainer.validate()
        else:
            chosen = next(
                each for each in (dataloader, self.val_dataloader, self.dataloader) if each is not None
            )
            measured = self.trainer.validate(self.model, chosen, step=self._step)
        results = {name.removeprefix("val/"): value for name, value in measured.items()}
        if "loss" in results:
            results.setdefault("perplexity", perplexity_of(results["loss"]))
        return results

    @property
    def state(self) -> StateDict:
        """Return the state that hooks get: live, before, during and after a run."""
        return StateDict(self.trainer.state)

    device: Any = fact("trainer.device", "Return the device of the training.")

    # ---- hooks ---------------------------------------------------------------------------------------------

    def add_console_logging(self, log_every_n_batches: int = 10) -> Handle:
        """Print the loss every n batches; the hook is called `console_log`."""
        return self.add_hook(ConsoleLogHook(log_every_n_batches))

    def add_json_logging(self, log_every_n_batches: int = 100) -> Handle:
        """Write structured records; the hook is called `json_log`."""
        return self.add_hook(JSONLogHook(log_every_n_batches))

    def add_checkpointing(self, save_every_n_epochs: int = 1) -> Handle:
        """Save every n epochs; the hook is called `checkpoint`."""
        return self.add_hook(CheckpointHook(save_every_n_epochs))


class SimpleTrainer(BaseTrainer):
    """One process, one device."""


class AccelerateTrainer(BaseTrainer):
    """Runs on Accelerate: one process, or those that torchrun started. `state["wrapped_model"]` is the
    prepared model.
    """

    def make_trainer(self, device: Any, settings: dict[str, Any]) -> Trainer:
        """Return a trainer with the Accelerate strategy."""
        return Trainer(
            strategy=Accelerated(device=device, precision=settings.pop("precision", 32)), **settings
        )


class _Ledger(Hook):
    """Fills the state outside of training too, and collects the losses that `train()` returns."""

    name = LEDGER
    order = -1000

    def __init__(self, owner: BaseTrainer) -> None:
        self.owner = owner
        self.losses: list[float] = []
        self.fitted: State | None = None

    def setup(self, state: State) -> None:
        owner = self.owner
        if state.stage == "fit":
            self.fitted = state
        elif self.fitted is not None:  # an evaluation sees the counters of the training before it
            state.fill(
                epoch=self.fitted.epoch, batch_idx=self.fitted.batch_idx, last_loss=self.fitted.last_loss
            )
            state.log.train_loss = self.fitted.log.train_loss
        state.fill(module=owner.model, optimizers=state.optimizers or [owner.optimizer])
        state.update(
            dataloader=owner.dataloader,
            num_epochs=owner.trainer.options.max_epochs,
            output_dir=owner.trainer.options.run_dir,
            is_main_process=state.rank == 0,
        )

    def on_train_epoch_end(self, metrics: Metrics) -> None:
        if "train/loss" in metrics:
            self.losses.append(metrics["train/loss"])


def _refuse_arguments(trainer: BaseTrainer, model: Any, options: dict[str, Any]) -> None:
    who = type(trainer).__name__
    if isinstance(model, Module):
        raise OptionError(
            f"{who} takes a plain nn.Module; {type(model).__name__} is a hookline.Module with its own steps "
            "and optimizers: use hookline.Trainer().fit(model, dataloader)."
        )
    refuse_unknown_options(who, (name for name in options if name not in OLD_NAMES), KNOWN)
