"""One training batch of one rank among several: what ranks decide, count and average together."""

from __future__ import annotations

from typing import Any

from hookline.data.batch import batch_size
from hookline.errors import END_EPOCH, Signal
from hookline.loops.accumulation import AccumulatedStep, CheckedStep, window_size
from hookline.loops.backward import Backward
from hookline.loops.manual import ManualStep
from hookline.loops.run import Run
from hookline.loops.step import TrainStep
from hookline.loops.update import Update


class RankBatch(TrainStep):
    """A batch among those of all ranks: its signals are agreed on, its samples and losses are counted with the others'."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        self.agreement = run.agreement
        self.totals = run.tally

    def start(self, batches_left: int | None) -> Signal | None:
        """Emit on_train_batch_start, and agree with the other ranks on the signal."""
        s, log = self.state, self.state.log
        log.weight = weight = batch_size(s.batch)
        signal: Signal | None = self.agreement.on_batch(self.plan.on_train_batch_start(s))
        if signal is not END_EPOCH:
            log.weight = self.weight = self.totals.begin(s, weight if signal is None else 0)
        return signal

    def skip(self, signal: Signal) -> Signal | None:
        """Leave this batch out; the other ranks may train on theirs."""
        if signal is END_EPOCH:
            return signal
        self.totals.end(self.state)
        return None

    def end(self, batches_left: int | None) -> None:
        """Count the samples and tokens of all ranks; put back what a padding batch must not change."""
        run, s = self.run, self.state
        for advance in self.schedulers:
            advance(run, s.step > run.step_before_batch, batches_left)
        run.position = s.batch_idx + 1
        s.batches_seen += 1
        self.totals.count(s)
        s.nested_validate = True
        self.plan.on_train_batch_end(s)
        s.nested_validate = False
        self.totals.end(s)

    def mean_loss(self) -> Any:
        """Return this rank's loss, to be weighed with the others', or the loss of a longer window over all ranks."""
        return self.totals.loss_of_row(self.state)

    def write_row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics over all ranks to listeners and loggers."""
        self.run.write_row(self.run.over_ranks(row))


class RankStep(RankBatch, AccumulatedStep):
    """Automatic optimization: gradients are averaged over ranks at the window's last batch."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        self.sync = run.together
        self.loss_filters = (lambda loss: self.sync.agree_on(loss, self.is_last),)

    def start(self, batches_left: int | None) -> Signal | None:
        """Also open the window, and say whether this batch's backward averages gradients."""
        window, signal = self.window, super().start(batches_left)
        if signal is not END_EPOCH:
            if window.batches == 0:
                window.size = window_size(self.run, batches_left)
            self.is_last = window.batches + 1 >= window.size
            self.sync.begin_batch(self.is_last)
        return signal

    def skip(self, signal: Signal) -> Signal | None:
        """Leave this batch out, but take part in what the other ranks do with theirs."""
        if signal is END_EPOCH:
            return signal
        self.window.batches += 1
        self.totals.end(self.state)
        self.sync.skip_batch()
        if self.is_last:
            self.close_window()
        return None

    def clear_gradients(self) -> None:
        """Once per window, by the first batch that adds to them or takes what other ranks have added."""
        self.sync.clear_gradients()

    def note_loss(self, loss: Any) -> None:
        """Also note what it counts among those of the other ranks."""
        self.totals.learnt(self.window)
        super().note_loss(loss)

    def count_losses(self) -> float:
        """Return how many batches of the window had a loss, as a mean over ranks."""
        self.totals.ask_for_loss(self.state)
        return float(self.sync.settle())

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
