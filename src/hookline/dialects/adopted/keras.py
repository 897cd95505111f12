"""Keras callbacks among Hookline's hooks, unchanged: EarlyStopping, CSVLogger, LearningRateScheduler, and
people's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hookline.asking import asked_of
from hookline.binding import Binding, Caller
from hookline.dialects.adopted.callback import AdoptedCallback
from hookline.dialects.adopted.keras_view import ModelView, epoch_logs, test_logs
from hookline.errors import HookError
from hookline.events import EventTable
from hookline.listener import Listener, refuse_misspelled


@dataclass(frozen=True, slots=True)
class Method:
    """A method of Keras: our events, what comes before `logs`, and where the logs come from."""

    events: tuple[str, ...]
    first: str = ""
    """'epoch', 'batch_idx' or nothing."""
    logs: str = ""
    """'epoch', 'test', 'end', 'batch' or nothing: an empty dictionary."""
    older: str = ""
    """The name it had before, which the method calls by itself."""


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
"""Their method -> our events. Keras tests are validations in the course of a fit."""


class KerasCallback(AdoptedCallback):
    """Stands for one callback. `self.model` is a view: the module, `stop_training`, the weights, the learning
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
        ):  # one's own may be written for a module that has them
            for attribute, where in self._asks():
                raise self._refusal(attribute, where)
        metric = str(getattr(original, "monitor", "loss")).removeprefix("val_")
        if getattr(original, "mode", None) == "auto" and metric != "loss":
            raise HookError(
                f"{who}(monitor={original.monitor!r}, mode='auto') asks Keras which way is better, "
                "and only a Keras model could say. Pass mode='min' or mode='max'."
            )

    def _asks(self) -> Iterator[tuple[str, str]]:
        """What it wants of a Keras model and no other has; each with the method."""
        keras_only = set(dir(sys.modules["keras"].Model)) - set(dir(nn.Module)) - set(dir(ModelView))
        for attribute, where in asked_of(("self.model",), self.original, lambda cls: cls is self.base):
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
        """One for each event of an overridden method; before them, when training starts, the loaders can be
        measured.
        """
        started = table["on_train_start"]
        found = [
            Listener("H", name, self, started, self.original.set_params, Binding(self._tell_length, ()), [])
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
        """A run begins: the callback gets its model and its parameters, as Keras does it."""
        self.view._attach(state)
        for attribute, where in self._asks():
            if not hasattr(state.module, attribute):
                raise self._refusal(attribute, where)
        self._tell_length(state)
        self.original.set_model(self.view)

    def _tell_length(self, s: Any) -> None:
        trainer = s.trainer
        self.original.set_params(
            {"verbose": 0, "epochs": trainer.options.max_epochs, "steps": trainer.num_training_batches}
        )


def _caller(function: Callable[..., Any], row: Method) -> Caller:
    """What a callback returns has no meaning in Keras."""
    logs = _LOGS[row.logs]

    def call(s: Any) -> None:
        function(logs(s))

    def call_for_epoch(s: Any) -> None:
        function(s.epoch, logs(s))

    def call_for_batch(s: Any) -> None:
        function(s.batch_idx, logs(s))

    made: Caller = {"": call, "epoch": call_for_epoch, "batch_idx": call_for_batch}[row.first]

    def call_in_earnest(s: Any) -> None:
        if not s.sanity_checking:
            made(s)

    return (
        call_in_earnest if "on_validation" in row.events[0] else made
    )  # Keras tries nothing out before it trains


def _shared(name: str, make: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """One dictionary for all Keras callbacks at one moment: some write into it for those after them."""
    key = f"keras {name}"

    def logs(s: Any) -> dict[str, Any]:
        now = (s.stage, s.epoch, s.batches_seen)
        known = s.cache.get(key)
        if known is None or known[0] != now:
            known = s.cache[key] = (now, make(s))
        found: dict[str, Any] = known[1]
        return found

    return logs


_LOGS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "": lambda s: {},
    "batch": _shared("batch", lambda s: dict(s.batch_metrics)),
    "epoch": _shared("epoch", lambda s: epoch_logs(s.metrics)),
    "end": _shared("end", lambda s: epoch_logs(s.metrics)),
    "test": _shared("test", lambda s: test_logs(s.metrics, "test/" if s.stage == "test" else "val/")),
}

BY_ANOTHER_NAME = {"SwapEMAWeights": "optimizer.use_ema"}
"""What Keras' own reach for in a way that their code does not show at once."""
INSTEAD = {
    "ModelCheckpoint": "Use hookline.hooks.ModelCheckpoint.",
    "BackupAndRestore": "Use Trainer.fit(resume='auto') with hookline.hooks.ModelCheckpoint.",
    "TensorBoard": "Use hookline.loggers.TensorBoard.",
    "SwapEMAWeights": "Use hookline.hooks.WeightAveraging.",
}
