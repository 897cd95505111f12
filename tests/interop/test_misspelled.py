"""Hooks, modules and data modules of other packages: a method that is nearly the name of one that is called is refused."""

from __future__ import annotations

import logging
from typing import Any

import keras
import lightning.pytorch as pl
import pytest
import transformers
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from tiny import quiet

from hookline import HookError, no_event
from hookline.interop.lightning import Trainer as LightningTrainer

pytestmark = [pytest.mark.filterwarnings("ignore")]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("base", "wrong", "right"),
    [
        (pl.Callback, "on_train_btach_end", "on_train_batch_end"),
        (pl.Callback, "onTrainEnd", "on_train_end"),
        (pl.Callback, "load_statedict", "load_state_dict"),
        (pl.Callback, "on_train_epoch_ends", "on_train_epoch_end"),
        (pl.Callback, "on_train_batch_ended", "on_train_batch_end"),
        (pl.Callback, "on_training_epochs_end", "on_train_epoch_end"),
        (pl.Callback, "on_validate_start", "on_validation_start"),
        (pl.Callback, "train_epoch_end", "on_train_epoch_end"),
        (transformers.TrainerCallback, "on_step_edn", "on_step_end"),
        (keras.callbacks.Callback, "on_epoch_edn", "on_epoch_end"),
        (keras.callbacks.Callback, "on_batchend", "on_batch_end"),
        (keras.callbacks.Callback, "on_epoch_begins", "on_epoch_begin"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__module__.partition(".")[0],
)
def test_a_misspelled_method_of_a_callback_is_refused_when_it_is_added(base, wrong, right):
    mine = type("Mine", (base,), {wrong: nothing})
    with pytest.raises(HookError, match=f"Mine.{wrong} would never be called. Did you mean '{right}'"):
        quiet(hooks=[mine()])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("on_train_batch_ended", "on_train_batch_end"),
        ("on_train_btach_end", "on_train_batch_end"),
    ],
)
def test_lightnings_trainer_refuses_a_misspelled_method_of_a_callback_too(wrong, right):
    mine = type("Mine", (pl.Callback,), {wrong: nothing})
    with pytest.raises(HookError, match=f"Mine.{wrong} would never be called. Did you mean '{right}'"):
        LightningTrainer(callbacks=mine(), logger=False)


@pytest.mark.parametrize(
    ("name", "hint"), [("on_epoch_ended", " Did you mean 'on_train_epoch_end'?"), ("on_something", "")]
)
def test_a_method_that_is_no_event_is_a_warning_the_first_time(name, hint, caplog):
    mine = type(f"Mine_{name}", (pl.Callback,), {name: nothing})
    LightningTrainer(callbacks=mine(), logger=False)  # other code of a program may call it
    assert "would never be called" not in caplog.text
    quiet(hooks=[mine()])
    quiet(hooks=[mine()])
    said = [each.getMessage() for each in caplog.records if "would never be called" in each.getMessage()]
    assert said == [
        f"Mine_{name}.{name} would never be called.{hint} "
        "Mark it with @hookline.no_event if it is a method of your own."
    ]


def test_methods_that_a_class_or_a_base_of_another_package_calls_are_not_named(caplog):
    class Mine(EarlyStopping):
        def on_score(self) -> None: ...

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.on_score()

        def _improvement_message(self, current: Any) -> str:
            return ""

    class Theirs(pl.Callback):
        def on_alarm(self) -> None: ...

    class Ours(Theirs):
        def on_alarm(self) -> None: ...

    Theirs.__module__ = "lightning.pytorch"
    quiet(hooks=[Mine("x"), Ours()])
    assert "would never be called" not in caplog.text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("val_dataloder", "val_dataloader"),
        ("validation_setp", "validation_step"),
        ("training_stpe", "training_step"),
        ("configure_optimzers", "configure_optimizers"),
        ("on_train_epoch_edn", "on_train_epoch_end"),
    ],
)
def test_a_misspelled_step_or_loader_of_a_lightning_module_is_refused_before_the_run(wrong, right):
    wrong_module = type("Wrong", (BoringModel,), {wrong: nothing})
    with pytest.raises(HookError, match=f"Wrong.{wrong} would never be called. Did you mean '{right}'"):
        quiet(max_steps=1).fit(wrong_module())


def test_a_misspelled_loader_of_a_lightning_data_module_is_refused():
    wrong = type("Wrong", (BoringDataModule,), {"val_dataloder": nothing})
    with pytest.raises(
        HookError, match=r"Wrong.val_dataloder would never be called. Did you mean 'val_dataloader'"
    ):
        quiet(max_steps=1).fit(BoringModel(), datamodule=wrong())


def test_helpers_are_left_alone():
    class Mine(pl.Callback):
        def on_click(self, button: str) -> None: ...

        def setup_model(self) -> None: ...

        @no_event
        def on_train_btach_end(self) -> None: ...

    class Model(BoringModel):
        def on_policy(self) -> None: ...

        def validation_steps(self) -> None: ...

        def eval_dataloader(self) -> None: ...

        def state_dicts(self) -> None: ...

    trainer = quiet(hooks=[Mine()], max_steps=1)
    trainer.fit(Model())
    assert trainer.status == "completed"


def test_a_step_of_a_lightning_module_may_hand_its_arguments_on():
    class Base(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any) -> Any:
            return super().validation_step(batch, 0)

    class Model(Base):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.given = len(args)
            return super().training_step(*args, **kwargs)

        def validation_step(self, *args: Any) -> Any:
            return super().validation_step(*args)

    module = Model()
    trainer = quiet(max_steps=2, limit_val_batches=1)
    trainer.fit(module)
    assert (trainer.status, module.given) == ("completed", 2)
