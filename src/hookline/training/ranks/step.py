"""One training batch of one rank among several: what ranks decide and average together."""

from __future__ import annotations

from typing import Any

from hookline.run.run import Run
from hookline.training.accumulation import CheckedStep
from hookline.training.backward import Backward
from hookline.training.batch_events import note_loss
from hookline.training.counted_step import CountedBatch, CountedStep
from hookline.training.manual import ManualStep
from hookline.training.ranks.rank_sync import RankSync
from hookline.training.update import Update
from hookline.util.errors import END_EPOCH, Signal


class RankBatch(CountedBatch):
    """A batch among those of all ranks: they agree on the signals of hooks, and metrics are those of all."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        assert isinstance(run.boundary, RankSync)
        self.rank_sync = run.boundary

    def decide(self, signal: Signal | None) -> Signal | None:
        """Agree with the other ranks on what hooks have returned."""
        agreed: Signal | None = self.rank_sync.on_batch(signal)
        return agreed

    def write_row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics over all ranks to listeners and loggers."""
        rows = self.run.rows
        rows.write(rows.reduce(row))


class RankStep(RankBatch, CountedStep):
    """Automatic optimization: gradients are averaged over ranks at the window's last batch."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        assert run.gradient_sync is not None
        self.sync = run.gradient_sync
        self.loss_filters = (*self.loss_filters, lambda loss: self.sync.agree_on(loss, self.is_last))

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Also say whether this batch's backward averages gradients."""
        signal = super().start(batches_left)
        if signal is not END_EPOCH:
            self.sync.begin_batch(self.is_last)
        return signal

    def skip(self, signal: Signal) -> Signal | None:
        """Leave this batch out, but take part in what the other ranks do with theirs."""
        if signal is END_EPOCH:
            return signal
        self.window.batches += 1
        self.totals.end(self.state)
        self.sync.skip_batch(self.is_last)
        if self.is_last:
            self.close_window()
        return None

    def clear_gradients(self) -> None:
        """Once per window, by the first batch that adds to them or takes what other ranks have added."""
        self.sync.clear_gradients()

    def count_losses(self) -> float:
        """Return what the batches of the window that had a loss count, as a mean over ranks."""
        self.totals.ask_for_loss(self.state)
        return float(self.sync.count_losses())

    def skip_update(self, reason: str) -> None:
        """Report it, unless this rank has only skipped batches."""
        if self.window.count or self.window.had_none:
            super().skip_update(reason)

    def has_part(self) -> bool:
        """Other ranks may have gradients if this one has none."""
        return bool(self.window.batches) or super().has_part()

    def everywhere(self, flag: bool) -> bool:
        """Return whether it holds on every rank: of sharded gradients each has looked at its own part."""
        return bool(self.sync.everywhere(flag))


class CheckedRankStep(RankStep, CheckedStep):
    """The same with nonfinite='skip'."""


class RankManualStep(RankBatch, ManualStep):
    """Manual optimization: the strategy averages the gradients of every backward."""

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Also forget the last batch's loss."""
        note_loss(self.state, None)
        return super().start(batches_left)
