"""The training step as Lightning makes it: the closure of an optimizer runs `training_step`, and batches and
losses that are None have their events.
"""

from __future__ import annotations

from typing import Any

import torch

from hookline.engine.hook import Hook
from hookline.engine.listener import overrides
from hookline.interop.lightning.checkpoint_file import LIGHTNING
from hookline.interop.lightning.package import refusal, warn
from hookline.run.module import Module
from hookline.run.optimizers import needs_closure
from hookline.run.run import Run
from hookline.training.accumulation import AccumulatedStep
from hookline.training.actions import install_action
from hookline.training.backward import cannot_train_on, loss_of
from hookline.training.batch_events import set_loss, set_outputs, transfer
from hookline.training.step import TrainStep
from hookline.training.update import run_training_step
from hookline.util.errors import SKIP_STEP, LossError, Signal


def with_closure(run: Run, kind: type[TrainStep]) -> type[TrainStep]:
    """Return the step for a run of Lightning's trainer: one whose optimizer calls training_step in a closure.

    A module of this dialect has it only if its optimizer cannot be called without a closure: its own
    `optimizer_step` is called after on_before_optimizer_step.
    """
    optimizers, traits = run.state.optimizers, run.traits
    shows = not isinstance(run.steps, Module) or any(needs_closure(each) for each in optimizers)
    is_possible = len(optimizers) == 1 and traits.scaler is None and traits.compiled is None
    if not (shows and is_possible and not traits.is_manual and run.data.router is None):
        return kind
    if not traits.recomputes:
        traits.recomputes = True  # the optimizer gets the closure
        install_action(run, "optimizer_step")
    return ClosureStep


class ClosureStep(AccumulatedStep):
    """Train on one batch; the last batch of an accumulation window runs in the optimizer's closure."""

    def __call__(self, batches_left: int | None) -> Signal | None:
        """Train on `state.batch`. Return END_EPOCH if a hook ends the epoch."""
        s = self.state
        s.cache.clear()
        s.log.batch_values.clear()
        if s.current.batch is None:
            return self.skip_empty(batches_left)
        transfer(self.plan, s, self.transfers)
        signal = self.start(batches_left)
        if signal is not None:
            return self.skip(signal)
        self.mark_step()
        if self.is_last:
            self.update_in_closure()
        else:
            run_training_step(self.run)
            self.learn()
        self.end(batches_left)
        if s.counts.step > self.progress.step_before_batch:
            self.end_step()
        set_outputs(s, None)  # it may hold a graph
        return None

    def update_in_closure(self) -> None:
        """Call the optimizer with the closure, and count the update."""
        s, window, update = self.state, self.window, self.update
        update.focus(0, s.setup.optimizers[0])
        s.optimization.set_norm(None)
        s.optimization.optimizer_closure = closure = StepClosure(self)
        update.step()
        if not closure.calls:
            raise refusal(
                f"The closure hasn't been executed: {type(self.run.module).__name__}.optimizer_step did not "
                "call its optimizer_closure, which runs training_step and backward. Pass it to "
                "optimizer.step(closure=optimizer_closure), or call it.",
                "optimizer_closure",
                None,
            )
        set_loss(s, closure.value)  # the loss of the batch is the first one, however often it is recomputed
        self.publish_losses()
        update.after_step(self.progress.step_before_batch, keeps_rate=True)
        window.clear()

    def call_optimizer(self, optimizer: Any, closure: Any, options: dict[str, Any]) -> Any:
        """Call an optimizer for a module's own `optimizer_step`; return what it returns."""

        def with_events() -> Any:
            with torch.enable_grad():
                value = closure()
                self.prepare_update()
            return value

        return optimizer.step(closure=with_events, **options)

    def prepare_update(self) -> None:
        """Emit on_before_optimizer_step, then clip."""
        update, s = self.update, self.state
        for check in update.checks:
            check()
        if update.before_step() is SKIP_STEP:
            for group in s.optimization.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        for adjust in update.adjustments:
            adjust()


