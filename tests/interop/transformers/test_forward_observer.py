"""Losses and batches that are observed in the model's own calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interop.hosted import InOrder, transformers_trainer
from torch.nn import functional as F

import hookline
from hookline import Hook, HookError

pytestmark = pytest.mark.filterwarnings("default")


class Story(Hook):
    """Epochs, batches and validations as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def on_train_epoch_start(self, epoch: int) -> None:
        self.told.append(("epoch", epoch))

    def on_train_batch_start(self, batch_idx: int) -> None:
        self.told.append(batch_idx)

    def on_validation_start(self) -> None:
        self.told.append("val")

    def on_validation_batch_start(self, batch_idx: int, dataloader_idx: int) -> None:
        self.told.append(("on", dataloader_idx, batch_idx))

    def on_validation_batch_end(self) -> None:
        self.told.append("off")

    def on_validation_end(self, metrics: Any) -> None:
        self.told.append(sorted(key for key in metrics if key.startswith("val/")))

    def on_train_epoch_end(self) -> None:
        self.told.append("end")


def trainer_of(callback: Any, folder: Path, kind: type = InOrder, **options: Any) -> Any:
    """Of five batches, with another kind of Trainer."""
    made = transformers_trainer(
        [callback], folder, **{"num_train_epochs": 1, "eval_strategy": "no", **options}
    )
    made.__class__ = kind
    return made


class Another(InOrder):
    """Computes its loss from the outputs; the model's own is not used."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        outputs = model(**inputs)
        loss = 10 * F.mse_loss(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class More(InOrder):
    """Adds something to the model's loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] + 5 * outputs["logits"].pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class Losses(Hook):
    def on_step_end(self, loss: float) -> None: ...


class Replaces(Hook):
    def on_before_backward(self, loss: Any) -> Any:
        return loss * 0.0


@pytest.mark.parametrize("hook", [Losses, Replaces])
def test_a_loss_that_is_not_the_model_s_own_is_said_at_the_first_batch(hook: Any, tmp_path: Path) -> None:
    callback = hookline.hosts.transformers([hook()])
    with pytest.raises(HookError, match="TransformersNet returned one that was not differentiated"), callback:
        trainer_of(callback, tmp_path, Another).train()
    assert callback.line.global_step == 1


def test_hooks_that_do_not_ask_for_such_a_loss_are_served_and_told_no_other(tmp_path: Path) -> None:
    callback = hookline.hosts.transformers([Story()])
    with callback:
        trainer_of(callback, tmp_path, Another).train()
    assert callback.line.global_step == 5 and "train/loss" not in callback.line.metrics


def test_a_loss_that_has_more_in_it_than_the_model_s_own_is_warned_of_once(
    tmp_path: Path, caplog: Any
) -> None:
    for kind, count in ((InOrder, 0), (More, 1)):
        callback = hookline.hosts.transformers([Losses()])
        with callback:
            trainer_of(
                callback, tmp_path, kind, logging_steps=2, gradient_accumulation_steps=2, num_train_epochs=2
            ).train()
        assert caplog.text.count("Hooks see a loss of") == count


def test_a_batch_that_calls_the_model_several_times_is_one_batch_of_the_validation(tmp_path: Path) -> None:
    class Generates(InOrder):
        def prediction_step(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
            with torch.no_grad():
                for _ in range(3):
                    model(x=inputs["x"], labels=inputs["labels"] * 0)
            return super().prediction_step(model, inputs, *given, **options)

    story = Story()
    callback = hookline.hosts.transformers([story])
    with callback:
        trainer_of(callback, tmp_path, Generates, eval_strategy="epoch").train()
    assert [each for each in story.told if isinstance(each, str | tuple)][1:-1] == [
        "val",
        ("on", 0, 0),
        "off",
        ("on", 0, 1),
        "off",
    ]
