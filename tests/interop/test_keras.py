"""Keras callbacks in Hookline's trainer, as they are. Keras runs on torch here."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from test_budgets import per_step, with_hooks
from tiny import Net, batches, quiet
from torch.nn import functional as F

import hookline
from hookline import NonFiniteLoss
from hookline.engine.events import EVENTS
from hookline.interop.keras import KERAS_METHODS, OLDER_NAMES

callbacks = keras.callbacks
pytestmark = pytest.mark.filterwarnings("default")


class Wanders(Net):
    """Its validation loss is as told, epoch by epoch, and its weight is the epoch's number."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__(lr=0.0)
        self.losses = losses

    def on_train_epoch_start(self, epoch: int) -> None:
        with torch.no_grad():
            self.layer.weight.fill_(epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(self.losses[self.trainer.current_epoch])


def test_early_stopping_stops_the_run() -> None:
    trainer = quiet(hooks=[callbacks.EarlyStopping(patience=2)], max_epochs=10)
    trainer.fit(Wanders([3, 2, 2.5, 2.6, 1, 1, 1, 1, 1, 1]), batches(2), batches(1))
    assert trainer.state.epochs_seen == 4
    assert trainer.state.stop_reason == "a Keras callback set model.stop_training"


def test_early_stopping_brings_the_best_weights_back() -> None:
    module = Wanders([3, 2, 2.5, 2.6])
    quiet(hooks=[callbacks.EarlyStopping(patience=2, restore_best_weights=True)], max_epochs=4).fit(
        module, batches(2), batches(1)
    )
    assert torch.equal(module.layer.weight, torch.ones(2, 4))


def test_csv_logger_writes_keras_names(tmp_path: Path) -> None:
    rates = callbacks.LearningRateScheduler(lambda epoch, lr: 0.5 / (epoch + 1))
    trainer = quiet(hooks=[rates, callbacks.CSVLogger(str(tmp_path / "log.csv"))], max_epochs=2)
    trainer.fit(Net(), batches(2), batches(1))
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert {"loss", "val_loss", "learning_rate"} <= set(rows[0])
    assert [float(row["learning_rate"]) for row in rows] == [
        0.5,
        0.25,
    ]  # written into the logs by the other callback
    assert float(rows[1]["val_loss"]) == pytest.approx(trainer.metrics["val/loss"])


def test_learning_rate_scheduler_sets_the_rate_of_every_group() -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(
                [{"params": [self.layer.weight], "lr": 1.0}, {"params": [self.layer.bias], "lr": 2.0}]
            )

    trainer = quiet(hooks=[callbacks.LearningRateScheduler(lambda epoch: 0.125)])
    trainer.fit(Two(), batches(1))
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.125, 0.125]


def test_reduce_lr_on_plateau_reduces() -> None:
    trainer = quiet(
        hooks=[callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1)], max_epochs=3
    )

    class Flat(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.tensor(1.0)

    trainer.fit(Flat(lr=0.8), batches(1), batches(1))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2)


def test_lambda_callback_hears_what_it_was_given() -> None:
    seen: list[Any] = []
    hook = callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append("begin"),
        on_epoch_begin=lambda epoch, logs: seen.append(f"epoch {epoch}"),
        on_train_batch_end=lambda batch, logs: seen.append((batch, sorted(logs))),
        on_train_end=lambda logs: seen.append("end"),
    )
    quiet(hooks=[hook]).fit(Net(), batches(2))
    assert seen == ["begin", "epoch 0", (0, ["loss"]), (1, ["loss"]), "end"]


def test_terminate_on_nan_stops_the_run() -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1.0)

    trainer = quiet(hooks=[callbacks.TerminateOnNaN()], nonfinite="skip")
    trainer.fit(Breaks(), batches(4))
    assert trainer.status == "stopped" and trainer.state.batches_seen == 2


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_after_terminate_on_nan_the_history_has_its_loss_as_in_keras(at: int, nonfinite: str) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == at else 1.0)

    history = callbacks.History()
    trainer = quiet(hooks=[callbacks.TerminateOnNaN(), history], nonfinite=nonfinite, max_epochs=3)
    with contextlib.suppress(NonFiniteLoss):  # the default ends the run with this error
        trainer.fit(Breaks(), batches(4))

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    inputs = np.ones((8, 2), "float32")
    inputs[2 * at] = np.nan
    stops = callbacks.TerminateOnNaN()
    theirs = model.fit(
        inputs, np.ones((8, 1)), batch_size=2, epochs=3, shuffle=False, verbose=0, callbacks=[stops]
    )
    assert np.isnan(theirs.history["loss"]).all() and np.isnan(history.history["loss"]).all()
    assert history.epoch == theirs.epoch == [0]


