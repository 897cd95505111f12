"""The training step of one rank among several: shared signals, averaged gradients, reduced metrics."""

from __future__ import annotations

from typing import Any

from hookline.run.run import Run
from hookline.training.accumulation import CheckedStep, CountedBatch, CountedStep
from hookline.training.backward import Backward
from hookline.training.manual import ManualStep
from hookline.training.ranks.rank_sync import RankSync
from hookline.training.update import Update
from hookline.util.errors import END_EPOCH, Signal


class RankTrainStep(CountedBatch):
    """A step of one rank: ranks agree on the signals of hooks, and metrics are reduced over ranks."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        assert isinstance(run.boundary, RankSync)
        self.rank_sync = run.boundary

    def decide(self, signal: Signal | None) -> Signal | None:
        """Return the signal that all ranks agree on."""
        agreed: Signal | None = self.rank_sync.on_batch(signal)
        return agreed

    def write_row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics over all ranks to listeners and loggers."""
        rows = self.run.rows
        rows.write(rows.reduce(row))


class RankStep(RankTrainStep, CountedStep):
    """Automatic optimization: the last batch of a window averages gradients over ranks."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        assert run.gradient_sync is not None
        self.sync = run.gradient_sync
        self.loss_filters = (*self.loss_filters, lambda loss: self.sync.agree_on(loss, self.is_last))

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Start the batch, and choose whether its backward pass averages gradients."""
        signal = super().start(batches_left)
        if signal is not END_EPOCH:
            self.sync.begin_batch(self.is_last)
        return signal

    def end_skipped(self) -> None:
        """Take part in the collectives of the other ranks, for a batch that is left out."""
        super().end_skipped()
        self.sync.skip_batch(self.is_last)

    def clear_gradients(self) -> None:
        """Clear the gradients once per window, before this rank or another adds to them."""
        self.sync.clear_gradients()

    def count_losses(self) -> float:
        """Return the total weight of the window's batches that had a loss, as a mean over ranks."""
        self.totals.ask_for_loss(self.state)
        return float(self.sync.count_losses())

    def skip_update(self, reason: str) -> None:
        """Emit on_step_skipped, unless this rank has skipped every batch of the window."""
        if self.window.count or self.window.had_none:
            super().skip_update(reason)

    def has_batches(self) -> bool:
        """Return whether the window has batches: other ranks may have gradients if this one has none."""
        return bool(self.window.batches) or super().has_batches()

    def is_true_on_all_ranks(self, flag: bool) -> bool:
        """Return whether the flag is set on every rank; each rank has checked its shard of the gradients."""
        return bool(self.sync.everywhere(flag))


class CheckedRankStep(RankStep, CheckedStep):
    """`RankStep` with nonfinite='skip'."""


class RankManualStep(RankTrainStep, ManualStep):
    """Manual optimization: the strategy averages gradients at every backward pass."""
