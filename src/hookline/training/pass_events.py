"""The events of a pass over data without training: each is emitted here and nowhere else, with its facts.

`evaluate` and `predict` call these objects, and so does a hosted run (`interop/hosted`) from another loop.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from hookline.data.batch import batch_size
from hookline.engine.binding import Caller
from hookline.engine.plan import Plan
from hookline.metrics.accumulator import Accumulator
from hookline.run.parts import EmittingRun
from hookline.run.rows import rescued_row
from hookline.run.state import State, is_scalar, loss_in
from hookline.training.batch_events import set_loss, set_outputs, take_batch
from hookline.training.participants import teardown_removed

Slot = Callable[[Plan], Caller]


@dataclass(frozen=True, slots=True)
class Names:
    """The slots of one kind of pass, read at each event because hooks may be added and removed."""

    kind: str
    """The kind of its loaders, which is also the prefix of its metrics."""
    model_eval: Slot
    start: Slot
    epoch_start: Slot
    batch_start: Slot
    step: Slot
    batch_end: Slot
    epoch_end: Slot
    end: Slot
    model_train: Slot


VALIDATION = Names(
    "val",
    model_eval=attrgetter("on_validation_model_eval"),
    start=attrgetter("on_validation_start"),
    epoch_start=attrgetter("on_validation_epoch_start"),
    batch_start=attrgetter("on_validation_batch_start"),
    step=attrgetter("validation_step"),
    batch_end=attrgetter("on_validation_batch_end"),
    epoch_end=attrgetter("on_validation_epoch_end"),
    end=attrgetter("on_validation_end"),
    model_train=attrgetter("on_validation_model_train"),
)

TEST = Names(
    "test",
    model_eval=attrgetter("on_test_model_eval"),
    start=attrgetter("on_test_start"),
    epoch_start=attrgetter("on_test_epoch_start"),
    batch_start=attrgetter("on_test_batch_start"),
    step=attrgetter("test_step"),
    batch_end=attrgetter("on_test_batch_end"),
    epoch_end=attrgetter("on_test_epoch_end"),
    end=attrgetter("on_test_end"),
    model_train=attrgetter("on_test_model_train"),
)

PREDICTION = Names(
    "predict",
    model_eval=attrgetter("on_predict_model_eval"),
    start=attrgetter("on_predict_start"),
    epoch_start=attrgetter("on_predict_epoch_start"),
    batch_start=attrgetter("on_predict_batch_start"),
    step=attrgetter("predict_step"),
    batch_end=attrgetter("on_predict_batch_end"),
    epoch_end=attrgetter("on_predict_epoch_end"),
    end=attrgetter("on_predict_end"),
    model_train=attrgetter("on_predict_model_train"),
)


class PassEvents:
    """One pass: a prediction, or with `EvaluationEvents` a validation or a test."""

    def __init__(self, run: EmittingRun, names: Names, several: bool = False) -> None:
        """Take several: whether the pass has more than one loader."""
        self.run, self.plan, self.state = run, run.plan, run.state
        self.names, self.several = names, several

    def to_eval(self) -> None:
        """Put the module into eval mode, and record the modes of its submodules."""
        s = self.state
        s.current.modes = [(module, module.training) for module in s.setup.module.modules()]
        self.names.model_eval(self.plan)(s)

    def start(self) -> None:
        """Emit the start of the pass."""
        self.names.start(self.plan)(self.state)
        self.names.epoch_start(self.plan)(self.state)

    def enter_loader(self, index: int, name: str) -> None:
        """Set the loader of the following batches."""
        s = self.state
        s.current.dataloader_idx, s.current.dataloader_name = index, name
        s.current.several_loaders = self.several

    def open_batch(self) -> None:
        """Clear the cached facts and logged values of the last batch."""
        s = self.state
        s.cache.clear()
        s.log.batch_values.clear()

    def take(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Open a batch that another loop has fetched."""
        self.open_batch()
        take_batch(self.state, batch, batch_idx)
        self.state.current.dataloader_idx = dataloader_idx

    def start_batch(self) -> None:
        """Emit the start of `state.batch`."""
        self.names.batch_start(self.plan)(self.state)

    def end_batch(self, outputs: Any) -> None:
        """Emit the end of the batch, then tear down removed hooks. outputs: what the step returned."""
        set_outputs(self.state, outputs)
        self.names.batch_end(self.plan)(self.state)
        if self.run.participants.leaving:
            teardown_removed(self.run)

    def end_data(self, results: dict[str, Any]) -> None:
        """Emit the end of the data. results: the metrics of the pass."""
        self.names.epoch_end(self.plan)(self.state)

    def end(self, results: dict[str, Any]) -> None:
        """Emit the end of the pass, then restore the modes of the module."""
        self.names.end(self.plan)(self.state)
        self.names.model_train(self.plan)(self.state)

    def collect(self, predictions: list[Any]) -> None:
        """Set the predictions that listeners see at the end of the data."""
        self.state.current.predictions = predictions


