"""A batch among those of all ranks: their samples and tokens are counted together, and their losses become one."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.data.dealing import Turn
from hookline.data.sources import counts_samples
from hookline.loops.ghosts import blank
from hookline.loops.run import Run
from hookline.metrics import MetricLog
from hookline.ranks import Answer
from hookline.state import State

LOSS_FACTS = frozenset(("loss", "ctx"))


class Tally:
    """One for each fit of several ranks; on one process there is none.

    What only the ranks themselves know is asked for when a batch begins and read when it is done, so that nobody waits.
    """

    __slots__ = ("_answer", "_aside", "_knows_samples", "run", "turn")

    def __init__(self, run: Run, turn: Turn) -> None:
        self.run = run
        self.turn = turn
        self._knows_samples = all(counts_samples(each.source) for each in run.loaders["train"])
        self._answer: Answer | None = None
        self._aside: MetricLog | None = None
        """The run's own log, while a batch that counts for nothing writes into another one."""

    def begin(self, s: State, weight: int) -> int:
        """What this rank's batch weighs; `weight` is what it would alone. A ghost weighs nothing."""
        run, turn = self.run, self.turn
        if turn.is_ghost:
            weight = 0
            self._aside, s.log = s.log, blank(s.log)
        counts_tokens = "tokens_seen" in run.plan.wanted or run.mixes
        if counts_tokens or run.steers_batches or turn.samples is None or not self._knows_samples:
            self._answer = run.strategy.ranks.total([weight, run.count_tokens(s.batch) if counts_tokens and weight else 0])
        return weight

    def count(self, s: State) -> None:
        """The batches of all ranks are done."""
        if self._answer is None:
            samples, tokens = self.turn.samples or 0, 0
        else:
            samples, tokens = self._answer.read()
            self._answer = None
        s.samples_seen += samples
        s.tokens_seen += tokens
        if self.run.mixes:
            self.run.train.count(samples, tokens)

    def end(self, s: State) -> None:
        """Everybody has heard of this batch."""
        if self._answer is not None:  # it was skipped here; other ranks may have trained on theirs
            self.count(s)
        if self._aside is not None:
            s.log, self._aside = self._aside, None
            s.log.weight = 0

    def ask_for_loss(self, s: State) -> None:
        """Begin to find the mean loss of this window over all ranks, if anybody anywhere wants to know it at on_step_end."""
        s.shared_loss = None
        if LOSS_FACTS & self.run.plan.wanted_at.get("on_step_end", LOSS_FACTS ^ LOSS_FACTS):
            loss = s.mean_of_window()
            weight = 0.0 if loss is None or self.turn.is_ghost else s.log.weight
            s.shared_loss = SharedLoss(self.run.strategy.ranks.add_up(_weighed(loss, weight)))


def _weighed(loss: Tensor | float | None, weight: float) -> Tensor:
    if isinstance(loss, Tensor):
        return torch.stack([loss.detach() * weight, torch.full_like(loss, weight)])
    return torch.tensor([(loss or 0.0) * weight if weight else 0.0, weight], dtype=torch.float64)


class SharedLoss:
    """A loss over all ranks that is on its way; reading it talks to nobody, but may wait for it."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __float__(self) -> float:
        total, weight = self._answer.read()
        return total / weight if weight else float("nan")

