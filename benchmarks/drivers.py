"""Who drives the training: a bare loop, Hookline, Lightning; and with which hooks and loggers."""

from __future__ import annotations

import logging
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.loggers import CSVLogger
from work import Work, optimizer

from hookline import Hook, JSONLines, Module, Trainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


@dataclass(frozen=True)
class Case:
    """One row of the comparison."""

    name: str
    hooks: int = 0
    listening: bool = False
    row_every: int = 0
    """Log a metric in every step, and write a row after so many; 0: no logging at all."""
    accounting: bool = True
    drivers: tuple[str, ...] = ("hookline", "lightning")


CONTROLS = (Case("the same loop again", drivers=("bare",)), Case("gradients cleared by hand", drivers=("bare by hand",)))
"""Other bare loops: how far apart equal things come out, and what `Optimizer.zero_grad` costs, which Hookline does without."""


CASES = (
    Case("no hooks"),
    Case("10 silent hooks", 10),
    Case("50 silent hooks", 50),
    Case("10 listening hooks", 10, listening=True),
    Case("50 listening hooks", 50, listening=True),
    Case("10 listening hooks, accounting off", 10, listening=True, accounting=False, drivers=("hookline",)),
    Case("no hooks, logging, every 50th step written", row_every=50),
    Case("no hooks, logging", row_every=1),
    Case("10 silent hooks, logging", 10, row_every=1),
    Case("50 silent hooks, logging", 50, row_every=1),
    Case("10 listening hooks, logging", 10, listening=True, row_every=1),
    Case("50 listening hooks, logging", 50, listening=True, row_every=1),
)


def bare(work: Work, data: Any) -> None:
    """What one would write without a trainer."""
    model = work.model()
    updates = optimizer(model.parameters())
    for index, batch in enumerate(data):
        updates.zero_grad()
        loss = model.training_step(batch, index)
        loss.backward()
        updates.step()


def bare_by_hand(work: Work, data: Any) -> None:
    """The same, without the profiling range that `Optimizer.zero_grad` opens."""
    model = work.model()
    updates = optimizer(model.parameters())
    for index, batch in enumerate(data):
        for group in updates.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        loss = model.training_step(batch, index)
        loss.backward()
        updates.step()


class Optimized:
    """What both trainers want to know besides the step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in the bare loop."""
        return optimizer(self.parameters())  # type: ignore[attr-defined]


class Logging:
    """Logs its loss in every step, in a call that both trainers know."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The step, and a metric."""
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.log("seen", loss)  # type: ignore[attr-defined]
        return loss


def _module(work: Work, case: Case, base: type) -> Any:
    parts = (Optimized, Logging, work.model, base) if case.row_every else (Optimized, work.model, base)
    return type(work.model.__name__, parts, {})()


# ---- Hookline ----------------------------------------------------------------------------------------------------


class HooklineSilent(Hook):
    """Overrides nothing on the batch path."""

    def on_train_epoch_end(self) -> None:
        """Once per epoch."""


class HooklineListening(Hook):
    """Hears the start and the end of every batch."""

    last = -1

    def on_train_batch_start(self, batch_idx: int) -> None:
        """Remember where."""
        self.last = batch_idx

    def on_train_batch_end(self, batch_idx: int) -> None:
        """Remember where."""
        self.last = batch_idx


def hookline(work: Work, data: Any, case: Case) -> None:
    """One epoch by Hookline, with the options it has by default."""
    kind = HooklineListening if case.listening else HooklineSilent
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            hooks=[kind() for _ in range(case.hooks)],
            logger=JSONLines() if case.row_every else False,
            log_every_n_steps=case.row_every or 50,
            accounting=case.accounting,
            max_epochs=1,
            device="cpu",
            enable_progress_bar=False,
            run_dir=folder,
        )
        trainer.fit(_module(work, case, Module), data)


# ---- Lightning ---------------------------------------------------------------------------------------------------


class LightningSilent(Callback):
    """Overrides nothing on the batch path."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Once per epoch."""


class LightningListening(Callback):
    """Hears the start and the end of every batch."""

    last = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Remember where."""
        self.last = batch_idx

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Remember where."""
        self.last = batch_idx


def lightning(work: Work, data: Any, case: Case) -> None:
    """One epoch by Lightning, with everything switched off that is not asked for."""
    kind = LightningListening if case.listening else LightningSilent
    with tempfile.TemporaryDirectory() as folder:
        trainer = LightningTrainer(
            callbacks=[kind() for _ in range(case.hooks)],
            logger=CSVLogger(folder) if case.row_every else False,
            log_every_n_steps=case.row_every or 50,
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
        )
        trainer.fit(_module(work, case, LightningModule), data)


DRIVERS = {
    "hookline": hookline,
    "lightning": lightning,
    "bare": lambda work, data, case: bare(work, data),
    "bare by hand": lambda work, data, case: bare_by_hand(work, data),
}
