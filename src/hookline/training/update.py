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


class UpdateParts:
    """The checks and actions around the step of one optimizer, `state.optimizer`."""

    def __init__(self, run: Run) -> None:
        self.run, self.plan, self.state = run, run.plan, run.state
        self._norm_before: Tensor | None = None

    def unscale(self) -> bool:
        """Unscale the gradients; return False for an infinite one, which skips the optimizer."""
        if overflowed(self.run.traits.scaler, self.state.optimization.optimizer):
            skip_step(self.run, "nonfinite")
            return False
        return True

    def measure_norm(self) -> bool:
        """Measure the gradient norm before the update, if a listener requests it."""
        if "grad_norm" in self.plan.wanted:
            optimization = self.state.optimization
            optimization.add_norm(total_norm([optimization.optimizer]))
        return True

    def measure_norm_early(self) -> bool:
        """Measure the gradient norm for on_before_optimizer_step; `drop_early_norm` drops it again."""
        optimization = self.state.optimization
        self._norm_before = optimization.norm_tensor
        optimization.add_norm(total_norm([optimization.optimizer]))
        return True

    def drop_early_norm(self) -> None:
        """Drop the early norm before the gradients are clipped, because clipping adds the same norm."""
        self.state.optimization.set_norm(self._norm_before)

    def clip(self) -> None:
        """Clip the gradients and emit on_gradient_clip."""
        self.plan.configure_gradient_clipping(self.state)
        if self.state.optimization.gradient_clip_val is not None:
            report_clip(self.plan, self.state)

    def renew_closure(self) -> None:
        """Let the closure return the known loss at its first call."""
        self.state.optimization.optimizer_closure.fresh = True

    def route(self) -> bool:
        """Return whether a batch of the window trained this optimizer; rescale its gradients then."""
        window, optimization = self.run.window, self.state.optimization
        trained = window.fed.get(optimization.optimizer_idx)
        if trained is None:
            return False
        window.correction = window.size * window.unit / trained
        rescale([optimization.optimizer], window.correction)
        return True


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
    if factor == 1.0:
        return
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
