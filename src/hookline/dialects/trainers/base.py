"""`BaseTrainer`, `SimpleTrainer`, `AccelerateTrainer`: the documented methods of `trainers`, done by
`hookline.Trainer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from torch import nn

from hookline.arguments import ARGUMENTS
from hookline.dialects.trainers.hooks import LEDGER, CheckpointHook, ConsoleLogHook, HookManager, JSONLogHook
from hookline.dialects.trainers.measuring import Loss, Measure
from hookline.dialects.trainers.state import StateDict
from hookline.errors import OptionError
from hookline.hook import Hook
from hookline.hooklist import Handle
from hookline.hooks.console_log import perplexity_of
from hookline.metrics import Metrics
from hookline.module import Module
from hookline.options import OLD_NAMES, refuse_unknown_options
from hookline.state import State
from hookline.strategies.accelerated import Accelerated
from hookline.trainer import Trainer

RENAMED = {
    "num_epochs": "max_epochs",
    "output_dir": "run_dir",
    "clip_grad_norm": "gradient_clip_val",
    "log_interval": "log_every_n_steps",
    "validate_every_n_epochs": "check_val_every_n_epoch",
}
"""The options of `trainers`, and what Hookline calls them."""
DONE_HERE = {*RENAMED.values(), "device", "strategy", "callbacks"}
KNOWN = (*RENAMED, "val_dataloader", "loss", *(name for name in ARGUMENTS if name not in DONE_HERE))
"""The options of a trainer here: its own, and those of `hookline.Trainer` that it does not set itself."""


class BaseTrainer:
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
        """`loss`: of outputs and targets, for a model that does not return its loss; `output_dir`: where a
        run writes.
        """
        _check(self, model, options)
        self.model, self.dataloader, self.optimizer, self.val_dataloader = (
            model,
            dataloader,
            optimizer,
            val_dataloader,
        )
        settings = {RENAMED.get(name, name): value for name, value in options.items()}
        quiet = {"logger": "run_dir" in settings, "enable_progress_bar": False, "num_sanity_val_steps": 0}
        if not settings.keys() & OLD_NAMES.keys():
            quiet["checkpoint"] = False  # `add_checkpointing` saves
        self.trainer = self.make_trainer(device, {"max_epochs": num_epochs, **quiet, **settings})
        self._measure = Measure(loss)
        self._ledger = _Ledger(self)
        self.trainer.add_hook(self._ledger)
        self._ledger.setup(self.trainer.state)
        self.hooks = HookManager(self.trainer.hooks)
        for hook in hooks:
            self.hooks.add_hook(hook)

    def make_trainer(self, device: Any, settings: dict[str, Any]) -> Trainer:
        """The trainer that does the work."""
        return Trainer(device=device, **settings)

    def train(self) -> dict[str, Any]:
        """Train for `num_epochs` epochs: the mean loss of each, the last of them, seconds, batches and
        samples.
        """
        began = time.monotonic()
        losses: list[float] = []
        self._ledger.losses = losses
        self.trainer.fit(
            self.model, self.dataloader, self.val_dataloader, step=self._measure, optimizer=self.optimizer
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
        """Loss, perplexity and whatever else is measured: on this loader, or the validation data, or the
        training data.

        A hook may call it without a loader at the end of a batch or epoch, if there is validation data.
        """
        if dataloader is None and self.trainer.status == "training":
            measured = self.trainer.validate()
        else:
            chosen = next(
                each for each in (dataloader, self.val_dataloader, self.dataloader) if each is not None
            )
            measured = self.trainer.validate(self.model, chosen, step=self._measure)
        results = {name.removeprefix("val/"): value for name, value in measured.items()}
        if "loss" in results:
            results.setdefault("perplexity", perplexity_of(results["loss"]))
        return results

    @property
    def state(self) -> StateDict:
        """What hooks get: live, before, during and after a run."""
        return StateDict(self.trainer.state)

    @property
    def device(self) -> Any:
        """Where the model is trained."""
        return self.trainer.device

    # ---- hooks ---------------------------------------------------------------------------------------------

    def add_hook(self, hook: Any) -> Handle:
        """Add a hook; it takes the place of one with the same name."""
        return self.hooks.add_hook(hook)

    def remove_hook(self, name: str) -> Any:
        """Take a hook out by name and return it."""
        return self.hooks.remove_hook(name)

    def enable_hook(self, name: str) -> None:
        """Switch a hook on again."""
        self.hooks.enable_hook(name)

    def disable_hook(self, name: str) -> None:
        """Switch a hook off; it keeps its place."""
        self.hooks.disable_hook(name)

    def add_console_logging(self, log_every_n_batches: int = 10) -> Handle:
        """Print the loss every so many batches; the hook is called `console_log`."""
        return self.add_hook(ConsoleLogHook(log_every_n_batches))

    def add_json_logging(self, log_every_n_batches: int = 100) -> Handle:
        """Write structured records; the hook is called `json_log`."""
        return self.add_hook(JSONLogHook(log_every_n_batches))

    def add_checkpointing(self, save_every_n_epochs: int = 1) -> Handle:
        """Save every so many epochs; the hook is called `checkpoint`."""
        return self.add_hook(CheckpointHook(save_every_n_epochs))


class SimpleTrainer(BaseTrainer):
    """One process, one device."""


class AccelerateTrainer(BaseTrainer):
    """On Accelerate: one process, or as many as torchrun has started. `state["wrapped_model"]` is what it has
    prepared.
    """

    def make_trainer(self, device: Any, settings: dict[str, Any]) -> Trainer:
        """With the strategy for it."""
        return Trainer(
            strategy=Accelerated(device=device, precision=settings.pop("precision", 32)), **settings
        )


class _Ledger(Hook):
    """Sees to it that the state is true outside training too, and writes down what `train()` returns."""

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
        elif self.fitted is not None:  # an evaluation is told of the training before it
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


def _check(trainer: BaseTrainer, model: Any, options: dict[str, Any]) -> None:
    who = type(trainer).__name__
    if isinstance(model, Module):
        raise OptionError(
            f"{who} takes a plain nn.Module; {type(model).__name__} is a hookline.Module with steps and "
            "optimizers of its own: hookline.Trainer().fit(model, dataloader)."
        )
    refuse_unknown_options(who, (name for name in options if name not in OLD_NAMES), KNOWN)
