"""The audit of real callbacks of Lightning, transformers and Keras: it names what they change, and nothing else."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from interop.test_callback_tables import KERAS, LIGHTNING, Backbone
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader

import hookline
from hookline.audit import observation as kinds

pytestmark = pytest.mark.filterwarnings("default")
CHANGE: dict[str, set[str]] = {
    "BackboneFinetuning": {kinds.REQUIRES_GRAD, kinds.LEARNING_RATES, kinds.OPTIMIZER_SETTINGS, kinds.MODES},
    "BaseFinetuning": {kinds.REQUIRES_GRAD, kinds.LEARNING_RATES, kinds.OPTIMIZER_SETTINGS, kinds.MODES},
    "EMAWeightAveraging": {kinds.PARAMETERS, kinds.BUFFERS},
    "ModelPruning": {
        kinds.PARAMETERS,
        kinds.BUFFERS,
        kinds.GRADIENTS,
        kinds.MODULE_HOOKS,
        kinds.REQUIRES_GRAD,
    },
    "StochasticWeightAveraging": {
        kinds.PARAMETERS,
        kinds.BUFFERS,
        kinds.LEARNING_RATES,
        kinds.OPTIMIZER_SETTINGS,
    },
    "WeightAveraging": {kinds.PARAMETERS, kinds.BUFFERS},
    "LearningRateScheduler": {kinds.LEARNING_RATES},
    "ReduceLROnPlateau": {kinds.LEARNING_RATES},
}


def changed(trainer: Any) -> set[str]:
    return {row.kind for row in trainer.hooks.changes()}


@pytest.mark.parametrize("name", LIGHTNING)
def test_a_callback_of_lightning(name: str) -> None:
    trainer = quiet(
        hooks=[LIGHTNING[name]()],
        audit=True,
        max_epochs=3,
        logger=pl.loggers.CSVLogger("logs"),
        log_every_n_steps=1,
    )
    trainer.fit(Backbone(), DataLoader(torch.ones(8, 32), 2))
    assert changed(trainer) <= CHANGE.get(name, set())
    assert changed(trainer) or name not in CHANGE


@pytest.mark.parametrize("name", KERAS)
def test_a_callback_of_keras(name: str) -> None:
    trainer = quiet(hooks=[KERAS[name]()], audit=True, max_epochs=2)
    trainer.fit(Net(), batches(2), batches(1))
    assert changed(trainer) <= CHANGE.get(name, set())


@pytest.mark.parametrize("name", ["EarlyStoppingCallback", "PrinterCallback", "ProgressCallback"])
def test_a_callback_of_transformers(name: str) -> None:
    trainer = quiet(hooks=[getattr(transformers, name)()], audit=True, max_epochs=2, log_every_n_steps=1)
    trainer.fit(Net(), batches(2), batches(1))
    assert changed(trainer) == set()


class Spoils(pl.Callback):  # type: ignore[misc]
    observes = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        pl_module.eval()


def test_a_callback_of_lightning_that_promises_to_observe_is_held_to_it() -> None:
    with pytest.raises(hookline.ObserverError, match="'spoils' .* train/eval modes"):
        quiet(hooks=[Spoils()], audit=True).fit(Net(), batches(2))
