"""The events of a training batch: each is emitted here and nowhere else, with its facts.

The trainer's step, backward pass and update inherit these classes. A hosted run (`interop/hosted`) calls the
same objects from another loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.data.batch import batch_size
from hookline.engine.plan import Plan, noop
from hookline.run.optimizers import copy_rate
from hookline.run.parts import EmittingRun
from hookline.run.state import State
from hookline.util.errors import Signal

log = logging.getLogger("hookline")

FIRST_SKIPS = 100
"""The number of skips that are all written to the log; after them every hundredth is."""
EMPTY_STEPS = 10  # steps without a loss from which a forgotten `return` is likely
Move = Callable[[State], Any]


def transfer(plan: Plan, s: State, moves: tuple[Move, ...]) -> None:
    """Move `state.batch` to the device and emit the events around it. moves: empty if batches stay."""
    if plan.on_before_batch_transfer is not noop:
        plan.on_before_batch_transfer(s)
    for move in moves:
        s.current.batch = move(s)
    if plan.on_after_batch_transfer is not noop:
        plan.on_after_batch_transfer(s)


def take_batch(s: State, batch: Any, batch_idx: int) -> None:
    """Make this the current batch."""
    s.current.batch, s.current.batch_idx = batch, batch_idx


def set_loss(s: State, loss: Any) -> None:
    """Set the newest loss; None: the batch has no loss."""
    s.current.last_loss = loss


def set_outputs(s: State, outputs: Any) -> None:
    """Set what the newest step returned; None frees it, because it may hold a graph."""
    s.current.returned = outputs


def forget_batch(s: State) -> None:
    """Forget the newest batch and its update, as in a new run."""
    s.current.last_loss = s.current.returned = None
    s.current.forget_window()
    s.optimization.set_norm(None)
    s.optimization.used_lr = None
    s.cache.clear()


class BatchEvents:
    """The events from on_train_batch_start to on_step_end."""

    def __init__(
        self, run: EmittingRun, count_tokens: Callable[[Any], int], log_every: int, logs: bool
    ) -> None:
        """Take log_every, the steps between two rows of metrics. logs: whether rows go to loggers."""
        self.plan: Plan = run.plan
        self.state: State = run.state
        self.progress = run.progress
        self.rows = run.rows
        self.count_tokens = count_tokens
        self.log_every, self.logs = log_every, logs
        self.weight = 0
        """The number of samples of this batch."""
        self.schedulers: tuple[Callable[[bool, int | None], None], ...] = ()
        """Called after a batch with whether an update was made, and how many batches are left."""
        self.row_parts: tuple[Callable[[], dict[str, Any]], ...] = ()
        """Return further values for a row of metrics."""

    def continue_at(self, position: int) -> None:
        """Set the number of the next batch that another loop fetches."""
        self.progress.position = position

    def take(self, batch: Any) -> None:
        """Take a batch that another loop has fetched, and clear the facts of the last one."""
        s, current = self.state, self.state.current
        if s.cache:
            s.cache.clear()
        if s.log.batch_values:
            s.log.batch_values.clear()
        current.batch, current.batch_idx = batch, self.progress.position
        current.last_loss = current.returned = None
        self.progress.position += 1
        self.progress.step_before_batch = s.counts.step
        s.log.mode = "train"

    def start(self, batches_left: int | None = None) -> Signal | None:
        """Emit on_train_batch_start; return the signal of a hook that skips this batch or ends the epoch."""
        s = self.state
        s.log.weight = self.weight = batch_size(s.current.batch)
        if self.plan.on_train_batch_start is noop:
            return None
        signal: Signal | None = self.plan.on_train_batch_start(s)
        return signal

    def end(self, batches_left: int | None = None) -> None:
        """Advance schedulers, count the batch and emit on_train_batch_end."""
        plan, s, progress = self.plan, self.state, self.progress
        for advance in self.schedulers:
            advance(s.counts.step > progress.step_before_batch, batches_left)
        progress.position = s.current.batch_idx + 1
        s.counts.batches_seen += 1
        self.count()
        if plan.on_train_batch_end is not noop:
            s.nested_validate = True
            plan.on_train_batch_end(s)
            s.nested_validate = False

    def count(self) -> None:
        """Count the samples of this batch and, if a listener requests them, its tokens."""
        s = self.state
        s.counts.samples_seen += self.weight
        if "tokens_seen" in self.plan.wanted:
            s.counts.tokens_seen += self.count_tokens(s.current.batch)

    def count_failed(self) -> None:
        """Count a batch that failed after its update: a resume must not train on it again."""
        s = self.state
        self.progress.position = s.current.batch_idx + 1
        s.counts.batches_seen += 1
        s.counts.samples_seen += int(s.log.weight)

    def end_step(self) -> None:
        """After an update: write its metrics, then emit on_step_end, under the same step number."""
        plan, s = self.plan, self.state
        log = s.log
        if s.counts.step % self.log_every == 0 and (self.logs or "on_train_metrics" in plan.wanted_at):
            row, log.pending = log.pending, {}
            for name, value in self.values_of_step().items():
                row.setdefault(name, value)
            self.write_row({key: value for key, value in row.items() if value is not None})
        if plan.on_step_end is not noop:
            waiting, log.pending = log.pending, {}
            s.nested_validate = True
            try:
                plan.on_step_end(s)
            except BaseException:
                log.pending = {**waiting, **log.pending}  # written when the run ends
                raise
            s.nested_validate = False
            self.rows.write_pending()  # what a hook logged here belongs to this very step
            log.pending = {**waiting, **log.pending}

    def values_of_step(self) -> dict[str, Any]:
        """Return the values that a row of metrics always has: loss, learning rate and `row_parts`."""
        values = {"train/loss": self.mean_loss(), "lr": self.state.optimization.used_lr}
        for part in self.row_parts:
            values.update(part())
        return values

    def mean_loss(self) -> Any:
        """Return the loss of this update, without reading it from the device."""
        return self.state.mean_of_window()

    def write_row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics to listeners and loggers."""
        self.rows.write(row)


