"""Totals of a batch over all ranks: samples, tokens and the mean loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.data.sharding import RankBatch
from hookline.data.sources import counts_samples
from hookline.distributed.comm import Answer
from hookline.metrics.metric_log import MetricLog
from hookline.run.parts import Window
from hookline.run.run import Run
from hookline.run.state import State
from hookline.training.ranks.data_pass import PaddingBackup, empty_copy

LOSS_FACTS = frozenset(("loss", "ctx"))


class BatchTotals:
    """Count samples, tokens and losses of all ranks in a fit. One process does not need it.

    A sum over ranks starts when a batch begins and is read when it ends, so that no rank waits for it.
    """

    __slots__ = ("_answer", "_backup", "_knows_samples", "_run_log", "rank_batch", "run")
    shares_rows = False
    """Whether the loss of every row is reduced over ranks here, not only that of longer windows."""

    def __init__(self, run: Run, rank_batch: RankBatch) -> None:
        self.run = run
        self.rank_batch = rank_batch
        self._knows_samples = all(counts_samples(each.source) for each in run.data.loaders["train"])
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
            self._answer = run.strategy.ranks.total(
                [weight, self.tokens_of(s) if counts_tokens and weight else 0]
            )
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
        if LOSS_FACTS & wanted.get("on_step_end", frozenset()) or (
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
