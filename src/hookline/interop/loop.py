"""`Line`: hooks for a training loop that you wrote yourself. A line is the connection between your loop and
the hooks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from hookline.data.sources import length_of
from hookline.interop.hosted.checkpoints import load_hosted
from hookline.interop.hosted.host import RAW_LOOP, Host
from hookline.interop.hosted.run import HostedRun
from hookline.run.optimizers import bare
from hookline.util.errors import END_EPOCH, HooklineError, LossError, StopTraining

log = logging.getLogger("hookline")

OF_BATCHES = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_step_end",
    "on_train_epoch_end",
)
"""Events that need the batches or epochs of the loop: `optimizer.step()` does not fire them."""


class Line(HostedRun):
    """Emits Hookline's events in a hand-written loop; hooks see it as `trainer`.

    >>> line = Line(model, optimizer, hooks=[...])
    >>> with line:
    ...     for epoch in line.epochs(3):
    ...         for batch in line.epoch(loader):
    ...             loss = loss_function(model(batch))
    ...             optimizer.zero_grad()
    ...             line.backward(loss)
    ...             optimizer.step()
    ...         for batch in line.validation(val_loader):
    ...             line.log("val/loss", loss_function(model(batch)))

    Steps and `zero_grad` of the optimizers are observed without a call. Any of the calls may be left out:
    then its events are missing, and nothing else changes. `start_batch`, `before_backward` and so on are for
    loops of another shape.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        optimizers: Any = (),
        *,
        schedulers: Any = (),
        hooks: Iterable[Any] = (),
        host: Host = RAW_LOOP,
        **options: Any,
    ) -> None:
        """optimizers, schedulers: one, or a list of them. Pass what does not exist yet to `attach` later.

        options: logger (True: a log below the run's directory; False, the default; a Logger, or several),
        run_dir, config, accounting, log_every_n_steps, count_tokens, on_save_error ('raise', or 'warn':
        continue without a checkpoint that cannot be written), and max_epochs and max_steps, which hooks can
        read; the loop decides when to end.
        """
        super().__init__(host, hooks=hooks, **options)
        self._current_epoch: object = None
        self._began = (0, 0)
        if module is not None:
            self.attach(module, optimizers, schedulers)

    def __enter__(self) -> Line:
        if self.is_running:  # the current run is not affected
            raise HooklineError(
                "This Line is in a run already. A loop inside another one needs a Line of its own."
            )
        try:
            self.begin()
            self.start_fit()
            self.start_training()
            self._began = (self.global_step, self.state.batches_seen)
        except BaseException as error:
            self.fail(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, StopTraining):  # the loop may raise it, as a hook may
            self.stop(error.reason)
        elif error is not None:
            self.fail(error)
            return False
        try:
            self.end_training()
            self.end_fit()
            self._warn_of_missing_batches()
        except BaseException as failure:
            self.fail(failure)
            raise
        self.close()
        return True

    def _warn_of_missing_batches(self) -> None:
        """Warn of hooks that wait for events of batches and epochs, if updates were made without them."""
        step, batches = self._began
        if self.global_step == step or self.state.batches_seen != batches:
            return
        validates = {each.name for each in self.plan.listeners("on_validation_end")}
        waiting = {
            event: names
            for event in OF_BATCHES
            if (names := [each.name for each in self.plan.listeners(event) if each.name not in validates])
        }
        if waiting:
            log.warning(
                "%d updates were made outside of line.epoch(loader) and line.start_batch(batch), so these "
                "events did not fire: %s.",
                self.global_step - step,
                "; ".join(f"{event} (hooks: {', '.join(names)})" for event, names in waiting.items()),
            )

    # ---- epochs, batches, validation -----------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, until a hook requests a stop. Code in the loop body
        belongs to its epoch.
        """
        self.must_run()
        done = self.state.epochs_seen
        if done >= n:
            log.warning(
                "Nothing is left to train: %d epochs are done, and the loop requests %d in all. Use a "
                "new Line for a new training.",
                done,
                n,
            )
        for number in range(done, n):
            if self.should_stop:
                return
            yield number
            self.end_epoch()

    def epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch.

        The epoch ends when the next one starts, with `epochs`, or with the line, so a validation after it is
        part of it. Batches that a hook skips are not yielded; after a request to stop there are no more.
        """
        self.end_epoch()
        if self.should_stop:
            return
        self.start_epoch(length_of(loader))
        self._current_epoch = current = object()
        for batch in loader:
            if self._current_epoch is not current:
                raise HooklineError(
                    "Another epoch started inside this one. Zip the loaders instead: "
                    "`line.epoch(zip(one, two))`."
                )
            signal = self.start_batch(batch)
            if signal is END_EPOCH:
                break
            if signal is None:
                yield self.state.batch
                self.end_batch()
            if self.state.should_stop and self.should_stop:
                return
        self.epoch_is_whole = True

    def validation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a validation; `line.log("val/loss", loss)` in it becomes a mean. The loop sets
        the modes and switches gradients off.
        """
        current = self.start_validation()
        for batch in loader:
            if self.current_pass is not current:
                raise HooklineError(
                    "Another validation or a training batch started inside this validation. "
                    "Finish one before the other starts."
                )
            current.start_batch(batch)
            yield batch
            if self.current_pass is current:
                current.end_batch()
        self.end_validation()

    # ---- the update ----------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, divide_by: float = 1, **options: Any) -> None:
        """Call `loss.backward()` with its events.

        divide_by: the number of batches that make one update, so that hooks see the undivided loss of each.
        """
        if not loss.requires_grad:
            raise LossError(
                "line.backward takes the loss with its graph; this one was detached, or gradients are "
                "switched off."
            )
        loss = self.before_backward(loss)
        self.differentiate(loss if divide_by == 1 else loss / divide_by, **options)
        self.after_backward()

    def differentiate(self, loss: Tensor, **options: Any) -> None:
        """Do the work of `backward` between its events."""
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def clip_gradients(self, max_norm: float, optimizer: Any = None) -> Tensor:
        """Clip by the total norm and return it. Hooks see the gradients before, and on_gradient_clip comes
        after.
        """
        self.must_run()
        s = self.state
        chosen = s.optimizers if optimizer is None else [bare(optimizer)]
        indices = [index for index, each in enumerate(s.optimizers) if any(each is one for one in chosen)]
        parameters = [p for each in chosen for group in each.param_groups for p in group["params"]]
        self.unscale(parameters)
        for index in indices:
            self.updates.before(index)
        if gradients := self.updates.skipped_gradients(indices):
            return nn.utils.get_total_norm(gradients)  # hooks skip this update, so nothing is clipped
        norm = self.clip(parameters, max_norm)
        self.updates.clip(indices, norm, max_norm)
        return norm

    def unscale(self, parameters: list[Any]) -> None:
        """Unscale the gradients before hooks see them; a loop with a scaler does this itself."""

    def clip(self, parameters: list[Any], max_norm: float) -> Tensor:
        """Do the work of `clip_gradients` between its events."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks and the progress of the run, for a checkpoint.

        If the current batch has made its update, it ends first, so that its hooks have run.
        """
        if self.batch.has_updated:
            self.end_batch()
        return super().state_dict()

    def load_checkpoint(self, path: str | Path) -> None:
        """Continue from a checkpoint of `save_checkpoint`: module, optimizers, schedulers, hooks and
        counters.
        """
        self.must_run()
        load_hosted(self, path)
