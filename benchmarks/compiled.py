"""Compiled steps: by hand, by Hookline, by Lightning. They alternate outside the step, because a graph cannot
wait for a turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from drivers import Driver, Training
from peers import lightning_options, one_loader
from work import optimizer

from hookline import Hook, HooklineError, Module, Trainer


class Optimized:
    """The optimizer, for trainers."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the bare loop."""
        return optimizer(self.parameters())  # type: ignore[attr-defined]


def module(training: Training, *bases: type) -> Any:
    """Make the model, without the mixin that alternates."""
    return type(training.model.__name__, (Optimized, training.model, *bases), {})()


def bare(training: Training) -> None:
    """Train without compiling."""
    model = module(training)
    updates = optimizer(model.parameters())
    for index, batch in enumerate(training.data.batches):
        updates.zero_grad()
        loss = model.training_step(batch, index)
        loss.backward()
        updates.step()
        training.pace()


def by_hand(training: Training) -> None:
    """Compile two graphs: forward, loss and backward; and the optimizer."""
    model = module(training)
    updates = optimizer(model.parameters())
    parameters = list(model.parameters())

    def differentiate(batch: Any) -> Any:
        loss = model.training_step(batch, 0)
        loss.backward()
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        differentiated = torch.compile(differentiate, fullgraph=True)
        updated = torch.compile(updates.step.__wrapped__.__get__(updates))  # type: ignore[attr-defined]
        for batch in training.data.batches:
            for parameter in parameters:
                parameter.grad = None
            differentiated(batch)
            updated()
            training.pace()


class Paced(Hook):
    """Alternates at the end of every batch."""

    def __init__(self, pace: Callable[[], None]) -> None:
        self.pace = pace

    def on_train_batch_end(self) -> None:
        """Wait for the next turn."""
        self.pace()


def hookline(training: Training) -> None:
    """Train by Hookline with a compiled step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            hooks=[Paced(training.pace)],
            logger=False,
            max_epochs=1,
            device="cpu",
            enable_progress_bar=False,
            run_dir=folder,
            compile="step",
        )
        trainer.fit(module(training, Module), training.data.batches)


def lightning(training: Training) -> None:
    """Train by Lightning with a compiled module, which is what it offers."""
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Pacing(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            training.pace()

    with tempfile.TemporaryDirectory() as folder:
        trainer = LightningTrainer(
            callbacks=[Pacing()], logger=False, max_epochs=1, **lightning_options(folder)
        )
        trainer.fit(torch.compile(module(training, LightningModule)), one_loader(training.data.batches))  # type: ignore[arg-type]


COMPILED: dict[str, Driver] = {"bare": bare, "by hand": by_hand, "hookline": hookline, "lightning": lightning}


def missing() -> str:
    """Return why Hookline has no compiled step here, or nothing."""
    try:
        Trainer(compile="step")
    except HooklineError as error:
        return str(error)
    return ""
