"""Keras callbacks among Hookline's hooks, unchanged: EarlyStopping, CSVLogger, LearningRateScheduler, and
your own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hookline.engine.binding import Binding
from hookline.engine.events import EventTable
from hookline.engine.listener import Listener, refuse_misspelled
from hookline.engine.source_text import attributes_read
from hookline.interop.adapter import AdoptedCallback, Row
from hookline.run.state_parts import fact
from hookline.util.errors import HookError

# ---- What `self.model` is in a Hookline run, and metrics under Keras' names


class ModelView:
    """The module of the run, with the attributes that callbacks use of a Keras model."""

    def __init__(self) -> None:
        self._state: Any = None
        self.optimizer: OptimizerView | None = None

    def _attach(self, state: Any) -> None:
        self._state = state
        self.optimizer = OptimizerView(state)

    @property
    def stop_training(self) -> bool:
        """Return whether the run is to stop; set to True, the run ends at the next batch boundary."""
        return bool(self._state.should_stop)

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        if stop:
            self._state.request_stop("a Keras callback set model.stop_training")

    def get_weights(self) -> list[Any]:
        """Return copies of all weights and buffers, as arrays."""
        return [_array(tensor.detach().cpu()) for tensor in self._state.module.state_dict().values()]

    def set_weights(self, weights: list[Any]) -> None:
        """Copy such arrays into the weights and buffers."""
        with torch.no_grad():
            for tensor, values in zip(self._state.module.state_dict().values(), weights, strict=True):
                tensor.copy_(torch.as_tensor(values))

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute from the module."""
        if name.startswith("_") or self._state is None:
            raise AttributeError(name)
        return getattr(self._state.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._state.module(*args, **kwargs)


class Rate(float):
    """A learning rate with the methods that callbacks call on a variable of Keras."""

    owner: OptimizerView

    def assign(self, rate: Any) -> None:
        """Set the learning rate of the optimizer."""
        self.owner.learning_rate = rate

    def numpy(self) -> float:
        """Return the number."""
        return float(self)


class OptimizerView:
    """The learning rate and the number of updates of the first optimizer."""

    def __init__(self, state: Any) -> None:
        object.__setattr__(self, "_state", state)

    @property
    def learning_rate(self) -> Rate:
        """Return the rate of the first parameter group; setting it sets all groups."""
        rate = Rate(self._state.optimizers[0].param_groups[0]["lr"])
        rate.owner = self
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        for group in self._state.optimizers[0].param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)

    lr = learning_rate

    iterations: int = fact("_state.step", "Return the number of updates so far.")

    def __getattr__(self, name: str) -> Any:
        """Reject attributes that a Hookline run does not have. Keras itself tests for `optimizers` and
        `inner_optimizer`.
        """
        if name.startswith("_") or name in ("optimizers", "inner_optimizer"):
            raise AttributeError(name)
        raise HookError(
            f"A Keras callback reads model.optimizer.{name}. A Hookline run has learning_rate and "
            "iterations; torch's own optimizers are in `trainer.optimizers`."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("learning_rate", "lr"):
            raise HookError(
                f"A Keras callback sets model.optimizer.{name}, which has no effect in a Hookline run."
            )
        object.__setattr__(self, name, value)


def _array(tensor: torch.Tensor) -> Any:
    """Return a copy as an array; numpy has no bfloat16, so it becomes float32."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy().copy()


def epoch_logs(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics under Keras' names: `train/loss` -> `loss`, `val/loss` -> `val_loss`; others keep their
    names.
    """
    return {
        key.replace("val/", "val_", 1) if key.startswith("val/") else key.removeprefix("train/"): value
        for key, value in metrics.items()
    }


def test_logs(metrics: Mapping[str, float], prefix: str) -> dict[str, Any]:
    """Return the results of a standalone evaluation without their prefix."""
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


# ---- The methods of Keras: their events, and the logs that they get


Logs = Callable[[Any], dict[str, Any]]


def _shared(name: str, make: Logs) -> Logs:
    """Return a function that gives all Keras callbacks of one event the same dictionary: some write into it
    for later ones.
    """
    key = f"keras {name}"

    def logs(s: Any) -> dict[str, Any]:
        now = (s.stage, s.epoch, s.batches_seen)
        known = s.cache.get(key)
        if known is None or known[0] != now:
            known = s.cache[key] = (now, make(s))
        found: dict[str, Any] = known[1]
        return found

    return logs


def _nonfinite_loss(s: Any) -> dict[str, float]:
    """Return the loss of the newest batch if it is NaN or infinite: in Keras it makes the epoch's loss so."""
    loss = s.loss
    return {} if loss is None or math.isfinite(loss) else {"loss": loss}


def _newest_logs(s: Any) -> dict[str, Any]:
    return {**epoch_logs(s.metrics), **_nonfinite_loss(s)}


_batch_logs = _shared("batch", lambda s: dict(s.batch_metrics))
_epoch_logs, _end_logs = _shared("epoch", _newest_logs), _shared("end", _newest_logs)
_test_logs = _shared("test", lambda s: test_logs(s.metrics, "test/" if s.stage == "test" else "val/"))


def _keras_rows(*events: str, first: tuple[str, ...] = (), logs: Logs = lambda s: {}) -> tuple[Row, ...]:
    """Return the rows of a method that gets `first` and the logs. Keras has no sanity check."""
    return tuple(
        Row(event, (*first, "state"), {"state": logs}, not event.startswith("on_validation"))
        for event in events
    )


_EPOCH, _BATCH_INDEX = ("epoch",), ("batch_idx",)
KERAS_METHODS: Mapping[str, tuple[Row, ...]] = {
    "on_train_begin": _keras_rows("on_train_start"),
    "on_train_end": _keras_rows("on_train_end", logs=_end_logs),
    "on_epoch_begin": _keras_rows("on_train_epoch_start", first=_EPOCH),
    "on_epoch_end": _keras_rows("on_train_epoch_end", first=_EPOCH, logs=_epoch_logs),
    "on_train_batch_begin": _keras_rows("on_train_batch_start", first=_BATCH_INDEX),
    "on_train_batch_end": _keras_rows("on_train_batch_end", first=_BATCH_INDEX, logs=_batch_logs),
    "on_test_begin": _keras_rows("on_validation_start", "on_test_start"),
    "on_test_end": _keras_rows("on_validation_end", "on_test_end", logs=_test_logs),
    "on_test_batch_begin": _keras_rows(
        "on_validation_batch_start", "on_test_batch_start", first=_BATCH_INDEX
    ),
    "on_test_batch_end": _keras_rows(
        "on_validation_batch_end", "on_test_batch_end", first=_BATCH_INDEX, logs=_batch_logs
    ),
    "on_predict_begin": _keras_rows("on_predict_start"),
    "on_predict_end": _keras_rows("on_predict_end"),
    "on_predict_batch_begin": _keras_rows("on_predict_batch_start", first=_BATCH_INDEX),
    "on_predict_batch_end": _keras_rows("on_predict_batch_end", first=_BATCH_INDEX),
}
"""Their method -> our events. A validation inside a fit is a test in Keras."""
OLDER_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
"""Earlier names of methods, which the methods call themselves."""


class KerasCallback(AdoptedCallback):
    """Represents one callback. `self.model` is a view: the module, `stop_training`, the weights, the learning
    rate.
    """

    kind = "Keras callback"

    def __init__(self, original: Any) -> None:
        super().__init__(original, ("keras",), "Callback")
        refuse_misspelled(original, dict.fromkeys((*KERAS_METHODS, *OLDER_NAMES.values()), 2))
        self.view = ModelView()
        who = type(original).__name__
        if (
            type(original).__module__.partition(".")[0] == "keras"
        ):  # your own may be written for a module that has them
            for attribute, where in self._keras_only():
                raise self._refusal(attribute, where)
        metric = str(getattr(original, "monitor", "loss")).removeprefix("val_")
        if getattr(original, "mode", None) == "auto" and metric != "loss":
            raise HookError(
                f"{who}(monitor={original.monitor!r}, mode='auto') needs a Keras model to find out which "
                "direction is better. Pass mode='min' or mode='max'."
            )

    def _keras_only(self) -> Iterator[tuple[str, str]]:
        """Yield the attributes that it needs and only a Keras model has, each with the method that uses
        it.
        """
        keras_only = set(dir(sys.modules["keras"].Model)) - set(dir(nn.Module)) - set(dir(ModelView))
        for attribute, where in attributes_read(("self.model",), self.original, lambda cls: cls is self.base):
            if attribute in keras_only:
                yield attribute, where
        for cls in type(self.original).__mro__:
            if cls.__name__ in BY_ANOTHER_NAME and cls.__module__.partition(".")[0] == "keras":
                yield BY_ANOTHER_NAME[cls.__name__], cls.__name__

    def _refusal(self, attribute: str, where: str) -> HookError:
        who = type(self.original).__name__
        return HookError(
            f"{who} cannot run in Hookline: {where} needs self.model.{attribute}, which only a Keras model "
            f"has. {ALTERNATIVES.get(who, '')}".rstrip()
        )

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """Return one listener for each event of an overridden method, and one that first sets the parameters
        when training starts.
        """
        started = Binding(self._set_params, ())
        found = [Listener("H", name, self, table["on_train_start"], self.original.set_params, started, [])]
        for method, rows in KERAS_METHODS.items():
            if self.overrides(method) or self.overrides(OLDER_NAMES.get(method, method)):
                function = getattr(self.original, method)
                found += [
                    Listener(
                        "H", name, self, table[row.event], function, row.bind_in_order(function, table), []
                    )
                    for row in rows
                ]
        return found

    def begin_run(self, state: Any) -> None:
        """Give the callback its model and its parameters, as Keras does when a run starts."""
        self.view._attach(state)
        for attribute, where in self._keras_only():
            if not hasattr(state.module, attribute):
                raise self._refusal(attribute, where)
        self._set_params(state)
        self.original.set_model(self.view)

    def _set_params(self, s: Any) -> None:
        trainer = s.trainer
        self.original.set_params(
            {"verbose": 1, "epochs": trainer.options.max_epochs, "steps": trainer.num_training_batches}
        )


BY_ANOTHER_NAME = {"SwapEMAWeights": "optimizer.use_ema"}
"""Attributes that Keras' own callbacks use in a way that their source does not show."""
ALTERNATIVES = {
    "ModelCheckpoint": "Use hookline.hooks.ModelCheckpoint.",
    "BackupAndRestore": "Use Trainer.fit(resume='auto') with hookline.hooks.ModelCheckpoint.",
    "TensorBoard": "Use hookline.loggers.TensorBoard.",
    "SwapEMAWeights": "Use hookline.hooks.WeightAveraging.",
}
