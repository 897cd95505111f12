"""A batch among those of all ranks: their samples and tokens are counted together, and their losses become
one.
"""

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
from hookline.training.ranks.data_pass import Kept, blank

LOSS_FACTS = frozenset(("loss", "ctx"))


class BatchTotals:
    """One for each fit of several ranks; on one process there is none.

    What only the ranks themselves know is asked for when a batch begins and read when it is done, so that
    nobody waits.
    """

    __slots__ = ("_answer", "_aside", "_kept", "_knows_samples", "run", "turn")
    shares_rows = False
    """Whether the loss of every row is one that ranks have weighted together, not only that of longer
    windows.
    """

    def __init__(self, run: Run, turn: RankBatch) -> None:
        self.run = run
        self.turn = turn
        self._knows_samples = all(counts_samples(each.source) for each in run.data.loaders["train"])
        self._answer: Answer | None = None
        self._aside: MetricLog | None = None
        """The run's own log, while a batch that counts for nothing writes into another one."""
        self._kept: Kept | None = None
        """What that batch must leave as it was."""

    def begin(self, s: State, weight: int) -> int:
        """What this rank's batch weighs; `weight` is what it would alone. A padding batch weighs nothing."""
        run, turn = self.run, self.turn
        if turn.is_padding:
            weight = 0
            self._kept = Kept(run.module, s.log)
            self._aside, s.log = s.log, blank(s.log)
        counts_tokens = "tokens_seen" in run.plan.wanted or run.data.is_mixture
        if counts_tokens or run.boundary.waits_for_signals or turn.samples is None or not self._knows_samples:
            self._answer = run.strategy.ranks.total(
                [weight, self.tokens_of(s) if counts_tokens and weight else 0]
            )
        return weight

    def tokens_of(self, s: State) -> int:
        """Return the number of tokens in this rank's batch."""
        return self.run.data.count_tokens(s.current.batch)

    def learnt(self, window: Window, weight: float) -> float:
        """Note that the backward of a batch is over. Return what its loss counts in the epoch's mean."""
        window.factors.append(self.turn.factor)
        if self._kept is not None:
            self._kept.put_back_buffers()
        return weight

    def count(self, s: State) -> None:
        """The batches of all ranks are done."""
        if self._answer is None:
            samples, tokens = self.turn.samples or 0, 0
        else:
            samples, tokens = self._answer.read()
            self._answer = None
        s.counts.samples_seen += samples
        s.counts.tokens_seen += tokens
        if self.run.data.is_mixture:
            self.run.data.train.count(samples, tokens)

    def end(self, s: State) -> None:
        """Everybody has heard of this batch."""
        if self._answer is not None:  # it was skipped here; other ranks may have trained on theirs
            self.count(s)
        if self._aside is not None:
            s.log, self._aside = self._aside, None
            s.log.weight = 0
        if self._kept is not None:
            self._kept.put_back()
            self._kept = None

    def ask_for_loss(self, s: State) -> None:
        """Begin to find the mean loss of this window over all ranks, if anybody anywhere wants to know it at
        on_step_end.
        """
        run, s.current.shared_loss = self.run, None
        wanted = run.plan.wanted_at
        if LOSS_FACTS & wanted.get("on_step_end", frozenset()) or (
            self._shares_row()
            and (s.step + 1) % run.traits.log_every == 0
            and (run.traits.logs or "on_train_metrics" in wanted)
        ):
            if run.traits.accumulate > 1:  # each batch counts as much as it has for the update
                losses, weights = run.window.losses, run.window.factors
            else:
                losses, weights = [s.current.last_loss], [self.loss_weight(s)]
            s.current.shared_loss = SharedLoss(run.strategy.ranks.add_up(self._weighed(losses, weights)))

    def loss_of_row(self, s: State) -> Any:
        """What a row says of an update: this rank's loss, to be weighed with the others', or of a longer
        window that of all.
        """
        return (
            s.mean_of_window()
            if not self._shares_row() or s.current.shared_loss is None
            else float(s.current.shared_loss)
        )

    def loss_weight(self, s: State) -> float:
        """Return what the loss of a window of one batch counts among those of other ranks."""
        return 0.0 if self.turn.is_padding else s.log.weight

    def _shares_row(self) -> bool:
        return self.shares_rows or self.run.traits.accumulate > 1

    def _weighed(self, losses: list[Any], weights: list[float]) -> Tensor:
        """The sum of the losses, each as often as it counts, and how much all of them count."""
        counted = [
            (loss, weight)
            for loss, weight in zip(losses, weights, strict=True)
            if loss is not None and weight
        ]
        total, many = sum(loss * weight for loss, weight in counted), sum(weight for _, weight in counted)
        if self.run.traits.on_cpu:
            return torch.tensor([total, many], dtype=torch.float64)
        device = self.run.strategy.device
        # filled there and not sent there: nothing waits for a copy
        return torch.stack(
            [
                each.float() if isinstance(each, Tensor) else torch.full((), float(each), device=device)
                for each in (total, many)
            ]
        )


class SharedLoss:
    """A loss over all ranks that is on its way; reading it talks to nobody, but may wait for it."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __float__(self) -> float:
        total, weight = self._answer.read()
        return total / weight if weight else float("nan")
