"""A run that another loop drives: each method emits the events of one moment, as in the trainer's own
runs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hookline.data.batch import count_tokens as elements_of_ids
from hookline.distributed.comm import Ranks
from hookline.distributed.error_output import print_uncaught_errors_once
from hookline.distributed.process_group import control_group, known_rank, name_rank_in_log
from hookline.engine.events import EVENTS
from hookline.engine.plan import Plan, noop
from hookline.interop.hosted.batch import OUTSIDE, HostedBatch, Pass, Updates
from hookline.interop.hosted.checkpoints import hosted_state, restore_state, save_hosted
from hookline.interop.hosted.host import Host, HostedHooks
from hookline.interop.hosted.objects import (
    has_uneven_batches,
    needs_equal_batches,
    own_module,
    own_optimizers,
    own_schedulers,
)
from hookline.interop.hosted.rank_sync import AT_VALIDATION, BETWEEN_EPOCHS, HostedRankSync
from hookline.interop.hosted.view import HostView
from hookline.loggers import JSONLines, Logger, Loggers, make_loggers
from hookline.metrics.accumulator import Accumulator
from hookline.metrics.metric_log import MetricLog
from hookline.run.directory import RunDirectory
from hookline.run.optimizers import settle_order
from hookline.run.options import hook_list, make_options
from hookline.run.parts import Participants, Progress, Resume
from hookline.run.record import monitors_of
from hookline.run.reduction import WaitingRows
from hookline.run.rows import MetricRows
from hookline.run.save_request import make_save_request
from hookline.run.state import State
from hookline.run.view import View
from hookline.training import run_events
from hookline.training.participants import (
    LateHooks,
    attach_failures,
    raise_first,
    tear_down_all,
    teardown_removed,
)
from hookline.training.pass_events import VALIDATION, Names
from hookline.training.ranks.failure_monitor import RankFailures
from hookline.util.errors import HooklineError, OptionError, Signal

log = logging.getLogger("hookline")


class HostedRows(MetricRows):
    """The rows of one process of a hosted run."""

    def __init__(self, plan: Plan, state: State, holds: bool) -> None:
        """holds: whether rows wait until the host logs."""
        super().__init__(plan, state)
        self.holds = holds
        self.over_ranks: WaitingRows | None = None
        """Reduces the results of a pass over all ranks, if there are several."""

    def write(
        self, values: dict[str, Any], over: str = "step", step: int | None = None, epoch: int | None = None
    ) -> None:
        """Let listeners edit a row, then send it to the loggers; or keep it for the host's next row."""
        if self.holds:
            self.state.log.pending.update(values)
        else:
            super().write(values, over, step, epoch)

    def finish(
        self, mode: str, more: Mapping[str, Accumulator], pending: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the results of a pass, over all ranks if there are several."""
        if self.over_ranks is None:
            return super().finish(mode, more, pending)
        return self.over_ranks.finish(mode, more, pending)


class HostedRun(HostView):
    """The plan, the state and the hooks of one run; hooks see it as `trainer`."""

    is_running = False
    rank_sync: HostedRankSync | None = None

    def __init__(
        self,
        host: Host,
        *,
        hooks: Iterable[Any] = (),
        logger: bool | Logger | Iterable[Logger] = False,
        run_dir: str | Path | None = None,
        config: Any = None,
        accounting: bool = True,
        log_every_n_steps: int = 50,
        max_epochs: int = -1,
        max_steps: int = -1,
        count_tokens: Callable[[Any], int] | None = None,
        on_save_error: str = "raise",
        announces_steps: bool = True,
        host_logs: bool = False,
        holds_rows: bool = False,
    ) -> None:
        """announces_steps: whether an optimizer's step hooks fire the events before a step; otherwise the
        host does.

        host_logs: whether rows go to the loggers of the host, which logs its own metrics itself. holds_rows:
        whether they wait until it does.
        """
        self.options = make_options(
            {
                "log_every_n_steps": log_every_n_steps,
                "max_epochs": max_epochs,
                "max_steps": max_steps,
                "run_dir": run_dir,
                "count_tokens": count_tokens,
                "num_sanity_val_steps": 0,
                "on_save_error": on_save_error,
            }
        )
        self.host = host
        launched = known_rank()
        self.loggers = make_loggers(logger, JSONLines)
        self.plan = Plan(EVENTS, accounting=accounting)
        self.state = State(trainer=self, logger=self.loggers, config=config)
        self.state.setup.hooks = self.hooks = HostedHooks(self.plan, host, launched.rank, self._offered())
        self.set_rank(launched.rank, launched.local_rank, launched.world_size)
        self.progress = Progress()
        self.rows: MetricRows = HostedRows(self.plan, self.state, holds_rows)
        self.updates = Updates(self, on_step=announces_steps)
        self.updates.on_start = self.must_run
        self.batch = HostedBatch(self, self.updates, count_tokens or elements_of_ids, holds_rows)
        self.host_logs = host_logs
        self.ranks = Ranks()
        self.current_pass: Pass | None = None
        self.save_requests = []
        self._directory = RunDirectory(self.options)
        self._late_hooks = LateHooks(self)
        self.participants = Participants()
        self.resume = Resume()
        self.epoch_is_open = False
        self.epoch_is_whole = False
        """Whether the loader was exhausted in this epoch."""
        self._saved_state: dict[str, Any] | None = None
        self._log_start: tuple[Any, ...] | None = None
        """What the loggers continue from at the next update: a position, its step and epoch, a checkpoint."""
        for hook in hook_list("hooks", hooks):
            self.hooks.add(hook)

    def attach(self, module: nn.Module, optimizers: Any = (), schedulers: Any = ()) -> None:
        """Set the module, the optimizers and the schedulers that are trained.

        module: the model. optimizers, schedulers: one, or a list of them.
        """
        s = self.state
        if not isinstance(module, nn.Module):
            raise OptionError(
                f"hooks need the model that is trained, a torch.nn.Module, not {type(module).__name__}."
            )
        s.setup.module = own_module(module)
        s.setup.optimizers = own_optimizers(optimizers)
        s.setup.schedulers = own_schedulers(schedulers)
        settle_order(s.setup.optimizers, s.setup.module)
        if self.updates.is_observing:  # in a run: observe the new ones instead
            self.updates.unwatch()
            self.updates.watch(s.setup.optimizers)
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        self.set_device(first.device if first is not None else torch.device("cpu"), module)

    def set_device(self, device: Any, wrapped_model: Any) -> None:
        """Set the device. device: of the module. wrapped_model: what the host runs, such as a wrapper."""
        self.state.setup.device, self.state.setup.wrapped_model = device, wrapped_model

    def set_rank(self, rank: int, local_rank: int, world_size: int) -> None:
        """Set the rank. rank: 0 has the loggers. local_rank: that on this machine. world_size: all ranks."""
        s = self.state
        s.setup.rank, s.setup.local_rank, s.setup.world_size = rank, local_rank, world_size
        self.hooks.move_to(rank)
        if rank != 0:
            self.loggers = s.setup.logger = Loggers()

    # ---- from set-up to teardown ---------------------------------------------------------------------------

    def begin(self, stage: str = "fit") -> None:
        """Open the loggers, and set up every hook. stage: 'fit', 'validate', 'test' or 'predict'."""
        s = self.state
        if self.is_running:
            raise HooklineError("These hooks are in a run already.")
        if s.setup.module is None:
            raise OptionError("Line needs the model that is trained: Line(model, optimizer, hooks=[...]).")
        self.is_running, self.updates.on_start = True, None
        s.setup.stage = stage
        run_events.begin(self, "training" if stage == "fit" else "running")
        self.batch.reset()
        self.plan.up.clear()
        if s.setup.world_size > 1 and distributed.is_initialized():
            self.ranks = Ranks(s.setup.rank, s.setup.local_rank, s.setup.world_size, control_group())
            assert isinstance(self.rows, HostedRows)
            self.rows.over_ranks, self.rank_sync = (
                WaitingRows(self.ranks, s.log),
                HostedRankSync(self, self.ranks),
            )
            self.updates.signal_filters = (self.rank_sync.on_update,)
        self._directory.renew()
        if s.setup.rank == 0:
            self._directory.hold(self._report_lost_directory, at_once=False)
        if not self.ranks.alone:
            self._directory.continue_in(Path(self.ranks.decide(self._directory.chosen)))
        self.loggers.open(self._directory.path)
        self._log_start, self.updates.on_first = None, self._start_log
        self._late_hooks.begin()
        self.progress.step_before_batch = OUTSIDE
        self.batch.log_every = self.options.log_every_n_steps
        self.batch.logs = bool(self.loggers) or self.batch.holds_rows
        run_events.set_up(self)
        if self._saved_state is not None:
            kept, self._saved_state = self._saved_state, None
            restore_state(self, kept)

    def _watch_ranks(self) -> None:
        """Let errors name the rank that has failed, and print those of all ranks once. All ranks call it."""
        if self.rank_sync is not None:
            name_rank_in_log(self.ranks.rank)
            print_uncaught_errors_once()
            self.rank_sync.failures = RankFailures(self.ranks)

    def _explained(self, error: BaseException) -> BaseException:
        """Return the error to raise for an error of the loop. With several ranks it names the failed one."""
        failures = None if self.rank_sync is None else self.rank_sync.failures
        return error if failures is None else failures.explain(error)

    def start_new(self) -> None:
        """Reset the counters and metrics for a new run."""
        self.state.counts.reset()
        self.resume.take({})
        self.state.log = MetricLog()

    def start_fit(self) -> None:
        """Observe the optimizers and emit on_fit_start."""
        self.updates.watch(self.state.setup.optimizers)
        run_events.start_fit(self)

    def start_training(self) -> None:
        """Emit on_train_start."""
        run_events.start_training(self)
        self.sync_point()

    def _start_log(self) -> None:
        """Let the loggers mark what this training repeats, and log which metrics hooks monitor.

        This waits for an update, because a run that only evaluates a checkpoint repeats nothing.
        """
        start, self._log_start = self._log_start, None
        if start is not None:
            self.loggers.resume(*start)
        elif not self.state.counts.step:  # else a second run of the same hooks continues its log
            self.loggers.begin_afresh()
        self.loggers.log_event("start", {"monitors": monitors_of(self.hooks.entries())})

    def continue_log(self, position: Any, path: str | Path) -> None:
        """Let the loggers continue from a checkpoint, at the next update. path: the checkpoint. position:
        theirs in it; None: unknown, because a host saves before all rows of a step or an epoch are written.
        """
        self._log_start = (position, self.state.step, self.state.epoch, path)
        self.updates.on_first = self._start_log

    def end_training(self) -> None:
        """End a training that did not fail, and emit on_train_end."""
        self.end_epoch()
        ending = self.state.ending
        run_events.end_as(self, ending.stop_status if ending.should_stop else "completed")
        run_events.end_training(self)
        self.rows.write_pending()
        self.sync_point()
        self.updates.unwatch()

    def end_fit(self) -> None:
        """Emit on_fit_end, the last event of a run that did not fail."""
        run_events.end_fit(self)
        self.sync_point()

    def abandon(self) -> None:
        """Abandon what is open, without events, and drop save requests."""
        if self.rank_sync is not None and self.rank_sync.failures is not None:
            self.rank_sync.failures.leave()
            self.rank_sync.failures = None
        if self.current_pass is not None:
            self.current_pass.leave()
            self.current_pass = None
        self.batch.is_open = self.epoch_is_open = False
        self.updates.windows += 1
        self.save_requests.clear()

    def fail(self, error: BaseException) -> None:
        """Emit on_exception and tear the hooks down. error: that of the loop; further ones become notes."""
        self.abandon()
        run_events.mark_failed(self, error)
        self.rank_sync, self.updates.signal_filters = None, ()  # the other ranks may not have failed
        failures = run_events.report_failure(self)
        try:
            self.save_due(Ranks())
        except BaseException as failure:
            failures.append(failure)
        attach_failures(error, [*failures, *self.tear_down()])

    def tear_down(self) -> list[BaseException]:
        """Tear down every hook whose set-up began, once, whatever happened; return their failures."""
        self.abandon()
        self.updates.unwatch()
        failures = tear_down_all(self)
        self.hooks.stopwatch.stop()
        self.hooks.observer = None
        if self.state.setup.stage == "fit":
            self._log_ending()
        self.loggers.close()
        self._directory.release()
        run_events.release(self)
        self.is_running, self.updates.on_start = False, self.must_run
        return failures

    def _report_lost_directory(self, who: str) -> None:
        """End the loop, because another job now writes into its directory. who: names that job."""
        log.error("Another job has taken over the directory of this run. %s", who)
        self.stop("another job has taken over the run's directory")

    def _log_ending(self) -> None:
        """Log how the run ended, from which `hookline runs` and the report know it."""
        s, error = self.state, self.state.ending.exception
        at = {"step": s.step, "epoch": s.epoch}
        if isinstance(error, Exception):
            self.loggers.log_event(
                "failure", {**at, "rank": s.rank, "exception": type(error).__name__, "message": str(error)}
            )
        self.loggers.log_event(
            "end", {**at, "epochs": s.epochs_seen, "status": s.status, "reason": s.stop_reason}
        )

    def close(self) -> None:
        """Tear the hooks down after a run that did not fail, and raise what a request to stop asked for."""
        raise_first(self.tear_down())
        self.state.ending.raise_requested()

    # ---- epochs and batches --------------------------------------------------------------------------------

    def start_epoch(self, batches: int | None = None, first: int = 0) -> None:
        """Start an epoch, or continue it after a resume with its batch number `first`, and with its means so
        far.
        """
        self.end_epoch()
        self.must_run()
        self.num_training_batches = batches
        self.batch.continue_at(first)
        self.epoch_is_open, self.epoch_is_whole = True, False
        if self.rank_sync is not None:
            self.rank_sync.find_steering_hooks()
            if self.rank_sync.failures is not None and needs_equal_batches(self.state.wrapped_model):
                self.sync_point()
                self.rank_sync.compare_lengths(batches)
        run_events.start_epoch(self, first)
        self.state.log.mode = "train"

    def start_batch(self, batch: Any) -> Signal | None:
        """Emit the start of a batch. Return SKIP_BATCH or END_EPOCH if a hook requests it.

        batch: the batch, which hooks see as the fact `batch`.
        """
        if self.updates.on_start is not None:
            self.must_run()
        if self.batch.is_open:
            self.end_batch()
        if self.current_pass is not None:  # left by a `break`
            self.end_validation()
        current = self.batch
        current.take(batch)
        self.updates.recomputing = False
        self.updates.norms.clear()
        signal = current.start()
        if self.rank_sync is not None:
            signal = self.rank_sync.on_batch(signal)
        current.is_open = signal is None
        return signal

    def before_backward(self, loss: Tensor) -> Tensor:
        """Emit on_before_backward and return the loss to differentiate, which a hook may have replaced.

        loss: the loss of the batch.
        """
        if self.updates.on_start is not None:
            self.must_run()
        return self.batch.before_backward(loss)

    def after_backward(self) -> int:
        """Emit on_after_backward: gradients have been added. Return how many backward passes there were since
        the last update or `zero_grad`, with this one.
        """
        if self.plan.on_after_backward is not noop:
            self.batch.backward.after()
        return len(self.batch.losses)

    def end_batch(self, outputs: Any = None) -> None:
        """Emit the end of the batch, and of its update if one was made.

        outputs: what the step returned, for hooks; None: the loss.
        """
        s, current = self.state, self.batch
        if not current.is_open:
            return
        if self.current_pass is not None:  # left by a `break`
            self.end_validation()
        current.is_open = False
        if self.updates.announced:
            self.updates.account_for_missing()
        if (loss := s.current.last_loss) is not None:
            s.log.train_loss.add(loss, current.weight)
        s.current.returned = loss if outputs is None else outputs
        current.end()
        is_update = s.counts.step != self.progress.step_before_batch
        if is_update:
            current.end_step()
        if self.rank_sync is not None and not has_uneven_batches(s.setup.wrapped_model):
            self.rank_sync.poll()
        if is_update and (self.save_requests or self.rank_sync is not None):
            self.save_due()
        s.current.returned = None
        self.progress.step_before_batch = OUTSIDE
        if self.participants.leaving:
            teardown_removed(self)

    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End the epoch, with the batch and validation that the loop has left open by `break`."""
        s = self.state
        self.end_batch()
        self.end_validation()
        if not self.epoch_is_open:
            return
        self.epoch_is_open = False
        s.log.mode = "now"
        if self.rank_sync is not None:
            self.rank_sync.sync_point(BETWEEN_EPOCHS)
        results = self.rows.finish("train", {}, s.log.pending)
        self.update_metrics(metrics or {})
        # else it was cut short
        is_complete = (
            self.epoch_is_whole
            or not s.ending.should_stop
            or self.progress.position == self.num_training_batches
        )
        row = run_events.end_epoch(self, results, is_complete)
        if self.batch.holds_rows:
            row.pop("train/loss", None)
        self.rows.write(row, "epoch")
        self.sync_point()

    # ---- validation ----------------------------------------------------------------------------------------

    def start_validation(self, names: Names = VALIDATION) -> Pass:
        """Start a validation, or a test. names: the names of its events and metrics, of a validation or a
        test.
        """
        if self.batch.has_updated:  # else the batch continues after it and makes its update then
            self.end_batch()
        self.end_validation()
        self.must_run()
        if self.rank_sync is not None:
            self.rank_sync.sync_point(AT_VALIDATION)
        self.current_pass = Pass(self, names)
        self.current_pass.start()
        return self.current_pass

    def end_validation(self) -> None:
        """End the current validation, if there is one, and write its results."""
        current, self.current_pass = self.current_pass, None
        if current is None:
            return
        results = current.end()
        if not self.state.sanity_checking:
            known = current.host_metrics if self.host_logs else {}
            self.rows.write(
                {key: value for key, value in results.raw().items() if key not in known}, "evaluation"
            )
            self.sync_point(AT_VALIDATION)

    def must_run(self) -> None:
        """Raise an error outside of a run."""
        if not self.is_running:
            raise HooklineError("The line is not in a run: put the loop into `with line:`.")

    # ---- state, checkpoints and rows -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks and the progress of the run, for a checkpoint."""
        return hosted_state(self)

    def save_position(self, ranks: Ranks) -> dict[str, Any]:
        """Return nothing: a host continues its data itself."""
        return {}

    def load_position(self, kept: dict[str, Any]) -> None:
        """Do nothing: a host continues its data itself."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned: at once in a run, else when the run begins, after the hooks'
        setup.

        state: the result of `state_dict`.
        """
        if self.is_running:
            restore_state(self, state)
        else:
            self._saved_state = state

    def save_checkpoint(
        self,
        path: str | Path | None = None,
        reason: str = "manual",
        monitor: dict[str, Any] | None = None,
        weights: str | None = None,
    ) -> None:
        """Request a checkpoint of Hookline's own kind: module, optimizers, schedulers, hooks and counters.

        It is written at the next save point of the run, after all listeners of the current step, validation
        or epoch have run, or at once outside of a run.

        path: a directory or an fsspec URL; None: `checkpoints/step-N` in the run's directory. reason:
        'manual', 'best', 'last', 'interval', 'signal' or 'exception', for hooks. monitor: the metric it is
        kept for, as {"name": ..., "mode": ..., "score": ...}. weights: 'all', or None.
        """
        request = make_save_request(path, reason, monitor, weights)
        if weights == "trainable":
            raise OptionError("weights='trainable' works in a fit of hookline.Trainer; here, leave it out.")
        if self.state.module is None:
            raise HooklineError("There is nothing to save: no run has started.")
        self.save_requests.append(request)
        if not self.is_running:
            self.save_due()

    def update_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Take over the host's metrics. A known value keeps its object, because monitors recognize old values
        by identity.

        metrics: numbers by name.
        """
        newest = self.state.log.newest
        for name, value in metrics.items():
            if name not in newest or newest[name] != float(value):
                newest[name] = value

    @property
    def should_stop(self) -> bool:
        """Return whether the loop is to end: as requested, or with several ranks as they have agreed."""
        return self.state.should_stop if self.rank_sync is None else self.rank_sync.stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        View.should_stop.fset(self, stop)  # type: ignore[attr-defined]

    def sync_point(self, point: int = BETWEEN_EPOCHS) -> None:
        """Wait for all ranks between batches, then write the checkpoints that any of them requested.

        point: the kind of moment, which must be the same on all ranks.
        """
        if self.rank_sync is not None:
            self.rank_sync.sync_point(point)
        self.save_due()

    def save_due(self, ranks: Ranks | None = None) -> None:
        """Write the checkpoints that were requested, and agreed on by all ranks."""
        source = self.save_requests if self.rank_sync is None else self.rank_sync.agreed
        while source:
            save_hosted(self, source.pop(0), ranks or self.ranks)
