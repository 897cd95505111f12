"""Gradient accumulation: several batches make one update. Also the step of nonfinite='skip', and steps whose
batches are weighted, within a window or among ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.engine.plan import noop
from hookline.run.finite import all_finite
from hookline.run.optimizers import gradients
from hookline.run.run import Run
from hookline.training.backward import Backward, cannot_train_on, loss_of
from hookline.training.batch_events import set_loss, skip_step
from hookline.training.schedulers import advance_due
from hookline.training.step import TrainStep
from hookline.training.update import Update, rescale
from hookline.util.errors import END_EPOCH, LossError, Signal


class AccumulatedStep(TrainStep):
    """Train on one batch of an accumulation window; the last batch of the window makes the update."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        self.window = run.window
        self.loss_filters: tuple[Callable[[Tensor | None], Tensor | None], ...] = ()
        """Replace the loss of a batch before it is differentiated, or drop it."""
        self.is_last = True
        """Whether this batch is the last of its window."""
        self.rescale: Callable[[float], None] = (
            self._rescale_all if run.data.router is None else run.data.router.begin_update
        )
        """Rescales the gradients from the planned to the actual weight of the window."""

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Start the batch; at the first batch of a window also choose its length."""
        signal = super().start(batches_left)
        if signal is not END_EPOCH:
            self.join_window(batches_left)
        return signal

    def skip_empty(self, batches_left: int | None) -> Signal | None:
        """Leave out a batch that is None; it counts as one of its window."""
        self.join_window(batches_left)
        return super().skip_empty(batches_left)

    def join_window(self, batches_left: int | None) -> None:
        """Choose the length of the window at its first batch; the last window of an epoch may have fewer."""
        window = self.window
        if window.batches == 0:
            most = self.run.traits.accumulate
            window.size = most if batches_left is None else min(most, batches_left)
        self.is_last = window.batches + 1 >= window.size or batches_left == 1

    def skip(self, signal: Signal) -> Signal | None:
        """Skip this batch; if it is the last of its window, update on the other batches."""
        if signal is END_EPOCH:
            return signal
        self.window.batches += 1
        self.progress.windows.skip(self.state.counts.epoch, self.state.current.batch_idx)
        self.end_skipped()
        if self.is_last:
            self.close_window()
        return None

    def learn(self) -> None:
        """Add the gradients of this batch to the window; update the weights if it is the last batch."""
        s, window = self.state, self.window
        window.batches += 1  # not before the step: a resume repeats a step that failed
        loss = (
            s.current.returned
            if type(s.current.returned) is Tensor
            else loss_of(self.run, s.current.returned)
        )
        for choose in self.loss_filters:
            loss = choose(loss)
        if loss is None:
            set_loss(s, None)
            window.had_none = True
            if window.size > 1:
                self.progress.windows.skip(s.counts.epoch, s.current.batch_idx)
        else:
            if not loss.requires_grad:
                raise LossError(cannot_train_on(s))
            if window.count == 0:
                self.clear_gradients()
            value = self.backward(loss)
            window.count += window.weight
            window.losses.append(value)
            self.record_loss(value, self.weight)
        if self.is_last:
            self.update_window()

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step, after on_before_zero_grad."""
        self.update.clear_gradients()

    def record_loss(self, loss: Any, weight: float) -> None:
        """Add the loss of a batch to the epoch's mean, and check that the losses before it are finite."""
        if len(self.window.losses) == 1 or self.plan.on_before_optimizer_step is noop:
            self.run.watch.look(loss)
        else:
            self.run.watch.add(loss)  # those of this window count only if no hook skips its update
        self.state.log.train_loss.add(loss, weight)
        for add in self.loss_sinks:
            add(loss, weight)

    def update_window(self) -> None:
        """Update the weights on the window, unless no batch had a loss or a value is not finite."""
        window = self.window
        self.publish_losses()
        count = self.count_losses()
        if not count:
            self.skip_update("no_loss")
        elif not self.is_finite():
            self.skip_update("nonfinite")
        else:
            self.rescale(count)
            self.update()
        window.clear()

    def publish_losses(self) -> None:
        """Set the losses of the window, of which listeners read the mean."""
        self.state.current.window_losses = self.window.losses if self.window.size > 1 else None

    def count_losses(self) -> float:
        """Return the total weight of the batches of the window that had a loss."""
        return self.window.count

    def is_finite(self) -> bool:
        """Return whether the losses and gradients of the window are finite."""
        return True

    def skip_update(self, reason: str) -> None:
        """Emit on_step_skipped."""
        skip_step(self.run, reason)

    def _rescale_all(self, count: float) -> None:
        window = self.window
        if not self.run.traits.rules.averages_short_windows:
            return
        window.correction = window.size * window.unit / count
        rescale(self.state.setup.optimizers, window.correction)

    def close_window(self) -> None:
        """Update on the batches of a window that ends early, or whose last batch was skipped."""
        run, s, window = self.run, self.state, self.window
        before = s.counts.step
        if self.has_batches():
            self.update_window()
        window.clear()
        if s.counts.step > before:
            if run.schedules:
                advance_due(run, True, None)
            self.end_step()

    def has_batches(self) -> bool:
        """Return whether a window that ends early has a loss to update on, or a missing one to report."""
        return bool(self.window.count or self.window.had_none)

    def drop_gradients(self) -> None:
        """Drop the gradients of the whole window: those of one batch cannot be separated from it."""
        window = self.window
        batches = max(0, window.batches - 1)
        window.clear()
        window.batches = batches


