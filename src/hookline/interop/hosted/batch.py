"""One training batch of a hosted run: the events of the trainer's batch, driven by the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hookline.engine.plan import noop
from hookline.interop.hosted.updates import Updates
from hookline.metrics.accumulator import Accumulator
from hookline.metrics.metric_log import Metrics
from hookline.run.parts import EmittingRun
from hookline.training.batch_events import BackwardEvents, BatchEvents
from hookline.training.pass_events import VALIDATION, EvaluationEvents, Names, PausedBatch

OUTSIDE = -1
"""The value of `Progress.step_before_batch` outside of batches, where every update counts."""


class HostedBatch(BatchEvents):
    """The batch that the host trains on, and the losses since its last update."""

    def __init__(
        self, run: EmittingRun, updates: Updates, count_tokens: Callable[[Any], int], holds_rows: bool
    ) -> None:
        """holds_rows: whether the host logs the loss and the learning rate itself."""
        super().__init__(run, count_tokens, log_every=1, logs=False)
        self.backward = BackwardEvents(run)
        self.updates = updates
        self.holds_rows = holds_rows
        self.is_open = False
        self._losses: list[Any] = []
        self._window = 0

    @property
    def has_updated(self) -> bool:
        """Return whether an update was made in this batch, or outside of batches."""
        return self.state.counts.step != self.progress.step_before_batch

    def before_backward(self, loss: Tensor) -> Tensor:
        """Emit on_before_backward and record the loss, which a hook may have replaced; return it."""
        s = self.state
        if self.plan.on_before_backward is not noop:
            loss = self.backward.before(loss)
        if self.updates.recomputing:
            return loss
        value = loss.item() if loss.is_cpu else loss.detach()
        if self.updates.windows != self._window:
            self._losses, self._window = [], self.updates.windows
        self._losses.append(value)
        s.current.window_losses = self._losses if len(self._losses) > 1 else None
        s.current.last_loss = value
        s.log.train_loss.add(value, s.log.weight)
        return loss

    def reset(self) -> None:
        """Reset the updates of an earlier run."""
        s = self.state
        s.current.window_losses = None
        self.updates.reset()

    def forget_loss(self) -> None:
        """Drop the losses so far, because the host differentiates another value."""
        s = self.state
        s.current.last_loss = s.current.window_losses = None
        s.log.train_loss, self._losses = Accumulator(), []

    def values_of_step(self) -> dict[str, Any]:
        """Return the loss and the learning rate, unless the host logs them itself."""
        return {} if self.holds_rows else super().values_of_step()


# ---- One evaluation inside a hosted run


class Pass:
    """A pass over validation or test data that another loop drives."""

    def __init__(self, run: EmittingRun, names: Names = VALIDATION) -> None:
        self.run, self.state = run, run.state
        self.events = EvaluationEvents(run, names)
        self.results: dict[str, Any] = {}
        self.host_metrics: Mapping[str, Any] = {}
        """Metrics that the host has measured itself."""
        self._interlude = PausedBatch(run.state)
        self._batches = 0
        self._has_results = False

    def start(self) -> None:
        """Emit the start of the pass."""
        self._interlude.__enter__()
        self.events.start()

    def start_batch(self, batch: Any, batch_idx: int | None = None, dataloader_idx: int = 0) -> None:
        """Emit the start of a batch."""
        if dataloader_idx != self.state.dataloader_idx:
            self._batches = 0
        self.events.take(batch, self._batches if batch_idx is None else batch_idx, dataloader_idx)
        self._batches += 1
        self.events.start_batch()

    def end_batch(self, outputs: Any = None) -> None:
        """Emit the end of the batch; a loss in `outputs` becomes part of `val/loss`."""
        self.events.end_batch(outputs)

    def end_data(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Emit the end of the data. metrics: results that the host has measured itself."""
        self._has_results = True
        self.host_metrics = metrics or {}
        self.results = {**self.events.finish(), **self.host_metrics}
        self.events.end_data(self.results)

    def end(self) -> Metrics:
        """Emit the end, restore the facts of the training, and return the results with those that hooks
        added.
        """
        if not self._has_results:
            self.end_data()
        self.events.end(self.results)
        self.results.update(self.run.rows.reduce(self.state.log.pending, "evaluation"))
        self.leave()
        return Metrics(self.results)

    def leave(self) -> None:
        """Restore the facts of the training without an event, after the pass has ended or failed."""
        self._interlude.__exit__(None)
