"""Training steps whose batches are weighted: within an accumulation window, or among ranks."""

from __future__ import annotations

from typing import Any

from hookline.run.run import Run
from hookline.training.accumulation import AccumulatedStep, CheckedStep, window_size
from hookline.training.backward import Backward
from hookline.training.batch_events import BatchEvents
from hookline.training.step import TrainStep
from hookline.training.update import Update
from hookline.util.errors import END_EPOCH, Signal


class CountedBatch(TrainStep):
    """A step that counts samples, tokens and losses in `run.data.totals`."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        self.totals = run.data.totals

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Emit on_train_batch_start, and measure the weight of the batch."""
        signal = self.decide(BatchEvents.start(self))
        if signal is not END_EPOCH:
            s = self.state
            s.log.weight = self.weight = self.totals.begin(s, self.weight if signal is None else 0)
        return signal

    def decide(self, signal: Signal | None) -> Signal | None:
        """Return the signal that takes effect; ranks agree on one."""
        return signal

    def skip(self, signal: Signal) -> Signal | None:
        """Skip this batch."""
        if signal is END_EPOCH:
            return signal
        self.totals.end(self.state)
        return None

    def end(self, batches_left: int | None = None) -> None:
        """End the batch, and restore what a padding batch must not change."""
        super().end(batches_left)
        self.totals.end(self.state)

    def count(self) -> None:
        """Count samples and tokens by the totals."""
        self.totals.count(self.state)

    def mean_loss(self) -> Any:
        """Return the loss of this update for a row of metrics."""
        return self.totals.loss_of_row(self.state)


class CountedStep(CountedBatch, AccumulatedStep):
    """A counted step of an accumulation window."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        window, totals = self.window, self.totals
        if window.by != "batches":
            self.loss_filters = (lambda loss: loss if window.weight else totals.without_weight(loss),)

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Start the batch; at the first batch of a window also choose its length."""
        window, signal = self.window, super().start(batches_left)
        if signal is not END_EPOCH:
            if window.batches == 0:
                window.size = window_size(self.run, batches_left)
            self.is_last = window.batches + 1 >= window.size
        return signal

    def skip(self, signal: Signal) -> Signal | None:
        """Skip this batch; if it is the last of its window, update on the other batches."""
        if signal is END_EPOCH:
            return signal
        self.window.batches += 1
        self.totals.end(self.state)
        if self.is_last:
            self.close_window()
        return None

    def record_loss(self, loss: Any, weight: float) -> None:
        """Add the loss to the epoch's mean with its weight."""
        super().record_loss(loss, self.totals.end_backward(self.window, weight))

    def count_losses(self) -> float:
        """Return the total weight of the window's losses, and set the weight of each in its mean."""
        self.totals.ask_for_loss(self.state)
        return self.window.count


class CheckedCountedStep(CountedStep, CheckedStep):
    """`CountedStep` with nonfinite='skip'."""
