"""Other trainers on the same model and data, each as its documentation shows it, with everything switched off
that can be.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from drivers import Driver, Training, Validating
from torch.utils.data import DataLoader
from work import optimizer


def lightning_options(folder: str) -> dict[str, Any]:
    """Return what all of Lightning's runs have in common."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return {
        "accelerator": "cpu",
        "devices": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }


class Listed:
    """A list as something to iterate over: Lightning takes a list for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def one_loader(batches: Any) -> Any:
    """Return it as Lightning wants one loader."""
    return Listed(batches) if isinstance(batches, list) else batches


def lightning(training: Training) -> None:
    """Train by Lightning."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Silent(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pass

    class Listening(Callback):
        last = -1

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.last = batch_idx

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.last = batch_idx

    case = training.case
    kind: type[Callback] = Listening if case.listening else Silent
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            callbacks=[kind() for _ in range(case.hooks)],
            logger=CSVLogger(folder) if case.row_every else False,
            log_every_n_steps=case.row_every or 50,
            max_epochs=training.data.epochs,
            **lightning_options(folder),
        )
        trainer.fit(training.module(LightningModule), one_loader(training.data.batches))


def lightning_validation(training: Training) -> None:
    """Validate by Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(logger=False, **lightning_options(folder))
        trainer.validate(
            training.module(LightningModule, mixin=Validating),
            one_loader(training.data.batches),
            verbose=False,
        )


class Forward:
    """A forward that is the whole training step, because wrappers only wrap a forward."""

    def forward(self, batch: Any, batch_idx: int) -> Any:
        """Compute the loss."""
        return self.training_step(batch, batch_idx)  # type: ignore[attr-defined]


def fabric(training: Training) -> None:
    """Train in a loop written by hand with Fabric's wrappers."""
    from lightning.fabric import Fabric

    helper = Fabric(accelerator="cpu", devices=1)
    plain, batches = training.module(mixin=Forward), training.data.batches
    model, updates = helper.setup(plain, optimizer(plain.parameters()))
    if isinstance(batches, DataLoader):
        batches = helper.setup_dataloaders(batches)
    for _ in range(training.data.epochs):
        for index, batch in enumerate(batches):
            updates.zero_grad()
            loss = model(batch, index)
            helper.backward(loss)
            updates.step()


def accelerate(training: Training) -> None:
    """Train in a loop written by hand with Accelerate's wrappers."""
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    plain, batches = training.module(mixin=Forward), training.data.batches
    model, updates = helper.prepare(plain, optimizer(plain.parameters()))
    if isinstance(batches, DataLoader):
        batches = helper.prepare(batches)
    for _ in range(training.data.epochs):
        for index, batch in enumerate(batches):
            updates.zero_grad()
            loss = model(batch, index)
            helper.backward(loss)
            updates.step()


def ignite(training: Training) -> None:
    """Train by an Engine of Ignite."""
    from ignite.engine import Engine

    model = training.module()
    updates = optimizer(model.parameters())

    def update(engine: Engine, batch: Any) -> Any:
        updates.zero_grad()
        loss = model.training_step(batch, engine.state.iteration)
        loss.backward()
        updates.step()
        return loss.detach()

    Engine(update).run(training.data.batches, max_epochs=training.data.epochs)


def transformers(training: Training) -> None:
    """Train by the Trainer of transformers, with a loader and a loss of our own."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    batches = training.data.batches

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return batches

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
            return model(inputs, 0)

    model = training.module(mixin=Forward)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=training.data.epochs,
            max_steps=training.data.steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            max_grad_norm=0,
            lr_scheduler_type="constant",
        )
        trainer = Own(model, arguments, optimizers=(optimizer(model.parameters()), None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()


TRAINING: dict[str, Driver] = {
    "lightning": lightning,
    "fabric": fabric,
    "accelerate": accelerate,
    "ignite": ignite,
    "transformers": transformers,
}
VALIDATION: dict[str, Driver] = {"lightning": lightning_validation}
OTHERS = ("fabric", "accelerate", "ignite", "transformers")
"""Take part only if asked for."""
MODULES, PACKAGES = {"fabric": "lightning"}, {"fabric": "lightning", "ignite": "pytorch-ignite"}
"""Where names of modules and of packages to install differ from the driver's."""


def installed(others: Sequence[str]) -> list[str]:
    """Return Lightning and those of the others that are installed; print which are not."""
    found = []
    for name in ("lightning", *others):
        if importlib.util.find_spec(MODULES.get(name, name)):
            found.append(name)
        else:
            print(
                f"{name}: left out, because it is not installed (pip install {PACKAGES.get(name, name)}).",
                flush=True,
            )
    return found
