"""A run that another loop drives: one method for each thing that can happen, which emits the events of the
trainer's own runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.data.batch import count_tokens as elements_of_ids
from hookline.distributed.comm import Ranks
from hookline.distributed.process_group import control_group, known_rank
from hookline.engine.events import EVENTS
from hookline.engine.plan import Plan, noop
from hookline.interop.hosted.batch import OUTSIDE, HostedBatch, Pass
from hookline.interop.hosted.checkpoints import put_back
from hookline.interop.hosted.host import Host, HostedHooks
from hookline.interop.hosted.rank_sync import AT_VALIDATION, BETWEEN, HostedRankSync
from hookline.interop.hosted.recording import HostedRows, Recording
from hookline.interop.hosted.updates import Updates
from hookline.loggers import JSONLines, Logger, Loggers, make_loggers
from hookline.metrics.metric_log import MetricLog
from hookline.run.directory import RunDirectory
from hookline.run.optimizers import bare
from hookline.run.options import make_options
from hookline.run.parts import Participants, Progress, Resume
from hookline.run.reduction import Rows
from hookline.run.rows import MetricRows
from hookline.run.state import State
from hookline.training import run_events
from hookline.training.participants import LateHooks, attach_failures, tear_down, teardown_removed
from hookline.training.pass_events import VALIDATION, Names
from hookline.util.errors import HooklineError, OptionError, Signal

# ---- What a loop hands to its hooks, and what it is inside


def own_module(module: nn.Module) -> nn.Module:
    """What the user wrote, without what distributes or compiles it."""
    while True:
        is_spread = isinstance(module, DistributedDataParallel)
        inner: Any = (
            module.module if is_spread else vars(module).get("_modules", {}).get("_orig_mod")
        )  # torch.compile's
        if inner is None:
            return module
        module = inner


def joins(model: Any) -> bool:
    """Whether ranks may have different numbers of batches (torch's `Join`): then they cannot
    meet after each.
    """
    return isinstance(model, DistributedDataParallel) and model._join_config.enable


def own_optimizers(given: Any) -> list[Any]:
    """The optimizers themselves, without their coats; something else is refused."""
    try:
        found = [bare(each) for each in listed(given)]
    except TypeError:
        found = [given]
    for each in found:
        if isinstance(each, type) or not hasattr(each, "register_step_post_hook"):
            what = each.__name__ + ", a class" if isinstance(each, type) else type(each).__name__
            raise OptionError(f"hooks hear torch.optim.Optimizer, one or a list of them, but got {what}.")
    return found


def listed(given: Any) -> list[Any]:
    """One optimizer or scheduler, or several."""
    if hasattr(given, "step"):
        return [given]
    return [each for each in given if each is not None] if given is not None else []


class HostedRun(Recording):
    """The plan, the state and the hooks of one run; hooks see it as `trainer`."""

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
        """announces_steps: whether optimizers are heard by themselves before they step, or the host says
        when.

        host_logs: whether rows go to where the host logs its own metrics itself. holds_rows: whether they
        wait until it does.
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
        place = known_rank()
        self.loggers = make_loggers(logger, JSONLines)
        self.plan = Plan(EVENTS, accounting=accounting)
        self.state = State(trainer=self, logger=self.loggers, config=config)
        self.state.setup.hooks = self.hooks = HostedHooks(self.plan, host, place.rank, self._offered())
        self.take_place(place.rank, place.local_rank, place.world_size)
        self.progress = Progress()
        self.rows: MetricRows = HostedRows(self.plan, self.state, holds_rows)
        self.updates = Updates(self, on_step=announces_steps)
        self.batch = HostedBatch(self, self.updates, count_tokens or elements_of_ids, holds_rows)
        self.host_logs = host_logs
        self.ranks = Ranks()
        self.rank_sync: HostedRankSync | None = None
        self.is_running = False
        self.current_pass: Pass | None = None
        self.save_requests = []
        self._directory = RunDirectory(self.options)
        self._late_hooks = LateHooks(self)
        self.participants = Participants()
        self.resume = Resume()
        self.epoch_is_open = False
        self.epoch_is_whole = False
        """Whether the loader has come to its end in this epoch."""
        self._kept: dict[str, Any] | None = None
        for hook in hooks:
            self.hooks.add(hook)

    def attach(self, module: nn.Module, optimizers: Any = (), schedulers: Any = ()) -> None:
        """Say whose training it is."""
        s = self.state
        if not isinstance(module, nn.Module):
            raise OptionError(
                f"hooks need the model that is trained, a torch.nn.Module, not {type(module).__name__}."
            )
        s.setup.module = own_module(module)
        s.setup.optimizers = own_optimizers(optimizers)
        s.setup.schedulers = listed(schedulers)
        if self.updates.is_watching:  # in the middle of a run: others take their place
            self.updates.leave()
            self.updates.watch(s.setup.optimizers)
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        self.place(first.device if first is not None else torch.device("cpu"), module)

    def place(self, device: Any, wrapped_model: Any) -> None:
        """Say where the module is, and what the host runs in its place."""
        self.state.setup.device, self.state.setup.wrapped_model = device, wrapped_model

    def take_place(self, rank: int, local_rank: int, world_size: int) -> None:
        """Say which of the ranks this is. There is one record of a run, however many ranks it has."""
        s = self.state
        s.setup.rank, s.setup.local_rank, s.setup.world_size = rank, local_rank, world_size
        self.hooks.move_to(rank)
        if rank != 0:
            self.loggers = s.setup.logger = Loggers()

    # ---- from set-up to teardown ---------------------------------------------------------------------------

    def begin(self, stage: str = "fit") -> None:
        """Open the loggers, and set up every hook."""
        s = self.state
        if self.is_running:
            raise HooklineError("These hooks are in a run already.")
        if s.setup.module is None:
            raise OptionError("Line needs the model that is trained: Line(model, optimizer, hooks=[...]).")
        self.is_running = True
        s.setup.stage = stage
        run_events.begin(self, "training" if stage == "fit" else "running")
        self.batch.reset()
        self.plan.up.clear()
        if s.setup.world_size > 1 and distributed.is_initialized():
            self.ranks = Ranks(s.setup.rank, s.setup.local_rank, s.setup.world_size, control_group())
            assert isinstance(self.rows, HostedRows)
            self.rows.over_ranks, self.rank_sync = Rows(self.ranks, s.log), HostedRankSync(self, self.ranks)
            self.updates.signal_filters = (self.rank_sync.on_update,)
        self._directory.renew()
        if not self.ranks.alone:
            self._directory.continue_in(Path(self.ranks.decide(self._directory.chosen)))
        self.loggers.open(self._directory.path)
        self._late_hooks.begin()
        self.progress.step_before_batch = OUTSIDE
        self.batch.log_every = self.options.log_every_n_steps
        self.batch.logs = bool(self.loggers) or self.batch.holds_rows
        run_events.set_up(self)
        if self._kept is not None:
            kept, self._kept = self._kept, None
            put_back(self, kept)

    def start_afresh(self) -> None:
        """The run that comes is a new one: its counters begin at zero."""
        self.state.counts.reset()
        self.resume.take({})
        self.state.log = MetricLog()

    def start_fit(self) -> None:
        """Everything is in place: the optimizers are listened to."""
        self.updates.watch(self.state.setup.optimizers)
        run_events.start_fit(self)

    def start_training(self) -> None:
        """The training begins."""
        run_events.start_training(self)
        self.settle()

    def end_training(self) -> None:
        """The training has ended as meant."""
        self.end_epoch()
        run_events.end_as(self, "stopped" if self.state.ending.should_stop else "completed")
        run_events.end_training(self)
        self.write_pending()
        self.settle()
        self.updates.leave()

    def end_fit(self) -> None:
        """The last event of a run that ended as meant."""
        run_events.end_fit(self)
        self.settle()

    def drop(self) -> None:
        """What is open will never end, and what was asked for is not done."""
        if self.current_pass is not None:
            self.current_pass.leave()
            self.current_pass = None
        self.batch.is_open = self.epoch_is_open = False
        self.updates.windows += 1
        self.save_requests.clear()

    def fail(self, error: BaseException) -> None:
        """Emit on_exception. What fails then is noted on the error."""
        self.drop()
        run_events.mark_failed(self, error)
        self.rank_sync, self.updates.signal_filters = None, ()  # the other ranks may not know of it
        failures = run_events.report_failure(self)
        try:
            self.save_due(Ranks())
        except BaseException as failure:
            failures.append(failure)
        attach_failures(error, failures)

    def tear_down(self) -> list[BaseException]:
        """Whatever happened, everyone whose set-up began is torn down, once. Their failures."""
        self.drop()
        self.updates.leave()
        failures = tear_down(self)
        self.hooks.stopwatch.stop()
        self.hooks.observer = None
        self.loggers.close()
        run_events.release(self)
        self.is_running = False
        return failures

    # ---- epochs and batches --------------------------------------------------------------------------------

    def start_epoch(self, batches: int | None = None, first: int = 0) -> None:
        """An epoch begins, or goes on after a resume with its batch number `first`: then its
        means go on too.
        """
        self.end_epoch()
        self.must_run()
        self.num_training_batches = batches
        self.batch.continue_at(first)
        self.epoch_is_open, self.epoch_is_whole = True, False
        if self.rank_sync is not None:
            self.rank_sync.note_steering()
        run_events.start_epoch(self, first)
        self.state.log.mode = "train"

    def start_batch(self, batch: Any) -> Signal | None:
        """Emit the start of a batch. Return SKIP_BATCH or END_EPOCH if a hook wants that."""
        if not self.is_running:
            self.must_run()
        if self.batch.is_open:
            self.end_batch()
        if self.current_pass is not None:  # left by a `break`
            self.end_validation()
        current = self.batch
        current.take(batch)
        self.updates.recomputing = False
        signal = current.start()
        if self.rank_sync is not None:
            signal = self.rank_sync.on_batch(signal)
        current.is_open = signal is None
        return signal

    def before_backward(self, loss: Tensor) -> Tensor:
        """Emit on_before_backward. Differentiate what comes back: a hook may replace it."""
        if not self.is_running:
            self.must_run()
        return self.batch.before_backward(loss)

    def after_backward(self) -> None:
        """Emit on_after_backward: gradients have been added."""
        if self.plan.on_after_backward is not noop:
            self.batch.backward.after()

    def end_batch(self, outputs: Any = None) -> None:
        """Emit the end of the batch; if an update was made in it, that is complete too."""
        s, current = self.state, self.batch
        if not current.is_open:
            return
        if self.current_pass is not None:  # left by a `break`
            self.end_validation()
        current.is_open = False
        if self.updates.announced:
            self.updates.account_for_missing()
        s.current.returned = s.current.last_loss if outputs is None else outputs
        current.end()
        is_update = s.counts.step != self.progress.step_before_batch
        if is_update:
            current.end_step()
        if self.rank_sync is not None and not joins(s.setup.wrapped_model):
            self.rank_sync.poll()
        if is_update and (self.save_requests or self.rank_sync is not None):
            self.save_due()
        s.current.returned = None
        self.progress.step_before_batch = OUTSIDE
        if self.participants.leaving:
            teardown_removed(self)

    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """The epoch is over, and what the loop has left open in it by `break`, which could not be told from
        an error before.
        """
        s = self.state
        self.end_batch()
        self.end_validation()
        if not self.epoch_is_open:
            return
        self.epoch_is_open = False
        s.log.mode = "now"
        if self.rank_sync is not None:
            self.rank_sync.settle(BETWEEN)
        results = self.rows.finish("train", {}, s.log.pending)
        self.take_new(metrics or {})
        # else it was cut short
        is_complete = (
            self.epoch_is_whole
            or not s.ending.should_stop
            or self.progress.position == self.num_training_batches
        )
        pending = run_events.end_epoch(self, results, is_complete)
        if self.batch.holds_rows:
            results.pop("train/loss", None)
        self.write_row({**results, **self.rows.reduce(pending, "epoch")}, "epoch")
        self.settle()

    # ---- validation ----------------------------------------------------------------------------------------

    def start_validation(self, names: Names = VALIDATION) -> Pass:
        """A validation begins, or a test."""
        if self.batch.has_updated:  # else the batch goes on after it, and its update is still to come
            self.end_batch()
        self.end_validation()
        self.must_run()
        if self.rank_sync is not None:
            self.rank_sync.settle(AT_VALIDATION)
        self.current_pass = Pass(self, names)
        self.current_pass.start()
        return self.current_pass

    def end_validation(self) -> None:
        """It is over, if one was going on; its results go out."""
        current, self.current_pass = self.current_pass, None
        if current is None:
            return
        results = current.end()
        if not self.state.sanity_checking:
            told = current.told if self.host_logs else {}
            self.write_row(
                {key: value for key, value in results.raw().items() if key not in told}, "evaluation"
            )
            self.settle(AT_VALIDATION)

    def must_run(self) -> None:
        """Refuse what has no meaning outside of a run."""
        if not self.is_running:
            raise HooklineError("The line is not in a run: put the loop into `with line:`.")
