"""Runs of transformers that are out of the ordinary: of several datasets, with losses of their own, after a failure, cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from interop.hosted import VAL, InOrder, TransformersNet, samples, transformers_trainer
from safetensors.torch import load_file
from torch.nn import functional as F

import hookline
from hookline import Hook, HookError
from hookline.hooks import EarlyStopping, WeightAveraging
from hookline.loggers import CSV

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


# ---- losses of the Trainer's own -----------------------------------------------------------------------------------------


# ---- after a failure, and cut short --------------------------------------------------------------------------------------


class Breaks(TransformersNet):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any, labels: Any = None) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("broken")
        return super().forward(x, labels)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_run_after_a_failed_one_is_told_from_its_first_batch_and_nothing_of_the_old(
    is_told: bool, tmp_path: Path
) -> None:
    class Saves(Hook):
        def on_train_batch_start(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 2:
                trainer.save_checkpoint(tmp_path / "never")

    story = Story()
    callback = hookline.hosts.transformers([story, Saves()])
    trainer = trainer_of(callback, tmp_path)
    trainer.model = trainer.model_wrapped = Breaks()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="broken"):
        if is_told:
            with callback:
                trainer.train()
        else:
            trainer.train()
    assert story.told == [("epoch", 0), 0, 1, 2]
    story.told.clear()
    callback.line.hooks.remove("saves")
    with callback:
        trainer.train()
    assert story.told == [("epoch", 0), 0, 1, 2, 3, 4, "end"]
    assert not (tmp_path / "never").exists()


def test_epochs_that_end_early_are_counted_one_by_one(tmp_path: Path) -> None:
    class Cuts(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    story = Story()
    callback = hookline.hosts.transformers([story])
    trainer = trainer_of(callback, tmp_path, num_train_epochs=3)
    trainer.add_callback(Cuts())
    with callback:
        trainer.train()
    whole = [0, 1, 2, 3, 4, "end"]
    assert story.told == [("epoch", 0), 0, 1, "end", ("epoch", 1), *whole, ("epoch", 2), *whole]


# ---- evaluation ----------------------------------------------------------------------------------------------------------


def test_several_datasets_are_one_validation(tmp_path: Path) -> None:
    story = Story()
    callback = hookline.hosts.transformers([story, EarlyStopping("val/b_loss")])
    trainer = trainer_of(callback, tmp_path, num_train_epochs=2, eval_strategy="epoch")
    trainer.eval_dataset = {"a": samples(VAL[:1]), "b": samples(VAL)}
    with callback:
        trainer.train()
    told = [each for each in story.told if not isinstance(each, int)]
    validation = [
        "val",
        ("on", 0, 0),
        "off",
        ("on", 1, 0),
        "off",
        ("on", 1, 1),
        "off",
        ["val/a_loss", "val/b_loss", "val/loss"],
    ]
    assert told == [("epoch", 0), *validation, "end", ("epoch", 1), *validation, "end"]
    assert callback.line.metrics["val/b_loss"] == callback.line.metrics["eval_b_loss"]


def test_weights_that_are_saved_between_two_datasets_are_those_of_the_training(tmp_path: Path) -> None:
    """In the first round it is not known which dataset is the last: transformers saves while the averaged weights are in place."""
    plain: dict[str, Any] = {}

    class Saves(transformers.TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
            plain.update({key: value.clone() for key, value in model.state_dict().items()})

    callback = hookline.hosts.transformers([WeightAveraging(decay=0.5)])
    trainer = trainer_of(callback, tmp_path, eval_strategy="epoch", save_strategy="epoch")
    trainer.eval_dataset = {"a": samples(VAL), "b": samples(VAL)}
    trainer.add_callback(Saves())
    with callback:
        trainer.train()
    saved = load_file(tmp_path / "checkpoint-5" / "model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in plain.items())
    losses = {
        key: value
        for row in trainer.state.log_history
        for key, value in row.items()
        if key in ("eval_a_loss", "eval_b_loss")
    }
    assert losses["eval_a_loss"] == losses["eval_b_loss"]  # both of the averaged weights


def test_another_run_begins_without_the_metrics_of_the_one_before(tmp_path: Path) -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def on_train_start(self, state: Any) -> None:
            self.seen.append(len(state.metrics))

    looks = Looks()
    callback = hookline.hosts.transformers([looks])
    for _ in range(2):
        with callback:
            trainer_of(callback, tmp_path, eval_strategy="epoch").train()
    assert looks.seen == [0, 0]


# ---- what is kept and written --------------------------------------------------------------------------------------------


def test_several_callbacks_that_a_checkpoint_could_not_tell_apart_are_refused(tmp_path: Path) -> None:
    one, two = hookline.hosts.transformers([Story()]), hookline.hosts.transformers([Story()])
    trainer = trainer_of(one, tmp_path)
    trainer = InOrder(
        model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, callbacks=[one, two]
    )
    with pytest.raises(HookError, match="pass all hooks to one"), one, two:
        trainer.train()


def test_what_is_logged_at_the_very_end_goes_to_a_logger_of_one_s_own(tmp_path: Path) -> None:
    class Says(Hook):
        def on_train_end(self, trainer: Any) -> None:
            trainer.log("score", torch.tensor(2.0))

    callback = hookline.hosts.transformers([Says()], logger=CSV(), run_dir=tmp_path)
    with callback:
        trainer_of(callback, tmp_path, logging_steps=1).train()
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows[-1].split(",")[header.split(",").index("score")] == "2.0"


# ---- losses and batches that are observed in the model's own calls --------------------------------------------------


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
