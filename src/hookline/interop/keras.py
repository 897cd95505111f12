"""Keras callbacks among Hookline's hooks, unchanged: EarlyStopping, CSVLogger, LearningRateScheduler, and
your own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hookline.engine.binding import Binding, Caller
from hookline.engine.events import EventTable
from hookline.engine.listener import Listener, refuse_misspelled
from hookline.engine.source_text import attributes_read
from hookline.interop.adapter import AdoptedCallback
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
        return [_array(each.detach().cpu()) for each in self._state.module.state_dict().values()]

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

    @property
    def iterations(self) -> int:
        """Return the number of updates so far."""
        return int(self._state.step)

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


@dataclass(frozen=True, slots=True)
class Method:
    """A method of Keras: its events here, the argument before `logs`, and the source of the logs."""

    events: tuple[str, ...]
    first: str = ""
    """'epoch', 'batch_idx' or nothing."""
    logs: str = ""
    """'epoch', 'test', 'end', 'batch' or nothing, which gives an empty dictionary."""
    older: str = ""
    """Its earlier name, which the method calls itself."""


METHODS: Mapping[str, Method] = {
    "on_train_begin": Method(("on_train_start",)),
    "on_train_end": Method(("on_train_end",), logs="end"),
    "on_epoch_begin": Method(("on_train_epoch_start",), "epoch"),
    "on_epoch_end": Method(("on_train_epoch_end",), "epoch", "epoch"),
    "on_train_batch_begin": Method(("on_train_batch_start",), "batch_idx", older="on_batch_begin"),
    "on_train_batch_end": Method(("on_train_batch_end",), "batch_idx", "batch", older="on_batch_end"),
    "on_test_begin": Method(("on_validation_start", "on_test_start")),
    "on_test_end": Method(("on_validation_end", "on_test_end"), logs="test"),
    "on_test_batch_begin": Method(("on_validation_batch_start", "on_test_batch_start"), "batch_idx"),
    "on_test_batch_end": Method(("on_validation_batch_end", "on_test_batch_end"), "batch_idx", "batch"),
    "on_predict_begin": Method(("on_predict_start",)),
    "on_predict_end": Method(("on_predict_end",)),
    "on_predict_batch_begin": Method(("on_predict_batch_start",), "batch_idx"),
    "on_predict_batch_end": Method(("on_predict_batch_end",), "batch_idx"),
}
"""Their method -> our events. A validation inside a fit is a test in Keras."""


class KerasCallback(AdoptedCallback):
    """Represents one callback. `self.model` is a view: the module, `stop_training`, the weights, the learning
    rate.
    """

    kind = "Keras callback"

    def __init__(self, original: Any) -> None:
        super().__init__(original, ("keras",), "Callback")
        refuse_misspelled(
            original, {name: 2 for method, row in METHODS.items() for name in (method, row.older) if name}
        )
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
            f"has. {INSTEAD.get(who, '')}".rstrip()
        )

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """Return one listener for each event of an overridden method, and one that first sets the parameters
        when training starts.
        """
        started = table["on_train_start"]
        found = [
            Listener("H", name, self, started, self.original.set_params, Binding(self._set_params, ()), [])
        ]
        for method, row in METHODS.items():
            if self.overrides(method) or (row.older and self.overrides(row.older)):
                function = getattr(self.original, method)
                for event in row.events:
                    facts = ("metrics",) if row.logs and "metrics" in table[event].facts else ()
                    found.append(
                        Listener(
                            "H",
                            name,
                            self,
                            table[event],
                            function,
                            Binding(_caller(function, row), facts),
                            [],
                        )
                    )
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
            {"verbose": 0, "epochs": trainer.options.max_epochs, "steps": trainer.num_training_batches}
        )


def _caller(function: Callable[..., Any], row: Method) -> Caller:
    """Return a caller that ignores the returned value, which has no meaning in Keras."""
    logs = _LOGS[row.logs]

    def call(s: Any) -> None:
        function(logs(s))

    def call_for_epoch(s: Any) -> None:
        function(s.epoch, logs(s))

    def call_for_batch(s: Any) -> None:
        function(s.batch_idx, logs(s))

    made: Caller = {"": call, "epoch": call_for_epoch, "batch_idx": call_for_batch}[row.first]

    def call_unless_sanity_check(s: Any) -> None:
        if not s.sanity_checking:
            made(s)

    return call_unless_sanity_check if "on_validation" in row.events[0] else made  # Keras has no sanity check


def _shared(name: str, make: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
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


_LOGS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "": lambda s: {},
    "batch": _shared("batch", lambda s: dict(s.batch_metrics)),
    "epoch": _shared("epoch", lambda s: {**epoch_logs(s.metrics), **_nonfinite_loss(s)}),
    "end": _shared("end", lambda s: {**epoch_logs(s.metrics), **_nonfinite_loss(s)}),
    "test": _shared("test", lambda s: test_logs(s.metrics, "test/" if s.stage == "test" else "val/")),
}

BY_ANOTHER_NAME = {"SwapEMAWeights": "optimizer.use_ema"}
"""Attributes that Keras' own callbacks use in a way that their source does not show."""
INSTEAD = {
    "ModelCheckpoint": "Use hookline.hooks.ModelCheckpoint.",
    "BackupAndRestore": "Use Trainer.fit(resume='auto') with hookline.hooks.ModelCheckpoint.",
    "TensorBoard": "Use hookline.loggers.TensorBoard.",
    "SwapEMAWeights": "Use hookline.hooks.WeightAveraging.",
}