class BackwardEvents:
    """The events before and after the backward pass."""

    __slots__ = ("plan", "state")

    def __init__(self, run: EmittingRun) -> None:
        self.plan, self.state = run.plan, run.state

    def before(self, loss: Tensor) -> Tensor:
        """Emit on_before_backward; return the loss to differentiate, which a hook may have replaced."""
        s = self.state
        s.current.live_loss = loss
        self.plan.on_before_backward(s)
        loss, s.current.live_loss = s.current.live_loss, None
        return loss

    def after(self) -> None:
        """Emit on_after_backward."""
        self.plan.on_after_backward(self.state)

    def release(self) -> None:
        """Free the loss of a backward pass that failed."""
        self.state.current.live_loss = None


class UpdateEvents:
    """The events around the step of one optimizer, `state.optimizer`."""

    __slots__ = ("plan", "progress", "run", "signal_filters", "state")

    def __init__(
        self, run: EmittingRun, signal_filters: tuple[Callable[[Signal | None], Signal | None], ...] = ()
    ) -> None:
        """Take the signal_filters, which replace the signal that a hook returns."""
        self.run, self.plan, self.state, self.progress = run, run.plan, run.state, run.progress
        self.signal_filters = signal_filters

    def focus(self, index: int, optimizer: Any) -> None:
        """Make this the optimizer of the following events."""
        s = self.state
        s.optimization.optimizer_idx, s.optimization.optimizer = index, optimizer

    def reset(self) -> None:
        """Clear the learning rate and the gradient norm of an earlier run."""
        self.state.optimization.set_norm(None)
        self.state.optimization.used_lr = None

    def before_zero_grad(self) -> None:
        """Emit on_before_zero_grad, while the gradients of the finished step still exist."""
        self.plan.on_before_zero_grad(self.state)

    def before_step(self) -> Signal | None:
        """Emit on_before_optimizer_step; return the signal of a hook that skips or has made this update."""
        signal: Signal | None = self.plan.on_before_optimizer_step(self.state)
        for decide in self.signal_filters:
            signal = decide(signal)
        return signal

    def step(self) -> None:
        """Call the optimizer. If it fails, some weights are updated and some are not."""
        self.progress.is_updating = True
        self.plan.optimizer_step(self.state)
        self.progress.is_updating = False

    def after_step(self, before: int, keeps_rate: bool = False) -> None:
        """Emit on_after_optimizer_step. The first optimizer of an update advances `step` by one.

        before: `step` before this update. keeps_rate: whether the learning rate of the update is that of its
        first optimizer, not of its last.
        """
        s = self.state
        is_first = s.counts.step == before
        if is_first or not keeps_rate:
            rate = s.optimization.optimizer.param_groups[0]["lr"]
            s.optimization.used_lr = rate if type(rate) is float else copy_rate(rate)
        if is_first:
            s.counts.step = before + 1
            windows = self.progress.windows
            if s.current.batch_idx != windows.lag + s.counts.step * windows.size:
                windows.note(s.counts.step, s.counts.epoch, s.current.batch_idx)
        if self.plan.on_after_optimizer_step is not noop:
            self.plan.on_after_optimizer_step(s)


def report_clip(plan: Plan, s: State) -> None:
    """Emit on_gradient_clip, after the gradients were clipped."""
    if plan.on_gradient_clip is not noop:
        plan.on_gradient_clip(s)


def skip_step(run: EmittingRun, reason: str) -> None:
    """Emit on_step_skipped, because no update is made; count it and write it to the log."""
    s, progress = run.state, run.progress
    s.subject.reason = reason
    run.plan.on_step_skipped(s)
    progress.skips += 1
    progress.last_skip = (reason, s.counts.batches_seen)
    progress.skip_reasons.add(reason)
    progress.windows.end_without_update(s.counts.step, s.counts.epoch, s.current.batch_idx)
    if reason == "nonfinite" and not progress.has_skipped_nonfinite:
        progress.has_skipped_nonfinite = True
        if run.options.nonfinite == "skip" and s.rank == 0:
            log.warning(
                "The update of epoch %d, batch %d is skipped, because its loss or a gradient is not finite "
                "(nonfinite='skip'). Further ones are only in the log: records of type 'skip' in log.jsonl.",
                s.epoch,
                s.batch_idx,
            )
    if reason == "no_loss" and progress.skips == EMPTY_STEPS and s.step == s.rank == 0:
        log.warning(
            "The first %d steps gave no loss, so nothing is trained. Does the training step return its loss?",
            EMPTY_STEPS,
        )
    if progress.skips <= FIRST_SKIPS or progress.skips % FIRST_SKIPS == 0:
        s.logger.log_event(
            "skip",
            {
                "step": s.step,
                "epoch": s.epoch,
                "batch": s.batch_idx,
                "reason": reason,
                "number": progress.skips,
            },
        )
