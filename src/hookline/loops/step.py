"""One training batch: move, batch start, forward, backward, update, batch end, step end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.data.batch import batch_size
from hookline.errors import END_EPOCH, LossError, Signal
from hookline.loops.backward import Backward, cannot_train_on, loss_of
from hookline.loops.noting import skip_step
from hookline.loops.run import Run
from hookline.loops.schedulers import advance_due
from hookline.loops.update import Update, zero_grad
from hookline.plan import Plan, nobody
from hookline.state import State


class TrainStep:
    """Train on one batch, with one update per batch.

    `choose_step` picks the class and its parts before the first batch. Other classes replace the named methods: see
    `accumulation.py`, `manual.py`, `rank_step.py`.
    """

    def __init__(self, run: Run, backward: Backward, update: Update) -> None:
        self.run = run
        self.plan: Plan = run.plan
        self.state: State = run.state
        self.backward = backward
        self.update = update
        self.weight = 0
        """Samples of this batch."""
        self.schedulers = (advance_due,) if run.schedules else ()
        self.transfers = run.traits.transfers
        s = run.state
        self.loss_sinks: tuple[Callable[[Any, float], None], ...] = () if not run.data.is_mixture else (
            lambda loss, weight: s.log.add_of_loader("train", "loss", loss, weight, s.log.loader),
        )  # fmt: skip
        """What else a loss is added to."""
        self.row_parts: tuple[Any, ...] = (run.data.train.metrics,) if run.data.is_mixture else ()
        """Called for what else a row of metrics holds."""

    def __call__(self, batches_left: int | None) -> Signal | None:
        """Train on `state.batch`. Return END_EPOCH if a hook ends the epoch."""
        plan, s = self.plan, self.state
        if s.cache:
            s.cache.clear()
        if s.log.batch_values:
            s.log.batch_values.clear()

        plan.on_before_batch_transfer(s)
        for move in self.transfers:
            s.batch = move(s)
        plan.on_after_batch_transfer(s)

        signal = self.start(batches_left)
        if signal is not None:
            return self.skip(signal)
        self.run.progress.step_before_batch = s.step
        s.returned = plan.training_step(s)
        self.learn()
        self.end(batches_left)
        if s.step > self.run.progress.step_before_batch:
            self.end_step()
        s.returned = None  # what the step returned may hold a graph
        return None

    def start(self, batches_left: int | None) -> Signal | None:
        """Emit on_train_batch_start; return the signal of a hook that skips this batch or ends the epoch."""
        s = self.state
        s.log.weight = self.weight = batch_size(s.batch)
        signal: Signal | None = self.plan.on_train_batch_start(s)
        return signal

    def skip(self, signal: Signal) -> Signal | None:
        """Leave this batch out: no further events."""
        return signal if signal is END_EPOCH else None

    def learn(self) -> None:
        """Clear the gradients of the last step, differentiate the loss and update the weights."""
        s = self.state
        loss = s.returned if type(s.returned) is Tensor else loss_of(self.run, s.returned)
        if loss is None:
            s.last_loss = None
            skip_step(self.run, "no_loss")
            return
        if not loss.requires_grad:
            raise LossError(cannot_train_on(s))
        s.live_loss = loss
        zero_grad(self.plan, s)
        loss = self.backward()
        self.run.watch.look(loss)
        s.log.train_loss.add(loss, self.weight)
        for add in self.loss_sinks:
            add(loss, self.weight)
        self.update()

    def end(self, batches_left: int | None) -> None:
        """Advance schedulers, count the batch and emit on_train_batch_end."""
        plan, s = self.plan, self.state
        for advance in self.schedulers:
            advance(self.run, s.step > self.run.progress.step_before_batch, batches_left)
        self.run.progress.position = s.batch_idx + 1
        s.batches_seen += 1
        s.samples_seen += self.weight
        if "tokens_seen" in plan.wanted:
            s.tokens_seen += self.run.data.count_tokens(s.batch)
        s.nested_validate = True
        plan.on_train_batch_end(s)
        s.nested_validate = False

    def end_step(self) -> None:
        """After an update: write its metrics, then emit on_step_end, under the same step number."""
        run, plan, s = self.run, self.plan, self.state
        log = s.log
        if s.step % run.traits.log_every == 0 and (run.traits.logs or "on_train_metrics" in plan.wanted_at):
            row, log.pending = log.pending, {}
            row.setdefault("train/loss", self.mean_loss())
            if s.used_lr is not None:
                row.setdefault("lr", s.used_lr)
            for more in self.row_parts:
                row.update(more())
            self.write_row({key: value for key, value in row.items() if value is not None})
        if plan.on_step_end is not nobody:
            waiting, log.pending = log.pending, {}
            s.nested_validate = True
            try:
                plan.on_step_end(s)
            except BaseException:
                log.pending = {**waiting, **log.pending}  # written when the run ends
                raise
            s.nested_validate = False
            run.rows.write_pending()  # what a hook logged here belongs to this very step
            log.pending = waiting

    def mean_loss(self) -> Any:
        """Return the loss of this update, unread."""
        return self.state.mean_of_window()

    def write_row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics to listeners and loggers."""
        self.run.rows.write(row)

    def close_window(self) -> None:
        """Update on what an accumulation window has when it ends early. A window of one batch is closed already."""

    def settle_failed_batch(self) -> None:
        """Before a save after a failure: count a batch whose update was made, else train it again after a resume."""
        run, s = self.run, self.state
        if s.returned is None or run.progress.position != s.batch_idx:
            return
        if s.step == run.progress.step_before_batch:
            self.drop_gradients()
            return
        run.window.clear()
        run.progress.position += 1
        s.batches_seen += 1
        s.samples_seen += int(s.log.weight)
        if run.schedules and run.progress.schedulers_advanced_at != s.step:
            advance_due(run, True, None)

    def drop_gradients(self) -> None:
        """Forget the gradients of a batch that failed before its update."""
