"""Manual optimization: the training step calls backward and the optimizers; the events are still emitted."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hookline.run.finite import all_finite
from hookline.run.optimizers import bare, gradients, total_norm
from hookline.run.run import Run
from hookline.training.backward import Backward, cannot_train_on, log_numbers
from hookline.training.batch_events import UpdateEvents, set_loss, skip_step
from hookline.training.step import TrainStep
from hookline.training.update import Update, overflowed
from hookline.util.errors import SKIP_STEP, STEP_DONE, HooklineError, LossError, Signal

log = logging.getLogger("hookline")


class ManualStep(TrainStep):
    """Train on one batch whose training step calls backward and the optimizers itself."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        if run.traits.skips_nonfinite:
            run.watch.keep_buffers(run.module, run.strategy.ranks.everywhere)

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Clear the loss of the last batch and start this one. Its loss is that of the last backward pass,
        unless the step returns one.
        """
        set_loss(self.state, None)
        return super().start(batches_left)

    def learn(self) -> None:
        """Record the loss; the training step has done everything else."""
        run, s = self.run, self.state
        run.manual.is_inside = False
        if run.traits.scaler is not None and run.manual.unscaled:
            run.traits.scaler.update()
            run.manual.forget_scaling()
        loss = s.current.returned
        if isinstance(loss, dict):
            log_numbers(run, loss)
            loss = loss.get("loss")
        if isinstance(loss, Tensor):
            set_loss(s, loss.item() if run.traits.on_cpu else loss.detach())
        if s.current.last_loss is not None:
            self.record_loss(s.current.last_loss)

    def record_loss(self, loss: Any) -> None:
        """Add the loss to the epoch's mean, unless its update was skipped because it is not finite."""
        run, s = self.run, self.state
        skip, batches = run.progress.last_skip, s.counts.batches_seen
        if run.traits.skips_nonfinite:
            if skip == ("nonfinite", batches):
                return
        elif skip != ("hook", batches) or s.counts.step > self.progress.step_before_batch:
            run.watch.look(loss)
        s.log.train_loss.add(loss, self.weight)
        for add in self.loss_sinks:
            add(loss, self.weight)

    def close_failed_batch(self) -> None:
        """Warn of what a training step did before it failed: it cannot be undone."""
        if self.run.manual.is_inside:
            log.warning(
                "The training step failed after it had called backward or an optimizer. The saved state "
                "contains this, and a resume trains on the batch again: resume from an earlier checkpoint "
                "for the same bits."
            )


class ManualOptimizer:
    """An optimizer whose `step` and `zero_grad` emit events. All else is forwarded to the optimizer."""

    def __init__(self, run: Run, optimizer: Optimizer, index: int) -> None:
        self._run = run
        self._index = index
        self._events = UpdateEvents(run, run.boundary.signal_filters)
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, after on_before_zero_grad."""
        self._events.focus(self._index, self.optimizer)
        self._events.before_zero_grad()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        """Update the weights; the first update of a batch advances `step`."""
        run, s, events = self._run, self._run.state, self._events
        run.manual.is_inside = True
        events.focus(self._index, self.optimizer)
        if not run.traits.is_manual:
            refuse_automatic(run, "step() on what self.optimizers() returns")
        if not self._is_usable(closure):
            if run.watch.kept is not None:
                run.watch.kept.put_back_and_warn()
            skip_step(run, "nonfinite")
            return
        signal = self.announce()
        if signal is SKIP_STEP:
            skip_step(run, "hook")
            run.watch.drop()
            return
        if signal is not STEP_DONE:
            s.optimization.optimizer_closure = closure
            events.step()
        self.count()
        if run.watch.kept is not None:
            run.watch.kept.keep()

    def announce(self) -> Signal | None:
        """Measure the gradients, if a listener requests it, and emit on_before_optimizer_step."""
        run, s = self._run, self._run.state
        self._events.focus(self._index, self.optimizer)
        s.optimization.set_norm(total_norm([self.optimizer]) if "grad_norm" in run.plan.wanted else None)
        return self._events.before_step()

    def count(self) -> None:
        """Count the update and emit on_after_optimizer_step."""
        run, counts_all = self._run, self._run.traits.rules.counts_every_optimizer
        self._events.focus(self._index, self.optimizer)  # a closure may have called another one
        self._events.after_step(run.state.counts.step if counts_all else run.progress.step_before_batch)

    def _is_usable(self, closure: Any) -> bool:
        """Unscale the gradients, once per step; return whether an update may use them."""
        run, scaler = self._run, self._run.traits.scaler
        if scaler is None:
            # with a closure the gradients do not exist yet
            # on every rank, because with sharding each rank has its own gradients
            return (
                not run.traits.skips_nonfinite
                or closure is not None
                or run.strategy.ranks.everywhere(all_finite([], gradients(self.optimizer)))
            )
        if id(self.optimizer) in run.manual.stepped:  # a second step in one batch
            scaler.update()
            run.manual.forget_scaling()
        run.manual.stepped.add(id(self.optimizer))
        return not unscale_once(run, self.optimizer)


def unscale_once(run: Run, optimizer: Any) -> bool:
    """Unscale the gradients before clipping, once per step; return whether one is infinite."""
    optimizer = bare(optimizer)
    if run.traits.scaler is None:
        return False
    if id(optimizer) not in run.manual.unscaled:
        run.manual.unscaled[id(optimizer)] = overflowed(run.traits.scaler, optimizer)
    return run.manual.unscaled[id(optimizer)]


def manual_backward(run: Run, loss: Tensor, **options: Any) -> None:
    """Differentiate a loss and emit the events around it. options: those of `Tensor.backward`."""
    s = run.state
    if not run.traits.is_manual:
        refuse_automatic(run, "self.manual_backward()")
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise LossError(cannot_train_on(s))
    s.current.backward_options = options
    run.manual.is_inside = True
    assert run.step is not None
    value = run.step.backward(loss)
    s.current.backward_options = {}
    if not run.traits.skips_nonfinite:
        run.watch.look(value)


def refuse_automatic(run: Run, call: str) -> None:
    """Raise, because a module with automatic optimization would train twice on every batch."""
    raise HooklineError(
        f"{type(run.module).__name__} has called {call}, but its optimization is automatic: the trainer "
        "also calls backward and the optimizers. Set automatic_optimization = False in the class, or "
        "remove the call."
    )
