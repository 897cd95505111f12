"""Totals of a batch: samples, tokens and the mean loss, over all ranks and in a weighted accumulation window.

In a weighted window a batch counts by its samples or tokens, so that uneven batches give the gradient of one
large batch. The loss of a batch is multiplied by its weight over `Window.unit`, a fixed reference, because
the total weight of a window is known only at its end. There the gradients are multiplied by
`Window.correction`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.data.sharding import RankBatch, RankSharding
from hookline.data.sources import counts_samples
from hookline.distributed.comm import Answer
from hookline.metrics.metric_log import MetricLog
from hookline.run.parts import Window
from hookline.run.run import Run
from hookline.run.state import State
from hookline.training.ranks.data_pass import PaddingBackup, empty_copy
from hookline.util.errors import OptionError

LOSS_FACTS = frozenset(("loss", "ctx"))


class BatchTotals:
    """Count samples, tokens and losses of all ranks in a fit. One process does not need it.

    A sum over ranks starts when a batch begins and is read when it ends, so that no rank waits for it.
    """

    __slots__ = ("_answer", "_backup", "_is_reader", "_knows_samples", "_run_log", "rank_batch", "run")
    shares_rows = False
    """Whether the loss of every row is reduced over ranks here, not only that of longer windows."""

    def __init__(self, run: Run, rank_batch: RankBatch) -> None:
        self.run = run
        self.rank_batch = rank_batch
        self._knows_samples = all(counts_samples(each.source) for each in run.data.loaders["train"])
        self._is_reader = run.strategy.ranks.is_reader
        self._answer: Answer | None = None
        self._run_log: MetricLog | None = None
        """The log of the run, while a padding batch writes into another log."""
        self._backup: PaddingBackup | None = None
        """The state that a padding batch must not change."""

    def begin(self, s: State, weight: int) -> int:
        """Return the weight of this rank's batch: `weight`, or 0 for a padding batch."""
        run, rank_batch = self.run, self.rank_batch
        if rank_batch.is_padding:
            weight = 0
            self._backup = PaddingBackup(run.module, s.log)
            self._run_log, s.log = s.log, empty_copy(s.log)
        counts_tokens = "tokens_seen" in run.plan.wanted or run.data.is_mixture
        if (
            counts_tokens
            or run.boundary.waits_for_signals
            or rank_batch.samples is None
            or not self._knows_samples
        ):
            tokens = self.tokens_of(s) if counts_tokens and weight else 0
            self._answer = run.strategy.ranks.total([weight, tokens] if self._is_reader else [0, 0])
        return weight

    def tokens_of(self, s: State) -> int:
        """Return the number of tokens in this rank's batch."""
        return self.run.data.count_tokens(s.current.batch)

    def end_backward(self, window: Window, weight: float) -> float:
        """Record that the backward pass is over; return the weight of the loss in the epoch's mean."""
        window.factors.append(self.rank_batch.factor)
        if self._backup is not None:
            self._backup.restore_buffers()
        return weight

    def count(self, s: State) -> None:
        """Count the samples and tokens of all ranks."""
        if self._answer is None:
            samples, tokens = self.rank_batch.samples or 0, 0
        else:
            samples, tokens = self._answer.read()
            self._answer = None
        s.counts.samples_seen += samples
        s.counts.tokens_seen += tokens
        if self.run.data.is_mixture:
            self.run.data.train.count(samples, tokens)

    def end(self, s: State) -> None:
        """End the batch after its last event, and undo what a padding batch changed."""
        if self._answer is not None:  # skipped on this rank; other ranks may have trained on their batch
            self.count(s)
        if self._run_log is not None:
            s.log, self._run_log = self._run_log, None
            s.log.weight = 0
        if self._backup is not None:
            self._backup.restore()
            self._backup = None

    def ask_for_loss(self, s: State) -> None:
        """Start the sum of the window's losses over ranks, if a listener on any rank, or a row, needs it."""
        run, s.current.shared_loss = self.run, None
        wanted = run.plan.wanted_at
        if (
            LOSS_FACTS & wanted.get("on_step_end", frozenset())
            or "loss" in wanted.get("on_before_optimizer_step", ())
        ) or (
            self._shares_row()
            and (s.step + 1) % run.traits.log_every == 0
            and (run.traits.logs or "on_train_metrics" in wanted)
        ):
            if run.traits.accumulate > 1:  # weighted as in the update
                losses, weights = run.window.losses, run.window.factors
            else:
                losses, weights = [s.current.last_loss], [self.loss_weight(s)]
            s.current.shared_loss = SharedLoss(run.strategy.ranks.add_up(self._weighed(losses, weights)))

    def loss_of_row(self, s: State) -> Any:
        """Return the loss for a row: that of this rank, to be reduced later, or the one over all ranks."""
        return (
            s.mean_of_window()
            if not self._shares_row() or s.current.shared_loss is None
            else float(s.current.shared_loss)
        )

    def loss_weight(self, s: State) -> float:
        """Return the weight of this rank's loss in the mean over ranks, for a window of one batch."""
        return 0.0 if self.rank_batch.is_padding else s.log.weight

    def _shares_row(self) -> bool:
        return self.shares_rows or self.run.traits.accumulate > 1

    def _weighed(self, losses: list[Any], weights: list[float]) -> Tensor:
        """Return the weighted sum of the losses and the sum of their weights."""
        counted = [
            (loss, weight)
            for loss, weight in zip(losses, weights, strict=True)
            if loss is not None and weight
        ]
        total, divisor = sum(loss * weight for loss, weight in counted), sum(weight for _, weight in counted)
        if self.run.traits.on_cpu:
            return torch.tensor([total, divisor], dtype=torch.float64)
        device = self.run.strategy.device
        # torch.full fills on the device, so that nothing waits for a copy to it
        return torch.stack(
            [
                each.float() if isinstance(each, Tensor) else torch.full((), float(each), device=device)
                for each in (total, divisor)
            ]
        )


