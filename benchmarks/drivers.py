"""Who drives the training: loops written by hand, and Hookline. `peers.py` has the other trainers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sources import Data
from torch import nn
from work import optimizer

from hookline import Hook, JSONLines, Module, Trainer


@dataclass(frozen=True)
class Case:
    """What a training has besides its model and its data."""

    name: str = ""
    hooks: int = 0
    listening: bool = False
    row_every: int = 0
    """Log a metric in every step, and write a row after so many; 0: no logging at all."""
    accounting: bool = True
    drivers: tuple[str, ...] = ("hookline", "lightning")
    aim: float | None = None
    """What Hookline's median ratio to the bare loop should be at most."""


@dataclass(frozen=True)
class Training:
    """What a driver is given. All drivers train the same model on the same data."""

    model: type[nn.Module]
    data: Data
    case: Case
    pace: Callable[[], None]
    """Called once in each step: see `lockstep.py`."""

    def module(self, *bases: type, mixin: type | None = None) -> Any:
        """Make the model with the base that a trainer wants, and with a step of another stage."""
        logging, more = (Logging,) if self.case.row_every else (), (mixin,) if mixin else ()
        made: Any = type(self.model.__name__, (*logging, *more, Paced, self.model, *bases), {})()
        made.pace = self.pace
        return made


class Paced:
    """Alternates with other trainings from within its own step, which costs the same whoever calls it."""

    pace: Callable[[], None]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute the loss."""
        self.pace()
        return super().training_step(batch, batch_idx)  # type: ignore[misc]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the bare loop."""
        return optimizer(self.parameters())  # type: ignore[attr-defined]


class Logging:
    """Logs its loss in every step, in a call that both trainers know."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute the loss and log it."""
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.log("seen", loss)  # type: ignore[attr-defined]
        return loss


class Validating:
    """Logs the mean loss of a validation pass, in a call that both trainers know."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Compute the loss and log it."""
        self.log("val_loss", self.training_step(batch, batch_idx))  # type: ignore[attr-defined]


# ---- by hand -----------------------------------------------------------------------------------------------


def bare(training: Training) -> None:
    """Train as one would without a trainer."""
    model = training.module()
    updates = optimizer(model.parameters())
    for _ in range(training.data.epochs):
        for index, batch in enumerate(training.data.batches):
            updates.zero_grad()
            loss = model.training_step(batch, index)
            loss.backward()
            updates.step()


def bare_by_hand(training: Training) -> None:
    """Train the same, without the profiling range that `Optimizer.zero_grad` opens."""
    model = training.module()
    updates = optimizer(model.parameters())
    for _ in range(training.data.epochs):
        for index, batch in enumerate(training.data.batches):
            for group in updates.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            loss = model.training_step(batch, index)
            loss.backward()
            updates.step()


def bare_validation(training: Training) -> torch.Tensor:
    """Return the mean loss over all batches."""
    model, total = training.module(), torch.zeros(())
    model.eval()
    with torch.no_grad():
        for index, batch in enumerate(training.data.batches):
            total += model.training_step(batch, index)
    return total / (index + 1)


# ---- Hookline ----------------------------------------------------------------------------------------------


class Silent(Hook):
    """Overrides nothing on the batch path."""

    def on_train_epoch_end(self) -> None:
        """Do nothing, once per epoch."""


class Listening(Hook):
    """Listens to the start and the end of every batch, and requests what Lightning passes there."""

    last = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Store the batch's number."""
        self.last = batch_idx

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the batch's number."""
        self.last = batch_idx


def hookline(training: Training) -> None:
    """Train by Hookline, with the options it has by default."""
    case = training.case
    kind = Listening if case.listening else Silent
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            hooks=[kind() for _ in range(case.hooks)],
            logger=JSONLines() if case.row_every else False,
            log_every_n_steps=case.row_every or 50,
            accounting=case.accounting,
            max_epochs=training.data.epochs,
            device="cpu",
            enable_progress_bar=False,
            run_dir=folder,
        )
        trainer.fit(training.module(Module), training.data.batches)


def hookline_validation(training: Training) -> None:
    """Validate by Hookline."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(logger=False, device="cpu", enable_progress_bar=False, run_dir=folder)
        trainer.validate(training.module(Module, mixin=Validating), training.data.batches)


Driver = Callable[[Training], object]

TRAINING: dict[str, Driver] = {"bare": bare, "by hand": bare_by_hand, "hookline": hookline}
VALIDATION: dict[str, Driver] = {"bare": bare_validation, "hookline": hookline_validation}
