"""The update: one call of every optimizer, and what surrounds it (a gradient scaler, clipping, optimizer
routing).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hookline.distributed.sharded_norms import agree_on_overflow, scale
from hookline.engine.plan import noop
from hookline.run.optimizers import gradients, needs_closure, total_norm
from hookline.run.run import Run
from hookline.training.backward import loss_of
from hookline.training.batch_events import UpdateEvents, note_outputs, report_clip, skip_step
from hookline.util.errors import SKIP_STEP, STEP_DONE, LossError, Signal

Check = Callable[[], bool]
Action = Callable[[], Any]


class Update(UpdateEvents):
    """Call every optimizer once. `step` advances by one if at least one of them was applied.

    Each tuple holds what this run needs at that place, in the order of the calls; most runs need nothing.
    """

    __slots__ = ("adjustments", "checks", "closing", "notes")

    def __init__(
        self,
        run: Run,
        *,
        checks: tuple[Check, ...] = (),
        adjustments: tuple[Action, ...] = (),
        notes: tuple[Action, ...] = (),
        closing: tuple[Action, ...] = (),
        signal_filters: tuple[Callable[[Signal | None], Signal | None], ...] = (),
    ) -> None:
        """checks: whether this optimizer is to be called. signal_filters: what becomes of a hook's signal.

        adjustments: right before the optimizer is called. notes: right after it. closing: after all
        optimizers.
        """
        super().__init__(run, signal_filters)
        self.checks, self.adjustments, self.notes, self.closing = checks, adjustments, notes, closing

    def __call__(self) -> None:
        """Update the weights."""
        s = self.state
        before = s.counts.step
        s.optimization.norm_tensor = None
        for s.optimization.optimizer_idx, s.optimization.optimizer in enumerate(s.setup.optimizers):
            for check in self.checks:
                if not check():
                    break
            else:
                signal = self.before_step()
                if signal is SKIP_STEP:
                    skip_step(self.run, "hook")
                    continue
                if signal is not STEP_DONE:
                    for adjust in self.adjustments:
                        adjust()
                    self.step()
                for note in self.notes:
                    note()
                self.after_step(before, keeps_rate=True)
        for close in self.closing:
            close()

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step, after every listener had a look."""
        s = self.state
        for s.optimization.optimizer_idx, s.optimization.optimizer in enumerate(s.setup.optimizers):
            if self.plan.on_before_zero_grad is not noop:
                self.before_zero_grad()
            self.plan.optimizer_zero_grad(s)


# ---- what an update may need -------------------------------------------------------------------------------


def unscaling(run: Run) -> Check:
    """Make a check that unscales the gradients; an optimizer with an infinite one is skipped."""

    def is_finite() -> bool:
        if overflowed(run.traits.scaler, run.state.optimization.optimizer):
            skip_step(run, "nonfinite")
            return False
        return True

    return is_finite


def norm_capture(run: Run) -> Check:
    """Make a check that measures the gradient norm before the update, if a listener requests it."""
    plan, s = run.plan, run.state

    def measure() -> bool:
        if "grad_norm" in plan.wanted:
            s.optimization.add_norm(total_norm([s.optimization.optimizer]))
        return True

    return measure


def clipping(run: Run) -> Action:
    """Make the call that clips the gradients, with its event."""
    plan, s = run.plan, run.state

    def clip() -> None:
        plan.configure_gradient_clipping(s)
        if s.optimization.gradient_clip_val is not None:
            report_clip(plan, s)

    return clip


def fresh_closure(run: Run) -> Action:
    """Make the call that lets the closure return the loss that is already there, the first time."""
    closure = run.state.optimization.optimizer_closure

    def renew() -> None:
        closure.fresh = True

    return renew


def routing(run: Run) -> Check:
    """Make a check that skips the optimizers which no batch of this window trained, and rescales the others'
    gradients.
    """
    s, window = run.state, run.window

    def is_routed() -> bool:
        trained = window.fed.get(s.optimization.optimizer_idx)
        if trained is None:
            return False
        window.correction = window.size * window.unit / trained
        if window.correction != 1.0:
            rescale([s.optimization.optimizer], window.correction)
        return True

    return is_routed


def overflowed(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Unscale, and return whether a gradient is infinite. It is the very number that
    scaler.step would read.
    """
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    first = optimizer.param_groups[0]["params"][0]
    if type(first) is not Parameter and found:  # sharded: each rank has looked at its own part
        return agree_on_overflow(
            found, [each for group in optimizer.param_groups for each in group["params"]]
        )
    return any(bool(value.item()) for value in found.values())


def rescale(optimizers: list[Optimizer], factor: float) -> None:
    """Multiply the gradients: losses were divided by what the window was planned to count; make it what it
    does count.
    """
    for optimizer in optimizers:
        if grads := gradients(optimizer):
            scale(grads, factor)


# ---- The closure that optimizers call to get the loss; some compute it anew (LBFGS)


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
        if run.gradient_sync is None:
            return loss
        weight: float = run.data.totals.turn.factor * run.window.correction
        reduced: Tensor = run.strategy.reduce(loss * weight)
        return reduced
