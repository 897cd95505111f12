"""One training batch: move, batch start, forward, backward, update, batch end, step end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.run.run import Run
from hookline.training.backward import Backward, cannot_train_on, loss_of
from hookline.training.batch_events import BatchEvents, set_loss, set_outputs, skip_step, transfer
from hookline.training.schedulers import advance_due
from hookline.training.update import Update
from hookline.util.errors import END_EPOCH, SKIP_BATCH, LossError, Signal

log = logging.getLogger("hookline")


class TrainStep(BatchEvents):
    """Train on one batch, with one update per batch.

    `choose_step` picks the class and its parts before the first batch. Subclasses replace the named
    methods: see `accumulation.py` and `manual.py`.
    """

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        super().__init__(run, run.data.count_tokens, run.traits.log_every, run.traits.logs)
        self.run = run
        self.backward = backward
        self.update = update
        if run.schedules:
            self.schedulers = (functools.partial(advance_due, run),)
        self.transfers = run.traits.transfers
        s = run.state
        self.loss_sinks: tuple[Callable[[Any, float], None], ...] = (
            ()
            if not run.data.is_mixture
            else (lambda loss, weight: s.log.add_of_loader("train", "loss", loss, weight, s.log.loader),)
        )
        """Further sums that each loss is added to."""
        if run.data.is_mixture:
            self.row_parts = (run.data.train.metrics,)

    def __call__(self, batches_left: int | None) -> Signal | None:
        """Train on `state.batch`. Return END_EPOCH if a hook ends the epoch."""
        plan, s = self.plan, self.state
        if s.cache:
            s.cache.clear()
        if s.log.batch_values:
            s.log.batch_values.clear()
        if s.current.batch is None:
            return self.skip_empty(batches_left)

        transfer(plan, s, self.transfers)
        signal = self.start(batches_left)
        if signal is not None:
            return self.skip(signal)
        self.progress.step_before_batch = s.counts.step
        s.current.returned = plan.training_step(s)
        self.learn()
        self.end(batches_left)
        if s.counts.step > self.progress.step_before_batch:
            self.end_step()
        s.current.returned = None  # it may hold a graph
        return None

    def skip_empty(self, batches_left: int | None) -> Signal | None:
        """Leave out a batch that is None, and warn once per run."""
        if not self.run.traits.warned_of_none:
            self.run.traits.warned_of_none = True
            log.warning(
                "train_dataloader yielded None as batch %d: such batches are skipped.", self.state.batch_idx
            )
        return self.skip(SKIP_BATCH)

    def end_empty(self) -> None:
        """End a batch that is None, for a trainer that counts it: no update, no samples, no outputs."""
        self.mark_step()
        self.weight = 0
        set_outputs(self.state, None)
        self.end()

    def mark_step(self) -> None:
        """Record the step before a batch, for a step that does not use `__call__`."""
        self.progress.step_before_batch = self.state.counts.step

    def skip(self, signal: Signal) -> Signal | None:
        """Leave this batch out: no further events."""
        if signal is END_EPOCH:
            return signal
        self.progress.windows.skip(self.state.counts.epoch, self.state.current.batch_idx)
        self.end_skipped()
        return None

    def end_skipped(self) -> None:
        """Do what remains of a batch that is left out: nothing."""

    def learn(self) -> None:
        """Clear the gradients of the last step, differentiate the loss and update the weights."""
        s = self.state
        loss = (
            s.current.returned
            if type(s.current.returned) is Tensor
            else loss_of(self.run, s.current.returned)
        )
        if loss is None:
            set_loss(s, None)
            skip_step(self.run, "no_loss")
            return
        if not loss.requires_grad:
            raise LossError(cannot_train_on(s))
        self.update.clear_gradients()
        loss = self.backward(loss)
        self.run.watch.look(loss)
        s.log.train_loss.add(loss, self.weight)
        for add in self.loss_sinks:
            add(loss, self.weight)
        self.update()

    def close_window(self) -> None:
        """Update on the batches of a window that ends early. A window of one batch never does."""

    def close_failed_batch(self) -> None:
        """Prepare a save after a failure: count a batch whose update was made, else drop its gradients.

        A resume trains on a batch again if it is not counted.
        """
        run, s = self.run, self.state
        if s.current.returned is None or run.progress.position != s.current.batch_idx:
            return
        if s.counts.step == run.progress.step_before_batch:
            self.drop_gradients()
            run.watch.drop()  # its loss has not reached the weights
            return
        run.window.clear()
        self.count_failed()
        if run.schedules and run.progress.schedulers_advanced_at != s.counts.step:
            advance_due(run, True, None)

    def drop_gradients(self) -> None:
        """Drop the gradients of a batch that failed before its update. One batch per window leaves none."""