class CheckedStep(AccumulatedStep):
    """The step of nonfinite='skip': a window that is not finite is left out of updates and means."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        self.buffers = run.watch.keep_buffers(run.module, run.strategy.ranks.everywhere)

    def record_loss(self, loss: Any, weight: float) -> None:
        """Hold the loss back until the whole window is known to be finite."""
        self.window.held.append((loss, weight, self.state.log.loader))

    def is_finite(self) -> bool:
        """Return whether all losses and gradients are finite; a gradient scaler checks gradients itself."""
        window, run, s = self.window, self.run, self.state
        routed = [
            each
            for index, each in enumerate(s.setup.optimizers)
            if run.data.router is None or index in window.fed
        ]
        grads = [grad for each in routed for grad in gradients(each)] if run.traits.scaler is None else []
        # each rank checks its shard of the gradients
        if not run.strategy.ranks.everywhere(all_finite([loss for loss, _, _ in window.held], grads)):
            self.buffers.put_back_and_warn()
            return False
        self.buffers.keep()
        for loss, weight, loader in window.held:
            s.log.train_loss.add(loss, weight)
            if loader:
                s.log.add_of_loader("train", "loss", loss, weight, loader)
        return True


# ---- weighted batches --------------------------------------------------------------------------------------


class CountedBatch(TrainStep):
    """A step that counts samples, tokens and losses in `run.data.totals`."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        self.totals = run.data.totals

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Emit on_train_batch_start, and measure the weight of the batch."""
        signal = self.decide(super().start(batches_left))
        if signal is not END_EPOCH:
            s = self.state
            s.log.weight = self.weight = self.totals.begin(s, self.weight if signal is None else 0)
        return signal

    def decide(self, signal: Signal | None) -> Signal | None:
        """Return the signal that takes effect; ranks agree on one."""
        return signal

    def end_skipped(self) -> None:
        """End the totals of a batch that is left out."""
        self.totals.end(self.state)

    def end(self, batches_left: int | None = None) -> None:
        """End the batch, and restore what a padding batch must not change."""
        super().end(batches_left)
        self.totals.end(self.state)

    def count(self) -> None:
        """Count samples and tokens by the totals."""
        self.totals.count(self.state)

    def mean_loss(self) -> Any:
        """Return the loss of this update for a row of metrics."""
        return self.totals.loss_of_row(self.state)


class CountedStep(AccumulatedStep, CountedBatch):
    """A counted step of an accumulation window: the batch is measured first, then it joins the window."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        window, totals = self.window, self.totals
        if window.by != "batches":
            self.loss_filters = (lambda loss: loss if window.weight else totals.without_weight(loss),)

    def record_loss(self, loss: Any, weight: float) -> None:
        """Add the loss to the epoch's mean with its weight."""
        super().record_loss(loss, self.totals.end_backward(self.window, weight))

    def count_losses(self) -> float:
        """Return the total weight of the window's losses, and set the weight of each in its mean."""
        self.totals.ask_for_loss(self.state)
        return self.window.count


class CheckedCountedStep(CountedStep, CheckedStep):
    """`CountedStep` with nonfinite='skip'."""