class SharedLoss:
    """The mean loss over all ranks, from a sum that was started. Reading it may wait, but sends nothing."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __float__(self) -> float:
        total, weight = self._answer.read()
        return total / weight if weight else float("nan")


# ---- weighted batches --------------------------------------------------------------------------------------


log = logging.getLogger("hookline")


class WeightedTotals(BatchTotals):
    """The totals of a weighted window: also measure the weight of each batch, and write it to the window."""

    __slots__ = ("by_tokens", "count_tokens")
    shares_rows = True

    def __init__(self, run: Run, rank_batch: RankBatch) -> None:
        super().__init__(run, rank_batch)
        self.by_tokens = run.window.by == "tokens"
        self.count_tokens = WholeCount(run.data.count_tokens)

    def begin(self, s: State, weight: int) -> int:
        """Measure the weight of this rank's batch; return its number of samples."""
        self.measure(s.current.batch, 0 if self.rank_batch.is_padding else weight)
        return super().begin(s, weight)

    def measure(self, batch: Any, samples: int) -> None:
        """Measure the weight of a batch of so many samples; 0: it is skipped, or a padding batch."""
        window = self.run.window
        window.weight = weight = self.count_tokens(batch) if self.by_tokens and samples else samples
        if window.batches == 0:
            window.unit = self._next_unit(weight)
            window.correction = 1.0  # the unit includes the correction of the last window
        self.rank_batch.factor = weight / window.unit

    def _next_unit(self, weight: int) -> float:
        """Return the unit of a new window, the same on every rank: the mean weight in the window before.

        It keeps scaled losses in the range of unweighted ones, which matters for float16. It is rounded up to
        a power of two, so that it changes no digit of the update.
        """
        run, window, ranks = self.run, self.run.window, self.run.strategy.ranks
        if ranks.alone and run.traits.accumulate == 1:
            return weight or 1  # a single batch needs no reference
        mean = (
            window.unit / window.correction
            if window.unit
            else ranks.total([weight]).read()[0] / ranks.world_size  # the first window
        )
        fraction, exponent = math.frexp(mean)
        return math.ldexp(1.0, exponent - (fraction == 0.5)) if mean else 1.0

    def without_weight(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss to differentiate for a batch of weight 0, which may be NaN: a mean of nothing."""
        run = self.run
        if loss is None or self.rank_batch.is_padding:
            return loss
        run.window.had_none = True
        # if the forward communicates, a batch without a loss here would be skipped on all ranks
        return (
            loss.nan_to_num(0.0, 0.0, 0.0)
            if run.gradient_sync is not None and run.gradient_sync.all_or_none
            else None
        )

    def tokens_of(self, s: State) -> int:
        """Return the number of tokens in this rank's batch, counted once."""
        return self.run.window.weight if self.by_tokens else super().tokens_of(s)

    def end_backward(self, window: Window, weight: float) -> float:
        """Record that the backward pass is over; return the weight of the loss in the epoch's mean."""
        super().end_backward(window, weight)
        return window.weight

    def ask_for_loss(self, s: State) -> None:
        """Set the weight of each loss in the mean of the window, and start the sum over ranks."""
        s.current.window_weights = self.run.window.factors
        super().ask_for_loss(s)

    def loss_weight(self, s: State) -> float:
        """Return the weight of this rank's loss in the mean over ranks, for a window of one batch."""
        return self.run.window.weight


class WeightedBatches(WeightedTotals):
    """The totals of a weighted window on one process, which sums nothing over ranks."""

    __slots__ = ("_samples",)

    def begin(self, s: State, weight: int) -> int:
        """Measure the weight of a batch; return its number of samples."""
        self._samples = weight
        self.measure(s.current.batch, weight)
        return weight

    def count(self, s: State) -> None:
        """Count the samples and tokens of a finished batch."""
        s.counts.samples_seen += self._samples
        if "tokens_seen" in self.run.plan.wanted:
            s.counts.tokens_seen += self.tokens_of(s)

    def ask_for_loss(self, s: State) -> None:
        """Set the weight of each loss in the mean of the window."""
        s.current.window_weights = self.run.window.factors


class WholeCount:
    """Call `count_tokens` and refuse a result that is not a whole number."""

    __slots__ = ("_count", "_is_slow")

    def __init__(self, count: Callable[[Any], int]) -> None:
        self._count = count
        self._is_slow = False

    def __call__(self, batch: Any) -> int:
        """Return the number of tokens in a batch."""
        found = self._count(batch)
        return found if type(found) is int and found >= 0 else self._read(found)

    def _read(self, found: Any) -> int:
        if isinstance(found, Tensor) and found.device.type != "cpu" and not self._is_slow:
            self._is_slow = True
            log.warning(
                "count_tokens returns a tensor on %s, so every batch waits for the device before its step. "
                "Count when the batch is made (collate_fn), keep the number in the batch, and return that.",
                found.device,
            )
        try:
            number = math.nan if isinstance(found, str | bytes) else float(found)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not number >= 0 or number != number // 1:
            raise OptionError(
                f"count_tokens returned {str(found)[:60]} ({type(found).__name__}); accumulate_by='tokens' "
                "needs a whole number of tokens from 0 for every batch."
            )
        return int(number)


def make_totals(run: Run, sharding: RankSharding) -> BatchTotals | None:
    """Return the totals that this run needs; None on one process with unweighted batches."""
    is_weighted, batch = run.window.by != "batches", sharding.rank_batch
    if sharding.ranks.alone:
        return WeightedBatches(run, RankBatch()) if is_weighted else None
    return WeightedTotals(run, batch) if is_weighted else BatchTotals(run, batch)