class StepClosure:
    """The closure of one update: each call runs the training step, backward, and the events before the
    update.
    """

    fresh = False
    """Set by Hookline's own update; this closure keeps no loss between calls."""

    def __init__(self, step: ClosureStep) -> None:
        self.step = step
        self.calls = 0
        self.value: Any = None
        """The loss of the first call."""
        self._clears = step.window.count == 0
        self._prepares = isinstance(step.run.steps, Module) or not overrides(step.run.steps, "optimizer_step")
        """Whether the events before the update follow each call: not if a LightningModule calls the
        optimizer, whose wrapper emits them.
        """

    def recomputes(self, optimizer: Any) -> bool:
        """Return True: the optimizer calls it."""
        return True

    def __call__(self) -> Any:
        """Return the loss, or None if training_step returned none."""
        self.calls += 1
        progress = self.step.progress
        progress.is_updating = self.calls > 1  # before its first result no weight has changed
        with torch.enable_grad():
            loss = self._differentiate()
            if self._prepares:
                self.step.prepare_update()
        progress.is_updating = True
        return loss

    def _differentiate(self) -> Any:
        step, s, window = self.step, self.step.state, self.step.window
        run_training_step(step.run)
        loss = loss_of(step.run, s.current.returned)
        if self._clears:
            step.clear_gradients()
        if loss is None:
            return None
        if not loss.requires_grad:
            raise LossError(cannot_train_on(s))
        value = step.backward(loss)
        if self.calls == 1:
            self.value = value
            window.batches += 1
            window.count += window.weight
            window.losses.append(value)
            step.record_loss(value, step.weight)
        return loss.detach()


def step_by_hand(run: Run, optimizer: Any, closure: Any, options: dict[str, Any]) -> Any:
    """Call an optimizer in manual optimization, its closure before on_before_optimizer_step; return what the
    optimizer returns.
    """
    handle = next(each for each in run.manual.optimizers if each.optimizer is optimizer)
    if run.traits.scaler is not None or run.traits.skips_nonfinite or not run.strategy.ranks.alone:
        return handle.step(closure)

    def with_events() -> Any:
        value = closure()
        handle.announce()
        return value

    result = optimizer.step(closure=with_events, **options)
    handle.count()
    return result


class LoopEvents(Hook):
    """Emits these events in a run of Lightning's trainer."""

    tier = "builtin"
    name = "lightning_loop"
    is_internal = True

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run = run
        self._is_warned = False

    def on_after_batch_fetch(self, state: Any) -> None:
        """Emit the end of a training batch that is None, which the loop skips."""
        if state.batch is None and state.stage == "fit" and state.log.mode == "train":
            self._run.step.end_empty()

    def on_step_skipped(self, reason: str) -> None:
        """Update with cleared gradients if training_step returned None: Lightning counts such a step."""
        run = self._run
        if reason == "no_loss" and run.traits.scaler is None:
            run.step.update.clear_gradients()
            run.step.update()

    def on_predict_batch_end(self, outputs: Any) -> None:
        """Warn once if predict_step returns nothing, which is probably a forgotten return."""
        if outputs is None and not self._is_warned:
            self._is_warned = True
            warn("predict returned None: predict_step has no result for some batches.")

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        """Continue the counts of Lightning's file, and warn about callbacks in it that this trainer does not
        have, whose state is lost.
        """
        run, saved = self._run, checkpoint.get(LIGHTNING) or {}
        shown = run.trainer.lightning_trainer
        if run.stage == "fit" and (progress := (saved.get("loops") or {}).get("fit_loop")):
            shown._logger_connector.counts.resume(progress)
        present = {str(getattr(each, "state_key", "")) for each in shown.callbacks}
        if lost := [key for key in saved.get("callbacks") or {} if str(key) not in present]:
            warn(
                f"{run.resume.path} has the state of callbacks that this trainer does not have, which is not "
                f"restored. Please add the following callbacks: {lost}."
            )
