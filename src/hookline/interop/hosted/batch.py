"""One training batch of a hosted run, its update, and one evaluation: the events of the trainer's own, driven
by the host and by torch's step hooks of the optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookline.engine.hook_list import HookList
from hookline.engine.plan import noop
from hookline.metrics.accumulator import Accumulator
from hookline.metrics.metric_log import Metrics
from hookline.run.optimizers import total_norm
from hookline.run.parts import EmittingRun
from hookline.run.state_parts import Optimization
from hookline.training.batch_events import BackwardEvents, BatchEvents, UpdateEvents, report_clip, skip_step
from hookline.training.pass_events import VALIDATION, EvaluationEvents, Names, PausedBatch
from hookline.util.errors import SKIP_STEP, STEP_DONE

OUTSIDE = -1
"""The value of `Progress.step_before_batch` outside of batches, where every update counts."""


class Updates(UpdateEvents):
    """The optimizer events of a run. `step` counts one per batch, however many optimizers take part in it."""

    def __init__(self, run: EmittingRun, *, on_step: bool = True) -> None:
        super().__init__(run)
        self.announces = on_step
        """Whether on_before_optimizer_step and on_before_zero_grad fire by themselves; otherwise the host
        fires them.
        """
        self.windows = 0
        """Updates that were made or skipped; after each, gradients accumulate from zero again."""
        self.norm_is_known = False
        """Whether the host has already measured the gradients of this window, before it clipped them."""
        self.recomputing = False
        """Whether an optimizer evaluates the loss again inside its step (LBFGS), which is still the same
        update.
        """
        self.clipped: dict[int, Tensor] = {}
        """The norms that the loop's clipping found, until the update is made; they explain a skipped
        update.
        """
        self.norms: dict[int, Tensor] = {}
        """The norms of the optimizers since the last backward pass, by their numbers. Those that were clipped
        together have one.
        """
        self.on_start: Callable[[], None] | None = None
        """Called before the first event, once: the run has not begun, or not fired its start events."""
        self.on_first: Callable[[], None] | None = None
        """Called before the next update is counted, once."""
        self.announced: set[int] = set()
        self._set_aside: dict[int, tuple[Any, list[Any]]] = {}
        self._removals: list[Any] = []

    def watch(self, optimizers: list[Any]) -> None:
        """Observe these optimizers from now on, unless optimizers are observed already."""
        if self._removals:
            return
        for index, optimizer in enumerate(optimizers):
            post = optimizer.register_step_post_hook(functools.partial(self._stepped, index))
            self._removals.append(post.remove)
            if self.announces:
                pre = optimizer.register_step_pre_hook(functools.partial(self._stepping, index))
                self._removals += [pre.remove, self._wrap_zero_grad(index, optimizer)]

    def _wrap_zero_grad(self, index: int, optimizer: Any) -> Callable[[], None]:
        """Wrap `zero_grad`, for which torch has no hook, and return a function that unwraps it. Several lines
        may wrap it.
        """
        previous, zero_grad = vars(optimizer).get("zero_grad"), optimizer.zero_grad

        def wrapper(*args: Any, **kwargs: Any) -> None:
            if self._removals:
                self.clear(index, optimizer)
            zero_grad(*args, **kwargs)

        def unwrap() -> None:
            if vars(optimizer).get("zero_grad") is not wrapper:
                return  # it was wrapped again since, and that wrapper still calls this one
            del optimizer.zero_grad
            if previous is not None:
                optimizer.zero_grad = previous

        optimizer.zero_grad = wrapper
        return unwrap

    def clear(self, index: int, optimizer: Any) -> None:
        """Emit on_before_zero_grad: the gradients so far are about to be dropped."""
        if self.on_start is not None:
            self.on_start()
        if not self.recomputing:
            self.windows += 1
            s = self.state
            s.optimization.optimizer_idx, s.optimization.optimizer = index, optimizer
            if self.plan.on_before_zero_grad is not noop:
                self.before_zero_grad()

    @property
    def is_observing(self) -> bool:
        """Return whether optimizers are being observed."""
        return bool(self._removals)

    def unwatch(self) -> None:
        """Remove all hooks and wrappers from the optimizers."""
        removals, self._removals = self._removals, []
        for remove in removals:
            remove()
        self.missed()  # restore gradients that were set aside for a step that was not made
        self.norm_is_known = self.recomputing = False

    def before(self, index: int) -> None:
        """Emit on_before_optimizer_step, once per optimizer and update: the gradients are complete."""
        if index in self.announced:
            return
        if self.on_start is not None:
            self.on_start()
        s = self.state
        if not self.announced and self.progress.step_before_batch < 0:
            self.norms.clear()
        self.announced.add(index)
        s.optimization.optimizer_idx, s.optimization.optimizer = index, s.setup.optimizers[index]
        if not self.norm_is_known:
            s.optimization.norm_tensor = None
            if "grad_norm" in self.plan.wanted:
                self._measure(index, s.optimization)
        signal = (
            self.before_step()
            if self.signal_filters or self.plan.on_before_optimizer_step is not noop
            else None
        )
        if self.norms and not self.norm_is_known:
            s.optimization.set_norm(self._norm_of_all())
        if signal is not None:
            self._set_gradients_aside(index, s.optimization.optimizer, signal)

    def _measure(self, index: int, optimization: Optimization) -> None:
        """Set the norm to that of one optimizer."""
        norm = total_norm([optimization.optimizer])
        optimization.set_norm(norm)
        if norm is not None:
            self.norms[index] = norm

    def _norm_of_all(self) -> Tensor:
        """Return the norm of all optimizers since the last backward pass."""
        norms = list(self.norms.values())
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _set_gradients_aside(self, index: int, optimizer: Optimizer, signal: Any) -> None:
        """Skip a step that the loop makes anyway: optimizers ignore parameters without a gradient."""
        hidden = [
            (p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        self._set_aside[index] = (signal, hidden)
        for parameter, _ in hidden:
            parameter.grad = None

    def skipped_gradients(self, indices: list[int]) -> list[Any]:
        """Return the gradients of these optimizers if hooks skip the steps of all of them."""
        if not all(index in self._set_aside for index in indices):
            return []
        return [gradient for index in indices for _, gradient in self._set_aside[index][1]]

    def clip(self, indices: list[int], norm: Tensor, max_norm: float) -> None:
        """Emit on_gradient_clip: the loop has clipped these optimizers' gradients, whose norm was this."""
        s = self.state
        s.optimization.norm_tensor, s.optimization.gradient_clip_val = norm, max_norm
        report_clip(self.plan, s)
        for index in indices:
            self.norms.pop(index, None)
        if indices:
            self.clipped[indices[0]] = self.norms[indices[0]] = norm
            s.optimization.norm_tensor = self._norm_of_all()

    def set_norm(self, norm: Tensor | None) -> None:
        """Take the norm of this window's gradients from the host, which clips them before its callbacks
        run.
        """
        self.state.optimization.norm_tensor = norm
        self.norm_is_known = True

    def _stepping(self, index: int, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self.before(index)
            return None
        evaluated = functools.partial(self._evaluate, index, closure)
        return (args[0], evaluated, *args[2:]) if len(args) > 1 else args, kwargs | {
            "closure": evaluated
        } if kwargs else kwargs

    def _evaluate(self, index: int, closure: Callable[[], Any]) -> Any:
        """Evaluate the loss, after which the gradients are complete. An optimizer may do so several times in
        one step.
        """
        loss = closure()
        self.before(index)
        self.recomputing = True
        return loss

    def _stepped(self, index: int, optimizer: Any, *given: Any) -> None:
        s = self.state
        if self.on_first is not None:
            on_first, self.on_first = self.on_first, None
            on_first()
        self.norm_is_known = self.recomputing = False
        self.clipped.clear()
        self.windows += 1
        s.optimization.optimizer_idx, s.optimization.optimizer = index, optimizer
        if index not in self.announced:  # the host made an empty step because there was no loss
            self.skip(index, "no_loss")
            return
        if self._set_aside:
            signal, hidden = self._set_aside.pop(index, (None, []))
            for parameter, gradient in hidden:
                parameter.grad = gradient
            if signal is SKIP_STEP:
                self.announced.discard(index)
                self.skip(index, "hook")
                return
            assert signal in (None, STEP_DONE)
        self.announced.discard(index)
        before = self.progress.step_before_batch
        self.after_step(before if before >= 0 else s.counts.step)

    def account_for_missing(self) -> None:
        """Handle announced steps that were not made: a scaler skips a step if a gradient is not finite."""
        if not all(norm.isfinite() for norm in self.clipped.values()):
            self.skip_missing()
        else:
            self.missed()

    def skip_missing(self) -> None:
        """Emit on_step_skipped for every announced step that was not made, because the scaler has skipped
        it.
        """
        for index in self.missed():
            self.windows += 1
            self.skip(index, "nonfinite")

    def skip(self, index: int, reason: str) -> None:
        """Emit on_step_skipped for this optimizer."""
        self.focus(index, self.state.setup.optimizers[index])
        skip_step(self.run, reason)

    def missed(self) -> list[int]:
        """Return and reset the optimizers that were announced and have not made their step."""
        missed = sorted(self.announced)
        self.announced.clear()
        self.clipped.clear()
        for parameter, gradient in [pair for _, hidden in self._set_aside.values() for pair in hidden]:
            parameter.grad = gradient
        self._set_aside.clear()
        return missed


class HostedBatch(BatchEvents):
    """The batch that the host trains on, and the losses since its last update."""

    def __init__(
        self, run: EmittingRun, updates: Updates, count_tokens: Callable[[Any], int], holds_rows: bool
    ) -> None:
        """holds_rows: whether the host logs the loss and the learning rate itself."""
        super().__init__(run, count_tokens, log_every=1, logs=False)
        self.backward = BackwardEvents(run)
        self.updates = updates
        self.holds_rows = holds_rows
        self.is_open = False
        self.has_losses = False
        """Whether a loss was differentiated in this run."""
        self.losses: list[Any] = []
        """Those of the newest window. Each window has a new list."""
        self._window = 0

    @property
    def has_updated(self) -> bool:
        """Return whether an update was made in this batch, or outside of batches."""
        return self.state.counts.step != self.progress.step_before_batch

    def before_backward(self, loss: Tensor) -> Tensor:
        """Emit on_before_backward and record the loss, which a hook may have replaced; return it."""
        s = self.state
        if self.plan.on_before_backward is not noop:
            loss = self.backward.before(loss)
        if self.updates.recomputing:
            return loss
        value = loss.item() if loss.is_cpu else loss.detach()
        self.updates.norms.clear()
        if self.updates.windows != self._window:
            self.losses, self._window = [], self.updates.windows
        self.losses.append(value)
        s.current.window_losses = self.losses if len(self.losses) > 1 else None
        s.current.last_loss, self.has_losses = value, True
        if not self.is_open:  # else its last loss counts, when the batch ends
            s.log.train_loss.add(value, s.log.weight)
        return loss

    def window_losses(self) -> list[Any]:
        """Return the losses whose gradients wait for an update."""
        return self.losses if self.updates.windows == self._window else []

    def reopen_window(self, losses: list[Any]) -> None:
        """Continue the accumulation window of a checkpoint."""
        self.losses, self._window = list(losses), self.updates.windows

    def reset(self) -> None:
        """Reset the updates of an earlier run."""
        self.state.current.window_losses, self.has_losses = None, False
        self.updates.reset()

    def forget_loss(self) -> None:
        """Drop the losses so far, because the host differentiates another value."""
        s = self.state
        s.current.last_loss = s.current.window_losses = None
        s.log.train_loss, self.losses = Accumulator(), []

    def values_of_step(self) -> dict[str, Any]:
        """Return the loss and the learning rate, unless the host logs them itself."""
        return {} if self.holds_rows else super().values_of_step()


class LoopRun(EmittingRun, Protocol):
    """A loop written by hand, as its parts see it: `Line`."""

    batch: HostedBatch
    updates: Updates

    @property
    def hooks(self) -> HookList:
        """Return the hooks of the loop."""
        ...

    @property
    def should_stop(self) -> bool:
        """Return whether the loop is to end, as all ranks have agreed."""
        ...


# ---- One evaluation inside a hosted run


class Pass:
    """A pass over validation or test data that another loop drives."""

    def __init__(self, run: EmittingRun, names: Names = VALIDATION) -> None:
        self.run, self.state = run, run.state
        self.events = EvaluationEvents(run, names)
        self.results: dict[str, Any] = {}
        self.host_metrics: Mapping[str, Any] = {}
        """Metrics that the host has measured itself."""
        self._interlude = PausedBatch(run.state)
        self._batches = 0
        self._has_results = self._is_timed = False

    def start(self) -> None:
        """Emit the start of the pass."""
        timer = self.state.timer
        self._is_timed = timer is not None and timer.open("validation")
        self._interlude.__enter__()
        self.events.start()

    def start_batch(self, batch: Any, batch_idx: int | None = None, dataloader_idx: int = 0) -> None:
        """Emit the start of a batch."""
        if dataloader_idx != self.state.dataloader_idx:
            self._batches = 0
        self.events.take(batch, self._batches if batch_idx is None else batch_idx, dataloader_idx)
        self._batches += 1
        self.events.start_batch()

    def end_batch(self, outputs: Any = None) -> None:
        """Emit the end of the batch; a loss in `outputs` becomes part of `val/loss`."""
        self.events.end_batch(outputs)

    def end_data(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Emit the end of the data. metrics: results that the host has measured itself."""
        self._has_results = True
        self.host_metrics = metrics or {}
        self.results = {**self.events.finish(), **self.host_metrics}
        self.events.end_data(self.results)

    def end(self) -> Metrics:
        """Emit the end, restore the facts of the training, and return the results with those that hooks
        added.
        """
        if not self._has_results:
            self.end_data()
        self.events.end(self.results)
        self.results.update(self.run.rows.reduce(self.state.log.pending, "evaluation"))
        self.leave()
        return Metrics(self.results)

    def leave(self) -> None:
        """Restore the facts of the training without an event, after the pass has ended or failed."""
        self._interlude.__exit__(None)
        if self._is_timed:
            self.state.timer.close()
