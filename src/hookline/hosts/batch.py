"""One training batch of a hosted run: the events of the trainer's batch, driven by the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.accumulator import Accumulator
from hookline.hosts.updates import Updates
from hookline.loops.batch_events import BackwardEvents, BatchEvents
from hookline.loops.parts import EmittingRun
from hookline.plan import noop

OUTSIDE = -1
"""`Progress.step_before_batch` outside of batches, where every update counts."""


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
        """Whether an update was made in this batch, or outside of batches."""
        return self.state.counts.step != self.progress.step_before_batch

    def before_backward(self, loss: Tensor) -> Tensor:
        """Emit on_before_backward and note the loss, which a hook may have replaced; return it."""
        s = self.state
        if self.plan.on_before_backward is not noop:
            loss = self.backward.before(loss)
        if self.updates.recomputing:
            return loss
        noted = loss.item() if loss.is_cpu else loss.detach()
        if self.updates.windows != self._window:
            self._losses, self._window = [], self.updates.windows
        self._losses.append(noted)
        s.current.window_losses = self._losses if len(self._losses) > 1 else None
        s.current.last_loss = noted
        s.log.train_loss.add(noted, s.log.weight)
        return loss

    def reset(self) -> None:
        """Forget the updates of an earlier run."""
        s = self.state
        s.current.window_losses = None
        self.updates.reset()

    def forget_loss(self) -> None:
        """Drop the losses so far: the host differentiates another number."""
        s = self.state
        s.current.last_loss = s.current.window_losses = None
        s.log.train_loss, self._losses = Accumulator(), []

    def values_of_step(self) -> dict[str, Any]:
        """Return the loss and the learning rate, unless the host logs them itself."""
        return {} if self.holds_rows else super().values_of_step()
