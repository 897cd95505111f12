"""The update: one call of every optimizer, with gradient scaling, clipping and optimizer routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hookline.distributed.sharded_norms import agree_on_overflow, scale_gradients
from hookline.engine.plan import noop
from hookline.run.optimizers import gradients, needs_closure, total_norm
from hookline.run.run import Run
from hookline.training.backward import loss_of
from hookline.training.batch_events import UpdateEvents, report_clip, set_outputs, skip_step
from hookline.util.errors import SKIP_STEP, STEP_DONE, LossError, Signal

UpdateCheck = Callable[[], bool]
Action = Callable[[], Any]
NEEDS_ONE_BATCH = (
    "An optimizer that recomputes the loss (LBFGS) cannot be combined with accumulate_grad_batches > 1."
)


class Update(UpdateEvents):
    """Call every optimizer once. `step` advances by one if at least one of them was applied.

    Each tuple holds the calls that this run needs there, in their order; most runs need none.
    """

    __slots__ = ("adjustments", "checks", "closing", "recorders", "watch")

    def __init__(
        self,
        run: Run,
        *,
        checks: tuple[UpdateCheck, ...] = (),
        adjustments: tuple[Action, ...] = (),
        recorders: tuple[Action, ...] = (),
        closing: tuple[Action, ...] = (),
        signal_filters: tuple[Callable[[Signal | None], Signal | None], ...] = (),
    ) -> None:
        """Set the calls around an optimizer step.

        checks: return whether this optimizer is called. adjustments: called before its step. recorders:
        called after it. closing: called after all optimizers. signal_filters: replace a hook's signal.
        """
        super().__init__(run, signal_filters)
        self.checks, self.adjustments, self.recorders, self.closing = checks, adjustments, recorders, closing
        self.watch = run.watch

    def __call__(self) -> None:
        """Update the weights."""
        plan, s = self.plan, self.state
        before = s.counts.step
        s.optimization.norm_tensor = None
        for s.optimization.optimizer_idx, s.optimization.optimizer in enumerate(s.setup.optimizers):
            for check in self.checks:
                if not check():
                    break
            else:
                has_listeners = self.signal_filters or plan.on_before_optimizer_step is not noop
                signal = self.before_step() if has_listeners else None
                if signal is SKIP_STEP:
                    skip_step(self.run, "hook")
                    continue
                if signal is not STEP_DONE:
                    for adjust in self.adjustments:
                        adjust()
                    self.step()
                for record in self.recorders:
                    record()
                self.after_step(before, keeps_rate=True)
        for close in self.closing:
            close()
        if s.counts.step == before and self.progress.last_skip == ("hook", s.counts.batches_seen):
            self.watch.drop()

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step, after on_before_zero_grad."""
        s = self.state
        for s.optimization.optimizer_idx, s.optimization.optimizer in enumerate(s.setup.optimizers):
            if self.plan.on_before_zero_grad is not noop:
                self.before_zero_grad()
            self.plan.optimizer_zero_grad(s)


# ---- the checks and actions of an update -------------------------------------------------------------------


def unscaling(run: Run) -> UpdateCheck:
    """Make a check that unscales the gradients and skips an optimizer with an infinite one."""

    def is_finite() -> bool:
        if overflowed(run.traits.scaler, run.state.optimization.optimizer):
            skip_step(run, "nonfinite")
            return False
        return True

    return is_finite


def norm_capture(run: Run) -> UpdateCheck:
    """Make a check that measures the gradient norm before the update, if a listener requests it."""
    plan, s = run.plan, run.state

    def measure() -> bool:
        if "grad_norm" in plan.wanted:
            s.optimization.add_norm(total_norm([s.optimization.optimizer]))
        return True

    return measure


def early_norm(run: Run) -> tuple[UpdateCheck, Action]:
    """Make a check that measures the gradient norm for on_before_optimizer_step, and the action that drops it
    again before the gradients are clipped, because clipping adds the same norm.
    """
    s = run.state
    before: list[Tensor | None] = [None]

    def measure() -> bool:
        before[0] = s.optimization.norm_tensor
        s.optimization.add_norm(total_norm([s.optimization.optimizer]))
        return True

    return measure, lambda: s.optimization.set_norm(before[0])


def clipping(run: Run) -> Action:
    """Make the action that clips the gradients and emits on_gradient_clip."""
    plan, s = run.plan, run.state

    def clip() -> None:
        plan.configure_gradient_clipping(s)
        if s.optimization.gradient_clip_val is not None:
            report_clip(plan, s)

    return clip


def fresh_closure(run: Run) -> Action:
    """Make the action that lets the closure return the known loss at its first call."""
    closure = run.state.optimization.optimizer_closure

    def renew() -> None:
        closure.fresh = True

    return renew


def routing(run: Run) -> UpdateCheck:
    """Make a check that skips optimizers which no batch of the window trained, and rescales gradients."""
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
    """Unscale the gradients; return whether one is infinite, from the number that scaler.step reads."""
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    first = optimizer.param_groups[0]["params"][0]
    if type(first) is not Parameter and found:  # sharded: each rank has checked its own shard
        return agree_on_overflow(
            found, [each for group in optimizer.param_groups for each in group["params"]]
        )
    return any(bool(value.item()) for value in found.values())


def rescale(optimizers: list[Optimizer], factor: float) -> None:
    """Multiply the gradients. Losses were divided by the planned weight of the window, not the actual one."""
    for optimizer in optimizers:
        if grads := gradients(optimizer):
            scale_gradients(grads, factor)


def run_training_step(run: Run) -> None:
    """Run the training step in an optimizer's closure or a trial; its result is `state.returned`."""
    set_outputs(run.state, run.plan.training_step(run.state))


class Closure:
    """The closure of an optimizer step: returns the known loss, then recomputes it (LBFGS calls it again)."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.fresh = True
        self._recompute = {id(each) for each in run.state.setup.optimizers if needs_closure(each)}

    def recomputes(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's step needs the closure."""
        return id(optimizer) in self._recompute

    def __call__(self) -> Any:
        """Return the loss."""
        run, s = self.run, self.run.state
        if self.fresh or not self.recomputes(s.optimization.optimizer):
            self.fresh = False
            return s.current.last_loss if s.current.last_loss is None else self._over_ranks()
        with torch.enable_grad():
            run.plan.optimizer_zero_grad(s)
            run_training_step(run)
            loss = loss_of(run, s.current.returned)
            if loss is None:
                raise LossError("training_step returned None while the optimizer was recomputing the loss.")
            assert run.step is not None
            run.step.backward(loss)
            if run.window.correction != 1.0:
                rescale([s.optimization.optimizer], run.window.correction)
        return self._over_ranks()

    def _over_ranks(self) -> Tensor:
        """Return the mean loss over ranks: such optimizers branch on the loss, so it must not differ."""
        run = self.run
        loss = torch.as_tensor(run.state.current.last_loss)
        if run.gradient_sync is None:
            return loss
        weight: float = run.data.totals.rank_batch.factor * run.window.correction
        reduced: Tensor = run.strategy.reduce(loss * weight)
        return reduced