def test_one_s_own_callback_sees_the_model_and_hears_the_validation_as_a_test() -> None:
    class Own(callbacks.Callback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_train_begin(self, logs: Any = None) -> None:
            self.seen.append(
                (self.params["epochs"], self.model.layer.in_features, self.model.optimizer.learning_rate)
            )

        def on_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.seen.append(f"batch {batch}")

        def on_test_begin(self, logs: Any = None) -> None:
            self.seen.append("test")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(sorted(logs))

        def on_test_end(self, logs: Any = None) -> None:
            self.seen.append(sorted(logs))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen.append(sorted(logs))

        def on_predict_end(self, logs: Any = None) -> None:
            self.seen.append("predicted")

    own = Own()
    trainer = quiet(hooks=[own])
    net = Net()
    trainer.fit(net, batches(1), batches(1))
    trainer.predict(net, batches(1))
    assert own.seen == [(1, 4, 0.1), "batch 0", "test", ["loss"], ["loss"], ["loss", "val_loss"], "predicted"]


@pytest.mark.parametrize(
    ("make", "needs", "instead"),
    [
        (
            lambda: callbacks.ModelCheckpoint("here.keras"),
            r"self\.model\.save",
            "hookline.hooks.ModelCheckpoint",
        ),
        (lambda: callbacks.BackupAndRestore("here"), r"self\.model\.", "resume='auto'"),
        (lambda: callbacks.TensorBoard("here"), r"self\.model\.", "hookline.loggers.TensorBoard"),
        (
            lambda: callbacks.SwapEMAWeights(),
            r"self\.model\.optimizer\.use_ema",
            "hookline.hooks.WeightAveraging",
        ),
    ],
    ids=["ModelCheckpoint", "BackupAndRestore", "TensorBoard", "SwapEMAWeights"],
)
def test_what_needs_a_keras_model_is_refused_when_it_is_added(make: Any, needs: str, instead: str) -> None:
    with pytest.raises(hookline.HookError, match=needs) as error:
        quiet(hooks=[make()])
    assert instead in str(error.value)


def test_a_metric_whose_direction_only_keras_would_know_is_refused_when_it_is_added() -> None:
    with pytest.raises(hookline.HookError, match=r"mode='auto'.*Pass mode='min' or mode='max'"):
        quiet(hooks=[callbacks.EarlyStopping(monitor="val_accuracy")])
    quiet(hooks=[callbacks.EarlyStopping(monitor="val_accuracy", mode="max")])


def test_a_part_of_the_optimizer_that_is_not_there_is_named() -> None:
    class Asks(callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.optimizer.momentum = 0.5

    with pytest.raises(hookline.HookError, match=r"sets model.optimizer.momentum, which has no effect"):
        quiet(hooks=[Asks()]).fit(Net(), batches(1))


def test_it_is_recognised_named_and_found_again() -> None:
    hook = callbacks.EarlyStopping()
    trainer = quiet(hooks=[hook])
    assert hook in trainer.hooks and trainer.hooks.list_hooks() == ["early_stopping"]
    assert "Keras callback" in str(trainer.explain())


def test_it_also_runs_in_a_hand_written_loop() -> None:
    net = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    line = hookline.Line(net, sgd, hooks=[callbacks.EarlyStopping(patience=1)])
    with line:
        for _ in line.epochs(10):
            for x, y in line.epoch(batches(1)):
                line.backward(F.mse_loss(net(x), y))
                sgd.step()
            for x, y in line.validation(batches(1)):
                line.log("val/loss", F.mse_loss(net(x), y))
    assert line.state.epochs_seen == 2


def test_the_table_knows_every_method_of_the_package() -> None:
    theirs = {name for name in vars(callbacks.Callback) if name.startswith("on_")}
    assert theirs == {*KERAS_METHODS, *OLDER_NAMES.values()}
    assert all(row.event in EVENTS for rows in KERAS_METHODS.values() for row in rows)


def test_a_callback_costs_few_calls_over_its_own() -> None:
    class Silent(callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...

    cost = per_step(with_hooks(Silent())) - per_step(with_hooks())
    assert 1 <= cost <= 5  # its own, its account, the slot, the binding, the logs


def test_a_callback_knows_how_long_the_training_is_when_it_begins() -> None:
    class Asks(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.found = dict(self.params)

    callback = Asks()
    quiet(hooks=[callback], max_epochs=2).fit(Net(), batches(3))
    assert callback.found == {"verbose": 1, "epochs": 2, "steps": 3}


def test_a_callback_hears_of_no_test_before_the_training_begins() -> None:
    class Counts(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.tests, self.batches = 0, 0

        def on_test_begin(self, logs: Any = None) -> None:
            self.tests += 1

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1

    callback = Counts()
    quiet(hooks=[callback], num_sanity_val_steps=2).fit(Net(), batches(2), batches(3))
    assert (callback.tests, callback.batches) == (1, 3)


def test_the_learning_rate_can_be_assigned_as_a_variable() -> None:
    class Assigns(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            rate = self.model.optimizer.learning_rate
            rate.assign(rate.numpy() / 2)

    trainer = quiet(hooks=[Assigns()], max_epochs=2)
    trainer.fit(Net(lr=0.4), batches(1))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)


def test_the_best_weights_come_back_exactly_in_bfloat16_too() -> None:
    best: list[Any] = []

    class Worse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bfloat16()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([each.bfloat16() for each in batch], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            best.append([each.detach().clone() for each in self.parameters()])
            return torch.tensor(float(self.trainer.current_epoch))  # the first is the best

    net = Worse()
    stop = callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    quiet(hooks=[stop], max_epochs=4).fit(net, batches(2), batches(1))
    assert all(torch.equal(a, b) for a, b in zip(best[0], net.parameters(), strict=True))
    assert not torch.equal(best[0][0], best[1][0])


def test_one_s_own_callback_may_want_what_the_module_has_of_its_own() -> None:
    class Layers(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.found = len(self.model.layers)

    class Has(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])

    callback = Layers()
    quiet(hooks=[callback]).fit(Has(), batches(1))
    assert callback.found == 1
    with pytest.raises(
        hookline.HookError,
        match=r"Layers.on_train_begin needs self.model.layers, which only a Keras model has",
    ):
        quiet(hooks=[Layers()]).fit(Net(), batches(1))


def test_a_batch_s_logs_are_shared_by_all_callbacks_of_that_batch() -> None:
    class Writes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert "mine" not in logs
            logs["mine"] = batch

    class Reads(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(logs["mine"])

    reads = Reads()
    quiet(hooks=[Writes(), reads]).fit(Net(), batches(3))
    assert reads.seen == [0, 1, 2]
