"""Manual optimization: the training step calls backward and the optimizers itself, and the events still fire."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hookline.errors import SKIP_STEP, STEP_DONE
from hookline.loops.run import Run
from hookline.loops.step import differentiate, overflowed


class ManualOptimizer:
    """An optimizer whose `step` and `zero_grad` fire their events. Everything else is the optimizer's own."""

    def __init__(self, run: Run, optimizer: Optimizer, index: int) -> None:
        self._run = run
        self._index = index
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, after everyone had a look."""
        s = self._focus()
        self._run.plan.on_before_zero_grad(s)
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        """Update the weights; the first update of a batch advances `step`."""
        run, s = self._run, self._focus()
        plan, scaler = run.plan, run.scaler
        if scaler is not None:
            if id(self.optimizer) in run.unscaled:  # a second step in one batch
                scaler.update()
                run.unscaled.clear()
            run.unscaled.add(id(self.optimizer))
            if overflowed(scaler, self.optimizer):
                s.reason = "nonfinite"
                plan.on_step_skipped(s)
                return
        s.norm_tensor = None
        signal = plan.on_before_optimizer_step(s)
        if signal is SKIP_STEP:
            s.reason = "hook"
            plan.on_step_skipped(s)
        else:
            if signal is not STEP_DONE:
                s.optimizer_closure = closure
                plan.optimizer_step(s)
            s.used_lr = self.optimizer.param_groups[0]["lr"]
            s.step = run.step_before_batch + 1
            plan.on_after_optimizer_step(s)

    def _focus(self) -> Any:
        s = self._run.state
        s.optimizer, s.optimizer_idx = self.optimizer, self._index
        return s


def manual_backward(run: Run, loss: Tensor) -> None:
    """Differentiate a loss with the events around it."""
    run.state.live_loss = loss
    differentiate(run, run.plan, run.state)
