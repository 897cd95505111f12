"""What the ranks of a run settle about each window: whether everyone's gradients came together, and what they
are worth.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.run.run import Run
from hookline.util.errors import NonFiniteLoss


class RankGradientSync:
    """One for each run of several ranks; a run of one process has none, and pays nothing for it.

    Ranks may differ in whether a step gave a loss, and they may not know it of each other in time. So a rank
    without a loss takes part in the averaging with nothing, the number of losses is added up meanwhile, and
    the update is what one process would have made of all the losses there were.
    """

    __slots__ = ("_answer", "_is_synced", "_syncs", "all_or_none", "is_clear", "run", "syncs_always")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.all_or_none = run.strategy.forward_communicates
        """Whether a backward makes ranks wait for each other before the window's end; then a batch without a
        loss on one rank is one without a loss on all.
        """
        self.syncs_always = run.data.router is not None
        """Where batches train different optimizers, gradients that are put aside in between must be complete
        ones.
        """
        self._syncs: bool | None = None
        self._is_synced = False
        self.is_clear = False
        """Whether the gradients are this window's alone."""
        self._answer: Any = None

    def begin_batch(self, last: bool) -> None:
        """The window's last batch brings the gradients together."""
        syncs = last or self.syncs_always
        if syncs is not self._syncs:
            self._syncs = syncs
            self.run.strategy.sync_gradients(syncs)
        self._is_synced = False

    def skip_batch(self, last: bool) -> None:
        """A batch that is left out still takes part in what others do with theirs."""
        if self._syncs:
            self._sync_without_batch(after_forward=False)
            self._is_synced = True
        else:
            self.run.strategy.skip_batch()
        if last:
            self._ask_early(self.run.window.count)

    def clear_gradients(self) -> None:
        """Once in a window, by the first batch that adds to them or takes what others have added."""
        if not self.is_clear:
            self.is_clear = True
            assert self.run.step is not None
            self.run.step.update.clear_gradients()

    def _sync_now(self) -> None:
        self.run.strategy.sync_gradients(True)
        self._syncs = True
        self._sync_without_batch(after_forward=False)

    def _sync_without_batch(self, after_forward: bool) -> None:
        if self.run.window.count == 0:
            self.clear_gradients()  # those of the step before are no part of this one
        self.run.strategy.sync_without_batch(after_forward)

    def agree_on(self, loss: Tensor | None, last: bool) -> Tensor | None:
        """The loss to differentiate, or None: then nobody waits for this rank's backward."""
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
        """What batches with a loss count in this window, as a mean over ranks, once everyone's gradients have
        come together.
        """
        run = self.run
        ranks = run.strategy.ranks
        if not self._is_synced:  # a window that ended before its time, on every rank
            self._sync_now()
        self._is_synced = self.is_clear = False
        if self._answer is None:
            self._ask(run.window.count)
        answer: Any = self._answer
        (count, broken, guilty, *fed), self._answer = answer.read(), None
        if broken:
            run.watch.broken = True
            who = f"on rank {guilty:.0f}" if broken == 1 else f"on {broken:.0f} of {ranks.world_size} ranks"
            raise NonFiniteLoss(
                f"The loss was not finite {who}. The run stops, and nothing made from it is saved. "
                "Trainer(nonfinite='skip') leaves such updates out instead."
            )
        if run.data.router is not None:
            run.window.fed = {number: each / ranks.world_size for number, each in enumerate(fed) if each}
        return float(count / ranks.world_size)

    def everywhere(self, flag: bool) -> bool:
        """Whether it holds on every rank."""
        return self.run.strategy.ranks.total([not flag]).read() == [0]

    def _ask_early(self, count: float) -> None:
        """Ask while backward computes, if the answer does not depend on it. All ranks ask in the same order,
        before the loss.
        """
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
