"""`Line`: hooks for a training loop that you wrote yourself. A line is the connection between your loop and
the hooks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Never

from torch import Tensor, nn

from hookline.data.sources import length_of
from hookline.distributed.comm import Ranks
from hookline.interop.hosted import objects
from hookline.interop.hosted.batch import Pass
from hookline.interop.hosted.checkpoints import gather_positions, load_hosted
from hookline.interop.hosted.host import RAW_LOOP, Host
from hookline.interop.hosted.loop_checks import UpdateChecks, missing_calls, missing_losses, refuse_other_loss
from hookline.interop.hosted.position import LoopPosition, stop_in
from hookline.interop.hosted.run import HostedRun
from hookline.run.optimizers import bare, in_module_order
from hookline.run.state import count_noun
from hookline.run.state_parts import fact
from hookline.run.timer import RunTimer, timed
from hookline.training import run_events
from hookline.training.data_pass import read_batches
from hookline.training.pass_events import VALIDATION, Names
from hookline.training.resume import LINE_LOADS, SEARCH_WORDS, find_checkpoint
from hookline.util.errors import END_EPOCH, HooklineError, LossError, OptionError, Signal, StopTraining
from hookline.util.urls import shown

log = logging.getLogger("hookline")

LINE_OPTIONS = ("module", "optimizers", "schedulers", *objects.HOST_OPTIONS)


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
        *more: Never,
        schedulers: Any = (),
        hooks: Iterable[Any] = (),
        host: Host = RAW_LOOP,
        **options: Any,
    ) -> None:
        """Take what the loop trains, and the hooks.

        module: the model; None: pass it to `attach` later. optimizers, schedulers: one, or a list of them; a
        checkpoint holds their state. hooks: instances, classes, or functions marked with `@on`. host: the
        events that the loop can emit; leave it out.

        options: logger (True: a log below the run's directory; False, the default; a Logger, or several),
        run_dir, config, accounting, log_every_n_steps, count_tokens, on_save_error ('raise', or 'warn':
        continue without a checkpoint that cannot be written), and max_epochs and max_steps, which hooks can
        read; the loop decides when to end.
        """
        objects.refuse_more(more)
        objects.refuse_other_options(host, options, LINE_OPTIONS)
        super().__init__(host, hooks=hooks, **options)
        self._current_epoch: object = None
        self._began = (0, 0)
        self._in_body = False
        """Whether the loop's own code runs in an epoch or a batch. Checkpoints wait until its end, because a
        resume continues after it.
        """
        self._saves_wait = self._has_validated = False
        self._step_handles: list[Any] = []
        self._position = LoopPosition(self)
        self._checks = UpdateChecks(self)
        if module is not None:
            self.attach(module, optimizers, schedulers)

    def __enter__(self) -> Line:
        if self.is_running:  # the current run is not affected
            raise HooklineError(
                "This Line is in a run already. A loop inside another one needs a Line of its own."
            )
        try:
            self._in_body = self._has_validated = False
            self._position = LoopPosition(self)
            self.state.setup.timer = RunTimer(self.plan, self.state, device=None)
            self.begin()
            self._watch_ranks()
            self._checks = UpdateChecks(self)
            self._checks.begin()
            self.updates.watch(self.state.optimizers)
            self.updates.on_start = self.must_run
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
            found = self._explained(error)
            self.fail(found)
            if found is not error:
                raise found
            return False
        try:
            self.must_run()
            self.end_training()
            self.end_fit()
            if self.state.rank == 0:
                self._report_missing_calls()
        except BaseException as failure:
            found = self._explained(failure)
            self.fail(found)
            if found is not failure:
                raise found from failure
            raise
        self.close()
        return True

    def must_run(self) -> None:
        """Raise an error outside of a run. In a run, emit on_fit_start and on_train_start, once.

        They wait for the first call that trains, so that `load_checkpoint` comes before them: hooks then
        start with the restored step and weights, as with the trainer.
        """
        super().must_run()
        if self.updates.on_start is not None:
            self.updates.on_start = None
            self.start_fit()
            self.hooks.begin_training()
            self.state.timer.begin()
            self.start_training()
            self._began = (self.global_step, self.state.batches_seen)

    def _report_missing_calls(self) -> None:
        """Log what hooks have waited for in vain, because the loop has left out a call."""
        for missing in missing_calls(self, self._began, self._position.unread_epochs, self._has_validated):
            log.warning("%s", missing)

    def fail(self, error: BaseException) -> None:
        """Emit on_exception and tear the hooks down. error: that of the loop; further ones become notes."""
        if isinstance(error, Exception) and (
            missing := missing_losses(self, self.global_step - self._began[0])
        ):
            error.add_note(missing)
        super().fail(error)

    def _log_ending(self) -> None:
        """Log where the time went, if the line has read the batches, and how the run ended."""
        timer: RunTimer = self.state.timer
        timer.stop()
        if self.resume.was_refused:  # then the log of the run stays as it was
            self.resume.take({})
            return
        if timer.epochs and (timings := timer.timings()) is not None:
            self.loggers.log_event("timings", {"step": self.global_step, **timings.record()})
        super()._log_ending()

    def stop(
        self,
        reason: str = "line.stop() was called",
        status: str = "stopped",
        raises: BaseException | None = None,
    ) -> None:
        """End the loop after the current batch, as `Trainer.stop` does; the loop or a hook may call it.

        A loop that has called it itself, as after a signal, continues when it is started again with
        `load_checkpoint("auto")`. A loop that a hook has stopped is finished.
        """
        if not self.state.should_stop:
            self._position.is_left = self.state.running is None
        super().stop(reason, status, raises)

    def _set_stop(self, stop: tuple[str, str] | None) -> None:
        """Let the loop stay stopped, with this reason and status, or train on (None). All ranks call it."""
        if stop is None:
            self.state.ending.withdraw_stop()
        else:
            self.state.ending.set_stop(*stop)
        self._position.is_finished = stop is not None
        if self.rank_sync is not None:
            self.rank_sync.stop = stop is not None

    # ---- epochs, batches, validation -----------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are not complete, until n are or a hook requests a stop.

        Code in the loop body belongs to its epoch. After `load_checkpoint`, the first number is that of the
        epoch in which the checkpoint was made, or of the next one if that epoch was complete. Checkpoints
        that hooks request in the body, such as after a validation, are written at its end.

        n: epochs in all, with those before a resume.
        """
        self.must_run()
        objects.check_epochs(n)
        done, position = self.state.epochs_seen, self._position
        if position.is_finished and n > position.epochs > 0:  # it is to train longer
            self._set_stop(None)
        position.epochs = n
        if done >= n and not self.should_stop and self.state.rank == 0:
            log.warning(
                "Nothing is left to train: %s done, and the loop requests %d in all. Use a new Line for a "
                "new training.",
                count_noun(done, "epoch is", "epochs are"),
                n,
            )
        for number in range(done, n):
            if self.should_stop:
                return
            position.start_body()
            self._in_body = True
            try:
                yield number
            finally:
                self._in_body = False
                position.is_in_epochs = False
            self.end_epoch()
            if not position.has_batches:  # the loop read its batches without the line
                run_events.count_epoch(self)
                position.unread_epochs += 1
                self.sync_point()

    def epoch(self, loader: Iterable[Any], *, skip: bool = True) -> Iterator[Any]:
        """Yield the batches of one epoch.

        The epoch ends when the next one starts, with `epochs`, or with the line, so a validation after it is
        part of it. Batches that a hook skips are not yielded; after a request to stop there are no more.

        loader: any iterable of batches. skip: after `load_checkpoint`, read and drop the batches of the epoch
        that are done. False: the loader itself begins after them, as loaders with a state of their own do.
        """
        self.end_epoch()
        self.must_run()
        objects.check_loader(loader)
        if self.should_stop:
            return
        first = self._position.start_batches(loader)
        super().start_epoch(length_of(loader), first)
        self._position.has_batches = True
        self._current_epoch = current = object()
        try:
            self._in_body = False
            batches = self._open_loader(loader, first, skip)
            if self._step_handles and not self._saves_wait:
                self._remove_handles()
            for batch in read_batches(self.state, getattr(loader, "iterable", loader), batches):
                if self._current_epoch is not current:
                    raise HooklineError(
                        "Another epoch started inside this one. Zip the loaders instead: "
                        "`line.epoch(zip(one, two))`."
                    )
                signal = super().start_batch(batch)
                if signal is END_EPOCH:
                    break
                if signal is None:
                    self._in_body = True
                    yield self.state.batch
                    self._in_body = False
                    if self.batch.is_open:
                        self.end_batch()
                    elif self.save_requests or self.rank_sync is not None:  # it was ended in the body
                        self.save_due()
                if self.state.should_stop and self.should_stop:
                    return
            self.epoch_is_whole = True
        finally:
            if self._current_epoch is current:
                self._in_body = self.is_running and self.epoch_is_open

    @timed("data")
    def _open_loader(self, loader: Iterable[Any], first: int, skip: bool) -> Iterator[Any]:
        """Return the batches of an epoch, without those that are done."""
        batches = iter(loader)
        # Accelerate's skip_first_batches returns a loader that has skipped them
        self._position.skip(batches, first, skip and not getattr(loader, "skip_batches", 0))
        return batches

    def start_epoch(self, batches: int | None = None, first: int = 0) -> None:
        """Start an epoch in a loop of another shape than `epoch`.

        batches: their number, if it is known. first: the number of the first batch that the loop trains, in
        an epoch that continues after `load_checkpoint`: `line.first_batch`.
        """
        self.must_run()
        position = self._position
        position.start_batches(None)
        if first and first != position.first_batch:  # the loop continues at a place of its own
            position.pending = None
        elif not first:
            position.warn_of_repeated_batches(
                "Drop the first line.first_batch batches in the loop, and pass that number: "
                "line.start_epoch(batches, first)."
            )
        super().start_epoch(batches, first)
        position.has_batches, self._current_epoch = True, None

    def start_batch(self, batch: Any) -> Signal | None:
        """Start a batch in a loop of another shape than `epoch`. Return SKIP_BATCH or END_EPOCH if a hook
        requests it.

        Checkpoints that are due are written first, because a resume continues with this batch.

        batch: the batch, which hooks see as the fact `batch`.
        """
        if self.batch.is_open:
            self.end_batch()
        is_due = self._saves_wait or self.save_requests
        if is_due and self._in_body and self.epoch_is_open and self._current_epoch is None:
            self._in_body = False
            self.save_due()
            self._in_body = True
        if self._position.pending is not None and self._position.has_batches:
            self._position.continue_at_batch()
        return super().start_batch(batch)

    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End the epoch, with the batch and validation that the loop has left open by `break`.

        metrics: numbers of the loop by name, which monitors then see.
        """
        if self.epoch_is_open:
            self.end_batch()
            self.end_validation()
            self._in_body = False
        super().end_epoch(metrics)

    def emit(self, event: str, **facts: Any) -> Any:
        """Emit an event that `hookline.declare_event` declared; return the replaced fact, if it has one.

        event: its name. facts: the value of every fact of the event.
        """
        if self.is_running:
            self.must_run()
        return super().emit(event, **facts)

    @property
    def first_batch(self) -> int:
        """The number of the batch with which the current epoch continues after `load_checkpoint`, else 0.

        A loop with `start_epoch` reads it first in the body of `line.epochs`. `line.epoch` needs no such
        number.
        """
        return self._position.first_batch

    batch_idx: int = fact(
        "state.batch_idx",
        "The number of the current batch in its epoch, from 0; a resumed epoch continues to count.",
    )

    def validation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a validation; `line.log("val/loss", loss)` in it becomes a mean. The loop sets
        the modes and switches gradients off.

        loader: any iterable of batches.
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

    def start_validation(self, names: Names = VALIDATION) -> Pass:
        """Start a validation. names: the names of its events and metrics."""
        self._has_validated = True
        return super().start_validation(names)

    # ---- the update ----------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, divide_by: float = 1, **options: Any) -> int:
        """Call `loss.backward()` with its events. Return how many backward passes there were since the last
        update or `zero_grad`, with this one: the batches of an accumulation window so far.

        loss: the loss with its graph. divide_by: the number of batches that make one update, so that hooks
        see the undivided loss of each. options: those of `Tensor.backward`.
        """
        try:
            if not loss.requires_grad:
                raise LossError(
                    "line.backward takes the loss with its graph; this one was detached, or gradients are "
                    "switched off."
                )
            seen = self.before_backward(loss)
            self.differentiate(seen if divide_by == 1 else seen / divide_by, **options)
        except (AttributeError, RuntimeError) as error:
            refuse_other_loss(loss, error)
            raise
        return self.after_backward()

    def differentiate(self, loss: Tensor, **options: Any) -> None:
        """Do the work of `backward` between its events.

        loss: the loss to differentiate. options: those of `Tensor.backward`.
        """
        self._checks.differentiates = True
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def clip_gradients(self, max_norm: float, optimizer: Any = None) -> Tensor:
        """Clip by the total norm and return it. Hooks see the gradients before, and on_gradient_clip comes
        after.

        max_norm: the largest total norm. optimizer: clip the parameters of this one; None: of all.
        """
        self.must_run()
        s = self.state
        chosen = s.optimizers if optimizer is None else [bare(optimizer)]
        indices = [index for index, each in enumerate(s.optimizers) if any(each is one for one in chosen)]
        self._checks.check_clipping(indices)
        parameters = in_module_order(chosen)
        self.unscale(parameters)
        for index in indices:
            self.updates.before(index)
        if gradients := self.updates.skipped_gradients(indices):
            return nn.utils.get_total_norm(gradients)  # hooks skip this update, so nothing is clipped
        norm = self.clip(parameters, max_norm)
        self.updates.clip(indices, norm, max_norm)
        return norm

    def unscale(self, parameters: list[Any]) -> None:
        """Unscale the gradients before hooks see them; a loop with a scaler does this itself. parameters:
        those whose gradients are unscaled.
        """

    def clip(self, parameters: list[Any], max_norm: float) -> Tensor:
        """Do the work of `clip_gradients` between its events.

        parameters: those that are clipped. max_norm: the largest total norm.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def save_due(self, ranks: Ranks | None = None) -> None:
        """Write the checkpoints that were requested. In a body of the loop they wait until its end, or until
        the next update, so that they have the weights of the request.

        ranks: the ranks that write together; None: those of the run.
        """
        if not self._in_body:
            super().save_due(ranks)
            if self._saves_wait:
                self._saves_wait = False
                self._remove_handles()
        elif not self._saves_wait and (self.save_requests or (self.rank_sync and self.rank_sync.agreed)):
            self._saves_wait = True
            self._before_update(lambda *given: super(Line, self).save_due())

    def _before_update(self, call: Callable[..., None]) -> None:
        """Call a function before every update, until the handles are removed."""
        self._step_handles += [each.register_step_pre_hook(call) for each in self.state.optimizers]

    def abandon(self) -> None:
        """Abandon what is open, without events, and drop save requests."""
        self._in_body = self._saves_wait = False
        self.updates.on_start = None
        self._checks.end()
        self._remove_handles()
        super().abandon()

    def _remove_handles(self) -> None:
        handles, self._step_handles = self._step_handles, []
        for handle in handles:
            handle.remove()

    def save_position(self, ranks: Ranks) -> dict[str, Any]:
        """Return the positions of the loop and the random streams of all ranks, and those of the loggers.

        ranks: the ranks whose positions are gathered.
        """
        return {
            "loop": gather_positions(self._position.state(), ranks, self.state.module),
            "loggers": self._log_position(),
        }

    def _log_position(self) -> dict[str, Any]:
        """Return the loggers' positions: until the next update, those of a loaded checkpoint."""
        return self.loggers.position() if self._log_start is None else self._log_start[0] or {}

    def load_position(self, kept: dict[str, Any]) -> None:
        """Restore the random streams; `epochs` and `epoch` continue at the position.

        kept: the contents of a checkpoint.
        """
        self._position.load(kept.get("loop"), inside=self.epoch_is_open or self._in_body)
        if self._position.pending is not None:
            self._warn_at_first_update()

    def _warn_at_first_update(self) -> None:
        """Warn at the first update if the loop reads its batches without the line, which cannot skip them."""
        position = self._position

        def check(*given: Any) -> None:
            if position.has_batches:
                position.pending = None
            if position.pending is not None and not position.is_in_epochs:
                position.warn_of_repeated_epochs()
            position.warn_of_repeated_batches("Use `for batch in line.epoch(loader)`, which skips them.")

        self._before_update(check)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks, the progress of the run, the position in the epoch and the random
        streams, for a checkpoint of your own.

        If the current batch has made its update, it ends first, so that its hooks have run.
        """
        if self.is_running:
            self.must_run()
        if self.batch.has_updated:
            self.end_batch()
        self._position.warn_of_window()
        position = {"loop": [self._position.state()], "loggers": self._log_position()}
        return {**super().state_dict(), **position}

    def load_checkpoint(self, path: str | Path) -> bool:
        """Continue from a checkpoint of `save_checkpoint`, inside `with line:` and before the loop.

        on_fit_start and on_train_start come after it, if nothing else of the line was called before. Restore
        module, optimizers, schedulers, hooks, counters and random streams. What remains: `epochs` yields the
        epochs that are not complete, and `epoch` drops the batches of the first one that are done, so that
        nothing is trained twice.

        path: a checkpoint; or 'auto': the newest complete checkpoint of the run's directory, or 'best': the
        best one by the metric that it was kept for. Return False if there is none, so that the training
        begins. If a hook had stopped the loop of the newest one, the loop is finished: `should_stop` is True,
        and `epochs` and `epoch` yield nothing. Pass the path, or 'best', to train on.
        """
        super().must_run()
        if self._in_body or self.epoch_is_open or self._position.is_in_epochs:
            raise HooklineError(
                f"line.load_checkpoint({shown(path)!r}) was called inside an epoch, which would then "
                "continue with other weights and counts. Call it before the loop: after `with line:` and "
                "before `for epoch in line.epochs(n)`."
            )
        is_searched = path in SEARCH_WORDS
        if is_searched and not self._directory.has_name:
            raise OptionError(
                f"load_checkpoint({path!r}) searches the run's directory, which must be the same one each "
                "time: pass Line(run_dir=...)."
            )
        found = self.ranks.decide(functools.partial(self._find, str(path))) if is_searched else path
        if not found:
            return False
        if (stop := self._load(found)) and path == "auto":
            self._set_stop(stop)
            self._position.report_finished(str(found))
        elif stop:
            log.warning("The loop of %s had been stopped: %s. It trains on.", shown(found), stop[0])
        self.must_run()
        return True

    def _load(self, path: str | Path) -> tuple[str, str] | None:
        """Load a checkpoint. Return why and with which status a hook had stopped its loop, if one had."""
        updates = self.updates
        start, updates.on_start = updates.on_start, None  # hooks that are called here do not start the run
        try:
            return stop_in(load_hosted(self, path).get("loop"))
        finally:
            updates.on_start = start

    def _find(self, which: str) -> str:
        start = find_checkpoint(which, self._directory, option=LINE_LOADS)
        return str(start.path) if start is not None else ""
