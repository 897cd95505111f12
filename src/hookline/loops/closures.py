"""The closure that optimizers call to get the loss; some compute it anew (LBFGS)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookline.errors import LossError
from hookline.loops.backward import loss_of
from hookline.loops.batch_events import note_outputs
from hookline.loops.run import Run
from hookline.loops.update import rescale
from hookline.optimizers import needs_closure


class Closure:
    """What optimizers call to get the loss: the one already there; the second time, for those that ask,
    computed anew.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.fresh = True
        self._recompute = {id(each) for each in run.state.setup.optimizers if needs_closure(each)}

    def recomputes(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's step needs the closure."""
        return id(optimizer) in self._recompute

    def __call__(self) -> Any:
        """The loss."""
        run, s = self.run, self.run.state
        if self.fresh or not self.recomputes(s.optimization.optimizer):
            self.fresh = False
            return s.current.last_loss if s.current.last_loss is None else self._over_ranks()
        with torch.enable_grad():
            run.plan.optimizer_zero_grad(s)
            note_outputs(s, run.plan.training_step(s))
            loss = loss_of(run, s.current.returned)
            if loss is None:
                raise LossError("training_step returned None while the optimizer was recomputing the loss.")
            assert run.step is not None
            run.step.backward(loss)
            if run.window.correction != 1.0:
                rescale([s.optimization.optimizer], run.window.correction)
        return self._over_ranks()

    def _over_ranks(self) -> Tensor:
        """Such optimizers decide by the loss how to go on, and must do so alike on every rank."""
        run = self.run
        loss = torch.as_tensor(run.state.current.last_loss)
        if run.together is None:
            return loss
        weight: float = run.data.totals.turn.factor * run.window.correction
        reduced: Tensor = run.strategy.reduce(loss * weight)
        return reduced
