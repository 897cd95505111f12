"""The training step of one rank among several: shared signals, averaged gradients, reduced metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.run.run import Run
from hookline.training.accumulation import CheckedStep, CountedBatch, CountedStep
from hookline.training.backward import Backward
from hookline.training.manual import ManualStep
from hookline.training.ranks.rank_sync import RankSync
from hookline.training.update import Update
from hookline.util.errors import END_EPOCH, NonFiniteLoss, Signal


class RankTrainStep(CountedBatch):
    """A step of one rank: ranks agree on the signals of hooks, and metrics are reduced over ranks."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        assert isinstance(run.boundary, RankSync)
        self.rank_sync = run.boundary

    def decide(self, signal: Signal | None) -> Signal | None:
        """Return the signal that all ranks agree on."""
        return self.rank_sync.on_batch(signal)

    def write_row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics over all ranks to listeners and loggers."""
        rows = self.run.rows
        rows.write(rows.reduce(row))


class RankStep(RankTrainStep, CountedStep):
    """Automatic optimization: the last batch of a window averages gradients over ranks."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        assert isinstance(run.gradient_sync, RankGradientSync)
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
        return self.sync.count_losses()

    def skip_update(self, reason: str) -> None:
        """Emit on_step_skipped, unless this rank has skipped every batch of the window."""
        if self.window.count or self.window.had_none:
            super().skip_update(reason)

    def has_batches(self) -> bool:
        """Return whether the window has batches: other ranks may have gradients if this one has none."""
        return bool(self.window.batches) or super().has_batches()


class CheckedRankStep(RankStep, CheckedStep):
    """`RankStep` with nonfinite='skip'."""


class RankManualStep(RankTrainStep, ManualStep):
    """Manual optimization: the strategy averages gradients at every backward pass."""


# ---- gradient averaging ------------------------------------------------------------------------------------


class RankGradientSync:
    """Average the gradients of an accumulation window over ranks. A run of one process does not have it.

    Some ranks may have no loss in a window, and the others do not know that in time. A rank without a loss
    takes part in the averaging with zeros, while the weights of all losses are summed. So the update equals
    that of one process with all the losses.
    """

    __slots__ = ("_answer", "_is_synced", "_syncs", "all_or_none", "is_clear", "run", "syncs_always")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.all_or_none = run.strategy.forward_communicates
        """Whether forward and backward of every batch communicate. Then a batch that has no loss on one rank
        is skipped on all ranks.
        """
        self.syncs_always = run.data.router is not None
        """Whether every batch averages gradients: the router sets aside gradients between two batches, and
        they must be averaged by then.
        """
        self._syncs: bool | None = None
        self._is_synced = False
        self.is_clear = False
        """Whether the gradients of the step before were cleared in this window."""
        self._answer: Any = None

    def renewed(self) -> RankGradientSync:
        """Return a new one for the same run, which goes back to an earlier state."""
        return RankGradientSync(self.run)

    def begin_batch(self, last: bool) -> None:
        """Choose whether this batch's backward averages gradients: the last batch of a window does."""
        syncs = last or self.syncs_always
        if syncs is not self._syncs:
            self._syncs = syncs
            self.run.strategy.sync_gradients(syncs)
        self._is_synced = False

    def skip_batch(self, last: bool) -> None:
        """Take part in the other ranks' collectives without a batch."""
        if self._syncs:
            self._sync_without_batch(after_forward=False)
            self._is_synced = True
        else:
            self.run.strategy.skip_batch()
        if last:
            self._ask_early(self.run.window.count)

    def clear_gradients(self) -> None:
        """Clear the gradients once per window, before this rank or another adds to them."""
        if not self.is_clear:
            self.is_clear = True
            assert self.run.step is not None
            self.run.step.update.clear_gradients()

    def _sync_without_batch(self, after_forward: bool) -> None:
        if self.run.window.count == 0:
            self.clear_gradients()  # the gradients of the last step must not be averaged
        self.run.strategy.sync_without_batch(after_forward)

    def agree_on(self, loss: Tensor | None, last: bool) -> Tensor | None:
        """Return the loss to differentiate, or None if this rank skips the backward pass."""
        run = self.run
        if self.all_or_none:
            without, *_ = run.strategy.ranks.total([loss is None]).read()
            loss = None if without else loss
        if loss is None and (self._syncs or self.all_or_none):
            self._sync_without_batch(after_forward=True)
        self._is_synced = bool(self._syncs)
        if last:
            self._ask_early(run.window.count if loss is None else run.window.count + run.window.weight)
        return loss

    def count_losses(self) -> float:
        """Return the weight of the window's losses as a mean over ranks. Raise if a loss is not finite."""
        run = self.run
        ranks = run.strategy.ranks
        if not self._is_synced:  # the window ended early, on every rank
            run.strategy.sync_gradients(True)
            self._syncs = True
            self._sync_without_batch(after_forward=False)
        self._is_synced = self.is_clear = False
        if self._answer is None:
            self._ask(run.window.count)
        answer: Any = self._answer
        (count, broken, guilty, *fed), self._answer = answer.read(), None
        if broken:
            run.watch.broken = True
            where = f"on rank {guilty:.0f}" if broken == 1 else f"on {broken:.0f} of {ranks.world_size} ranks"
            raise NonFiniteLoss(
                f"The loss was not finite {where}. The run stops, and nothing made from it is saved. "
                "It may be from an earlier batch: NaNGuard() stops at the batch itself and names it. "
                "Trainer(nonfinite='skip') leaves such updates out instead."
            )
        if run.data.router is not None:
            run.window.fed = {number: each / ranks.world_size for number, each in enumerate(fed) if each}
        return float(count / ranks.world_size)

    def _ask_early(self, count: float) -> None:
        """Start the sum of the weights during the backward pass, if it does not depend on that pass."""
        if not self.run.traits.skips_nonfinite and self.run.data.router is None:
            self._ask(count)

    def _ask(self, count: float) -> None:
        run, ranks, broken = self.run, self.run.strategy.ranks, self.run.watch.broken
        fed = (
            []
            if run.data.router is None
            else [run.window.fed.get(number, 0) for number in range(len(run.state.optimizers))]
        )
        self._answer = ranks.add_up(
            torch.tensor([count, broken, broken * ranks.rank, *fed], dtype=torch.float64)
        )