class EvaluationEvents(PassEvents):
    """A validation or a test: the values that its steps return and log become its metrics."""

    def __init__(self, run: EmittingRun, names: Names, several: bool = False) -> None:
        super().__init__(run, names, several)
        self.own = OwnMetrics(names.kind, several)
        self._logged = run.state.log.pending

    def start(self) -> None:
        """Emit the start of the pass, and reset its means."""
        super().start()
        log = self.state.log
        log.begin("eval")
        log.prefix = self.names.kind

    def enter_loader(self, index: int, name: str) -> None:
        """Set the loader of the following batches and of the values logged in them."""
        super().enter_loader(index, name)
        self.state.log.loader = name if self.own.several else ""

    def start_batch(self) -> None:
        """Emit the start of the batch; from now on logged values are weighted by its samples."""
        s = self.state
        s.counts.batches_in_pass += 1
        s.log.mode = "eval"
        s.log.weight = batch_size(s.current.batch)
        super().start_batch()

    def end_batch(self, outputs: Any) -> None:
        """Emit the end of the batch; a loss in `outputs` becomes part of `val/loss`."""
        s = self.state
        set_loss(s, self.own.take(outputs, s.log.weight, s.current.dataloader_name))
        super().end_batch(outputs)

    def finish(self) -> dict[str, Any]:
        """Return the means over all batches."""
        log = self.state.log
        log.mode, log.loader = "now", ""
        return self.run.rows.finish("eval", self.own.sums, self._logged)

    def end_data(self, results: dict[str, Any]) -> None:
        """Emit the end of the data; its results are the newest metrics."""
        s = self.state
        s.log.newest.raw().update(results)
        with rescued_row(s, results, "evaluation"):
            super().end_data(results)

    def end(self, results: dict[str, Any]) -> None:
        """Emit the end of the pass; write its results even if a listener fails."""
        with rescued_row(self.state, results, "evaluation"):
            super().end(results)


class SanityCheck:
    """The events around a few validation batches before training, whose metrics are discarded."""

    def __init__(self, run: EmittingRun) -> None:
        self.plan, self.state = run.plan, run.state

    def start(self) -> None:
        """Emit on_sanity_check_start."""
        s = self.state
        s.sanity_checking = True
        self._newest, self._bar = s.log.newest.copy(), dict(s.log.bar)
        self.plan.on_sanity_check_start(s)

    def end(self) -> None:
        """Emit on_sanity_check_end."""
        self.plan.on_sanity_check_end(self.state)

    def forget(self) -> None:
        """Restore the metrics from before the check."""
        s = self.state
        s.log.newest, s.log.bar = self._newest, self._bar
        s.sanity_checking = False


class OwnMetrics:
    """Means of the numbers that steps return: `val/loss`, and one per loader if there are several."""

    def __init__(self, prefix: str, several: bool) -> None:
        self.prefix = prefix
        self.several = several
        self.sums: defaultdict[str, Accumulator] = defaultdict(Accumulator)

    def take(self, returned: Any, weight: float, loader: str) -> Tensor | None:
        """Add the numbers that a step returned; return the loss among them."""
        if isinstance(returned, dict):
            values = {key: value for key, value in returned.items() if is_scalar(value)}
        else:
            loss = loss_in(returned)
            values = {"loss": loss} if isinstance(loss, Tensor) and loss.numel() == 1 else {}
        for key, value in values.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self.sums[f"{self.prefix}/{key}"].add(value, weight)
            if self.several:
                self.sums[f"{self.prefix}/dl_{loader}/{key}"].add(value, weight)
        loss = values.get("loss")
        return loss.detach() if isinstance(loss, Tensor) else None


def restore_modes(s: State) -> None:
    """Restore the training flag of every submodule; a frozen submodule may be in eval mode."""
    for module, training in s.current.modes:
        if module.training is not training:
            module.training = training


FAILED_BATCH = "__hookline_failed_batch__"
"""The attribute of an exception that has the facts of the batch at which an evaluation failed."""


def restore_failed_batch(s: State, error: BaseException) -> None:
    """Set the facts of the batch at which an evaluation failed, once its error ends the run."""
    for name, value in getattr(error, FAILED_BATCH, {}).items():
        setattr(s.current, name, value)


class PausedBatch:
    """Restore the facts of the training batch that an evaluation interrupts."""

    FACTS = (
        "batch",
        "batch_idx",
        "dataloader_idx",
        "dataloader_name",
        "several_loaders",
        "fetch_ns",
        "indices_of",
        "interrupted_batch",
        "last_loss",
        "modes",
        "returned",
    )

    def __init__(self, s: State) -> None:
        self.s = s

    def __enter__(self) -> None:
        s = self.s
        self.facts = [getattr(s.current, name) for name in self.FACTS]
        if s.current.interrupted_batch is None:  # else a pass inside a pass
            s.current.interrupted_batch = s.current.batch_idx
        self.cache = s.cache
        self.log = (s.log.mode, s.log.weight, s.log.batch_values, s.log.pending, s.log.loader)
        s.cache, s.log.batch_values, s.log.pending, s.log.mode = {}, {}, {}, "now"

    def __exit__(self, kind: object, error: object = None, trace: object = None) -> None:
        s = self.s
        if kind is not None:
            restore_modes(s)  # the evaluation failed before its own restore
        if isinstance(error, Exception) and not hasattr(error, FAILED_BATCH):
            with contextlib.suppress(AttributeError):  # an exception with slots
                setattr(error, FAILED_BATCH, {name: getattr(s.current, name) for name in self.FACTS})
        for name, value in zip(self.FACTS, self.facts, strict=True):
            setattr(s.current, name, value)
        s.cache = self.cache
        s.log.mode, s.log.weight, s.log.batch_values, s.log.pending, s.log.loader = self.log
