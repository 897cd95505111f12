"""Gradient accumulation: several batches make one update. Also the step of runs that may
leave an update out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.run.finite import all_finite
from hookline.run.optimizers import gradients
from hookline.run.run import Run
from hookline.training.backward import Backward, cannot_train_on, loss_of
from hookline.training.batch_events import note_loss, skip_step
from hookline.training.schedulers import advance_due
from hookline.training.step import TrainStep
from hookline.training.update import Update, rescale
from hookline.util.errors import END_EPOCH, LossError, Signal


class AccumulatedStep(TrainStep):
    """Train on one batch of an accumulation window; the window's last batch makes the update."""

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, backward, update)
        self.window = run.window
        self.loss_filters: tuple[Callable[[Tensor | None], Tensor | None], ...] = ()
        """What becomes of a batch's loss before it is differentiated."""
        self.is_last = True
        """Whether this batch is the window's last."""
        self.rescale: Callable[[float], None] = (
            self._rescale_all if run.data.router is None else run.data.router.begin_update
        )
        """Make the gradients those of the losses that there were, not of the planned number."""

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Also choose the window's length at its first batch; the last window of an epoch may be shorter."""
        window, signal = self.window, super().start(batches_left)
        if signal is not END_EPOCH:
            if window.batches == 0:
                window.size = window_size(self.run, batches_left)
            self.is_last = window.batches + 1 >= window.size
        return signal

    def skip(self, signal: Signal) -> Signal | None:
        """Leave this batch out; a window that ends here still updates on its other batches."""
        if signal is END_EPOCH:
            return signal
        self.window.batches += 1
        if self.is_last:
            self.close_window()
        return None

    def learn(self) -> None:
        """Add this batch's gradients to the window; update the weights if it is the last one."""
        s, window = self.state, self.window
        window.batches += 1  # only now: a step that failed is done again after a resume
        loss = (
            s.current.returned
            if type(s.current.returned) is Tensor
            else loss_of(self.run, s.current.returned)
        )
        for agree in self.loss_filters:
            loss = agree(loss)
        if loss is None:
            note_loss(s, None)
            window.had_none = True
        else:
            if not loss.requires_grad:
                raise LossError(cannot_train_on(s))
            if window.count == 0:
                self.clear_gradients()
            noted = self.backward(loss)
            window.count += window.weight
            window.losses.append(noted)
            self.note_loss(noted, self.weight)
        if self.is_last:
            self.update_window()

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step, after every listener had a look."""
        self.update.clear_gradients()

    def note_loss(self, loss: Any, weight: float) -> None:
        """Add a batch's loss to the epoch's mean, and watch that it is finite."""
        self.run.watch.look(loss)
        self.state.log.train_loss.add(loss, weight)
        for add in self.loss_sinks:
            add(loss, weight)

    def update_window(self) -> None:
        """Update the weights with the window's gradients, unless no batch had a loss or one is not finite."""
        window, s = self.window, self.state
        s.current.window_losses = window.losses if self.run.traits.accumulate > 1 else None
        count = self.count_losses()
        if not count:
            self.skip_update("no_loss")
        elif not self.is_finite():
            self.skip_update("nonfinite")
        else:
            self.rescale(count)
            self.update()
        window.clear()

    def count_losses(self) -> float:
        """Return what the batches of the window that had a loss count."""
        return self.window.count

    def is_finite(self) -> bool:
        """Return whether the window may be used."""
        return True

    def skip_update(self, reason: str) -> None:
        """Report that no update is made."""
        skip_step(self.run, reason)

    def _rescale_all(self, count: float) -> None:
        window = self.window
        window.correction = window.size * window.unit / count
        if window.correction != 1.0:
            rescale(self.state.setup.optimizers, window.correction)

    def close_window(self) -> None:
        """Update on what a window has that ends early, or on a batch that was skipped."""
        run, s, window = self.run, self.state, self.window
        before = s.counts.step
        if self.has_part():
            self.update_window()
        window.clear()
        if s.counts.step > before:
            if run.schedules:
                advance_due(run, True, None)
            self.end_step()

    def has_part(self) -> bool:
        """Return whether a window that ends early has anything to update on, or to report."""
        return bool(self.window.count or self.window.had_none)

    def drop_gradients(self) -> None:
        """The gradients of one batch cannot be told from those of the window's others: drop all of them."""
        window = self.window
        batches = max(0, window.batches - 1)
        window.clear()
        window.batches = batches


def window_size(run: Run, batches_left: int | None) -> int:
    """Return how many batches the window that begins now will have."""
    return run.traits.accumulate if batches_left is None else min(run.traits.accumulate, batches_left)


class CheckedStep(AccumulatedStep):
    """With nonfinite='skip': a window whose loss or gradients are not finite makes no update and no part of
    the epoch's mean.
    """

    def note_loss(self, loss: Any, weight: float) -> None:
        """Hold the loss back until the window turns out finite."""
        self.window.held.append((loss, weight, self.state.log.loader))

    def is_finite(self) -> bool:
        """Look at the losses and gradients of the window; a scaler looks at gradients itself."""
        window, run, s = self.window, self.run, self.state
        routed = [
            each
            for index, each in enumerate(s.setup.optimizers)
            if run.data.router is None or index in window.fed
        ]
        grads = [grad for each in routed for grad in gradients(each)] if run.traits.scaler is None else []
        if not self.everywhere(all_finite([loss for loss, _, _ in window.held], grads)):
            return False
        for loss, weight, loader in window.held:
            s.log.train_loss.add(loss, weight)
            if loader:
                s.log.add_of_loader("train", "loss", loss, weight, loader)
        return True

    def everywhere(self, flag: bool) -> bool:
        """Return whether it holds in every process."""
        return flag
