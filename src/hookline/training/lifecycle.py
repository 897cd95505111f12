"""The lifecycle of a run: set-up, the stage (fit, validate, test, predict), teardown, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from hookline._version import __version__
from hookline.data.seeding import seed_rank
from hookline.distributed.activation_checkpointing import checkpoint_activations
from hookline.distributed.base import step_module_of
from hookline.engine.foreign import Adapter
from hookline.engine.hook_list import Entry, Handle
from hookline.engine.listener import Listener, find_listeners
from hookline.metrics.metric_log import Metrics
from hookline.reliability.model_location import kept_best, load_best, run_to_evaluate
from hookline.reliability.signals import Signals
from hookline.reliability.summary import Recorded, disable_on_all_ranks, log_ending
from hookline.reliability.watchdog import Watchdog
from hookline.run.buffers import FiniteBuffers
from hookline.run.commands import handles_command
from hookline.run.failure_notes import explain_failure
from hookline.run.finite import warn_of_nonfinite_weights
from hookline.run.module import PlainSteps
from hookline.run.optimizer_router import make_router
from hookline.run.optimizers import follow_parameters, parse_optimizers, settle_order
from hookline.run.parts import RunData
from hookline.run.record import (
    begin_record,
    discard_files,
    is_refused,
    leaves_directory,
    record_end,
    take_if_trained,
)
from hookline.run.run import Run, ending
from hookline.run.save_request import SaveRequest, make_save_request
from hookline.training import run_events
from hookline.training.actions import install_actions, install_closure
from hookline.training.compile import (
    check_recomputed,
    choose_blocks,
    compile_blocks,
    compile_model,
    compiles_step,
    explain_graphs,
)
from hookline.training.composition import check_manual_options
from hookline.training.evaluate import evaluate
from hookline.training.final_checkpoint import keeps_failed_state, save_final_state, warn_of_missed_events
from hookline.training.fit import close_failed_epoch, fit
from hookline.training.inference import check_inference_mode
from hookline.training.loading import asked_mixture, limit_of, load, resolve_mixture, take_datamodule
from hookline.training.manual import ManualOptimizer, manual_backward, unscale_once
from hookline.training.participants import LateHooks, attach_run, raise_first, tear_down_all, teardown_removed
from hookline.training.pass_events import TEST, VALIDATION, restore_failed_batch
from hookline.training.restore import begin_weights, keep_counts, keep_monitor_state, restore_progress
from hookline.training.resume import choose_start, find_checkpoint
from hookline.training.rules import LoopRules
from hookline.training.run_events import end_as
from hookline.training.saving import finish_saving, leaves_out_base, save, save_due
from hookline.training.settings import collect_settings
from hookline.util.errors import OptionError, RunLockedError, StopTraining

__all__ = [
    "TEST",
    "VALIDATION",
    "LoopRules",
    "Recorded",
    "Run",
    "RunData",
    "RunParticipants",
    "Signals",
    "Watchdog",
    "check_manual_options",
    "choose_start",
    "controlled",
    "determinism",
    "evaluate",
    "explain_graphs",
    "find_checkpoint",
    "fit",
    "keep_counts",
    "keep_monitor_state",
    "kept_best",
    "leaves_out_base",
    "limit_of",
    "load",
    "load_best",
    "locked",
    "make_save_request",
    "monitoring_ranks",
    "run_lifecycle",
    "run_to_evaluate",
    "save",
    "take_datamodule",
    "wait_for_ranks",
]

log = logging.getLogger("hookline")
T = TypeVar("T")


def run_lifecycle(run: Run, body: Callable[[Run], T]) -> T:
    """Set up, run the stage, tear down. Raise the first error, with later ones attached as notes."""
    plan, s = run.plan, run.state
    result: Any = None
    error: BaseException | None = None
    failures: list[BaseException] = []
    participants = RunParticipants(run)
    strategy_is_up = False
    plan.up.clear()
    try:
        participants.attach()
        if not run.strategy.ranks.alone:
            join_ranks(run)
        participants.begin()
        prepare_run(run)
        strategy_is_up = True
        set_up_strategy(run)
        try:
            result = body(run)
        except StopTraining as stop:  # raised by a step of the module outside training batches
            s.request_stop(stop.reason)
            s.running = None
        if s.status in ("training", "running"):
            end_as(run, ending(run))
        if run.stage == "fit":
            save_final_state(run)  # saves again only if a listener of on_train_end changed the weights
        if run.signals.number == signal.SIGINT:
            raise KeyboardInterrupt
        strategy_is_up = False
        failures += run_events.tear_down_strategy(run)
        if run.stage == "fit":
            finish_fit(run)
    except BaseException as caught:
        write_pending_metrics(run)
        error = begin_failure(run, caught)
        failures += run_events.report_failure(run)
        failures += save_after_failure(run)
        record_end(run)
        if strategy_is_up:
            failures += run_events.tear_down_strategy(run)
    failures += leave_run(run, participants)
    if error is not None:
        failures.insert(0, error)
        error = None  # avoids a reference cycle: its traceback holds this frame
    raise_first(failures)
    return result  # type: ignore[no-any-return]


def join_ranks(run: Run) -> None:
    """Check that all ranks run the same program; in a fit, make them share decisions and one clock."""
    from hookline.training.ranks.preflight import check_equal, refuse_on_some_ranks

    check_equal(run)
    run.strategy.before_collective = functools.partial(refuse_on_some_ranks, run.state)
    run.strategy.make_mesh()
    if run.stage != "fit":
        return
    from hookline.training.ranks.rank_sync import RankSync

    run.boundary = rank_sync = RankSync(run)
    run.state.setup.clock = rank_sync.now
    run.traits.started = rank_sync.now()


def begin_failure(run: Run, error: BaseException) -> BaseException:
    """Mark the run as failed and report it to other ranks, at once; return the error to raise."""
    s = run.state
    is_agreed = s.status == "interrupted"  # Ctrl-C ends all ranks
    run_events.mark_failed(run, error)
    restore_failed_batch(s, error)
    run.watch.ranks = None  # from here on this rank does not wait for others
    explain_failure(run, error)
    # the summary of a fit has the position; of a wrong call, the one before it says nothing
    is_wrong_call = isinstance(error, OptionError) and s.current.interrupted_batch is None
    if run.failure_monitor is not None or (run.stage != "fit" and not is_wrong_call):
        error.add_note(
            "the run failed before its checkpoint was restored"
            if run.resume.was_refused
            else f"the run ended in {run.stage} at {s.position}"
        )
    if run.failure_monitor is not None and not is_agreed:
        error = run.failure_monitor.report_failure(error)
        run_events.mark_failed(run, error)
    run.saves.requests.clear()  # the state that they were meant to save may be inconsistent now
    return error


def write_pending_metrics(run: Run) -> None:
    """Write the metrics that a failed run has logged since its last row.

    Not with several ranks: reading a value may wait for a rank that has died.
    """
    s = run.state
    pending, s.log.pending = s.log.pending, {}
    take_if_trained(run)
    if (
        pending
        and s.logger
        and run.stage == "fit"
        and run.failure_monitor is None
        and not leaves_directory(run)
    ):
        with contextlib.suppress(Exception):  # reading a broken device fails too, and must not hide the error
            s.logger.log_row(Metrics(pending).read(), s.step, s.epoch, "step")


def leave_run(run: Run, participants: RunParticipants) -> list[BaseException]:
    """Tear down hooks, module and data module, detach them, and free what the trainer would keep alive:
    workers, the memory of savers, the tensors of a failed step. Return failures.
    """
    failures = tear_down_all(run)
    try:
        participants.leave()
    except BaseException as caught:
        failures.append(caught)
    for loader in itertools.chain(*run.data.loaders.values()):
        loader.close()  # the garbage collector takes seconds to end workers
    run.saves.background = None
    run_events.release(run)
    if run.traits.compiled is not None:
        run.traits.compiled.close()
    return failures


def finish_fit(run: Run) -> None:
    """Emit on_fit_end, save at the last save point and wait until everything is written."""
    run.signals.is_handled = bool(run.signals.number)  # on all ranks, before any of them tears down
    run_events.end_fit(run)
    run.boundary.sync_point()
    save_due(run)
    finish_saving(run)
    changes = run.state.hooks.recorded_changes
    if not run.strategy.ranks.alone and changes is not None:  # the table of the audit is of all ranks
        for rows in run.strategy.ranks.gather([row.data() for row in changes.rows()]):
            changes.include(rows)
    record_end(run)


def save_after_failure(run: Run) -> list[BaseException]:
    """Write the checkpoints that on_exception requested, and `checkpoints/last`; return what was raised."""
    if run.watch.broken or run.resume.is_incomplete:
        run.saves.requests.clear()
    if run.failure_monitor is not None:
        if run.saves.requests:
            log.warning(
                "No checkpoint is written after a failure with several ranks: the other ranks may be gone."
            )
        return []
    try:
        if keeps_failed_state(run):
            run.saves.requests.append(SaveRequest(None, "exception", is_automatic=True))
        if run.saves.requests and run.step is not None:
            warn_of_missed_events(run)
            run.step.close_failed_batch()
            close_failed_epoch(run)
        save_due(run)
        finish_saving(run)
    except BaseException as failure:
        return [failure]
    return []


def prepare_run(run: Run) -> None:
    """Prepare the data, emit `setup`, configure the model, and restore the module of a resumed run."""
    plan, s = run.plan, run.state
    if run.strategy.local_rank == 0:  # once per machine: all its ranks share the downloaded files
        plan.prepare_data(s)
    if run.failure_monitor is not None:
        run.failure_monitor.wait_for_all_ranks("data")
    run_events.set_up(run)
    if step_module_of(run.module) is None:  # a module that FSDP has sharded has its layers
        with run.strategy.precision.creation_context():
            plan.configure_model(s)
        run.strategy.precision.convert_module(run.module)
    if not run.strategy.restore_after_setup:
        begin_weights(run)


def set_up_strategy(run: Run) -> None:
    """Move the module to its device, make its optimizers and restore the progress of a resumed run."""
    plan, s = run.plan, run.state
    plan.strategy_setup(s)
    before = {id(each): name for name, each in run.module.named_parameters(remove_duplicate=False)}
    recompute_activations(run)
    compile_blocks(run)
    s.setup.wrapped_model = run.strategy.place(run.module)
    if not run.strategy.ranks.alone:
        seed_per_rank(run)
    if run.strategy.restore_after_setup:
        begin_weights(run)
    if run.saves.base is not None:
        run.saves.base.begin(run.module.state_dict())
    compile_model(run)
    if run.stage != "fit":
        return
    # the optimizer is an argument of fit, and messages name that
    takes_optimizer = isinstance(run.steps, PlainSteps) or "configure_optimizers" in vars(run.steps)
    s.setup.optimizers, schedules = parse_optimizers(
        plan.configure_optimizers(s), "" if takes_optimizer else type(run.steps).__name__
    )
    run.schedules = [
        each for each in schedules if run.traits.rules.advances_on_metrics or not each.needs_metric
    ]
    follow_parameters(s.optimizers, before, run.module)
    s.setup.optimizers = run.strategy.prepare_optimizers(s.optimizers)
    settle_order(s.optimizers, run.module)
    check_optimizers(run)
    warn_of_vanishing_eps(run)
    warn_of_nonfinite_weights(run.module, s.optimizers)
    run.watch.buffers = FiniteBuffers(run.module)
    choose_optimizers(run)
    if not run.strategy.ranks.alone and not run.traits.is_manual:
        from hookline.training.ranks.step import RankGradientSync

        run.gradient_sync = RankGradientSync(run)
    s.setup.schedulers = [schedule.scheduler for schedule in run.schedules]
    install_closure(run)
    if compiles_step(run.options.compile):
        from hookline.training.compiled_step import CompiledStep

        run.traits.compiled = CompiledStep(run)
    run.manual.optimizers = [ManualOptimizer(run, each, index) for index, each in enumerate(s.optimizers)]
    run.watch.optimizers = s.optimizers
    run.identity.settings = collect_settings(run)
    if run.resume.path is not None:
        restore_progress(run)
        release_log(run)
        if run.identity.record is not None:
            run.identity.record.write()
        run_events.report_loaded(run, run.resume.path)
    run_events.start_fit(run)


def recompute_activations(run: Run) -> None:
    """Start activation checkpointing, until the end of the run. Only a fit has activations to save."""
    wanted = run.options.activation_checkpointing or run.strategy.activation_checkpointing
    if not wanted or run.stage != "fit":
        return
    layers = choose_blocks(run, "activation_checkpointing", wanted)
    check_recomputed(run, layers)
    run.participants.on_close.append(checkpoint_activations(layers))


def seed_per_rank(run: Run) -> None:
    """Seed ranks with different batches differently, so that dropout differs; the model had the same seed."""
    drawn = run.options.seed if run.options.seed is not None else int(torch.randint(2**62, ()).item())
    seed_rank(run.strategy.ranks.from_zero(drawn), run.strategy.ranks.data_rank)


def choose_optimizers(run: Run) -> None:
    """Make the router of a mixture in which some loaders train some optimizers only."""
    if asked_mixture(run) is None:
        return
    routes = resolve_mixture(run).optimizers
    if routes and run.traits.is_manual:
        raise OptionError(
            "Mixture: optimizers= is for automatic optimization; a manual training step chooses its own."
        )
    if routes:
        load(run, "train")  # the router needs the names of the loaders
        run.data.router = make_router(routes, run.state.optimizers, run.traits.accumulate)


def check_optimizers(run: Run) -> None:
    """Refuse optimizers that would train no parameter of the module."""
    name, optimizers = type(run.module).__name__, run.state.optimizers
    if not optimizers and not run.traits.is_manual:
        raise OptionError(
            f"{name}.configure_optimizers returned no optimizer, so nothing would be trained. Return one, "
            "or set automatic_optimization = False and train in training_step."
        )
    own = {id(parameter) for parameter in run.module.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise OptionError(
                f"{type(optimizer).__name__} holds no parameter of {name}, so it would train nothing of it. "
                "Was it made for another model?"
            )


def warn_of_vanishing_eps(run: Run) -> None:
    """Warn if an optimizer's eps is zero in float16: its first division of zero by zero makes NaN weights."""
    for optimizer in run.state.optimizers:
        for group in optimizer.param_groups:
            eps, fused = group.get("eps"), group.get("fused")  # fused kernels compute in float32
            is_half = any(each.dtype is torch.float16 for each in group["params"])
            if is_half and not fused and isinstance(eps, float) and eps < 2**-25 and run.strategy.rank == 0:
                log.warning(
                    "%s: eps=%g is 0 in float16, so a gradient of 0 may make weights NaN. "
                    "Pass eps=1e-4, or precision='bf16-true'.",
                    type(optimizer).__name__,
                    eps,
                )
                return


class RunParticipants(LateHooks[Run]):
    """The module, data module, strategy, hooks and loggers of a run, from its start to its end."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.handles: list[Handle] = []
        self.listeners: list[Listener] = []

    def attach(self) -> None:
        """Bind module, data module and strategy, and add the hooks that `configure_hooks` returns."""
        self.bind()
        run, s = self.run, self.run.state
        check_inference_mode(run)
        install_actions(run)
        given = run.plan.configure_hooks(s)
        hooks = given if isinstance(given, list | tuple) else [] if given is None else [given]
        for hook in hooks:
            self.handles.append(
                s.hooks.add(hook)
            )  # one by one, so that `leave` removes them if one is refused

    def bind(self) -> None:
        """Add the event methods of module, data module and strategy to the plan."""
        run, table = self.run, self.run.plan.table
        run.manual.backward = functools.partial(manual_backward, run)
        run.manual.unscale = functools.partial(unscale_once, run)
        attach_run(run, run)
        for receiver, owner in (("D", run.datamodule), ("M", run.steps), ("S", run.strategy)):
            if owner is not None:
                name = type(owner).__name__
                self.listeners += (
                    owner.listeners(name, table)
                    if isinstance(owner, Adapter)
                    else find_listeners(owner, receiver, name, table)
                )
        run.plan.add(self.listeners)

    def begin(self) -> None:
        """Open the loggers, reset the filters and accounts of every hook, and observe added hooks."""
        run, s = self.run, self.run.state
        s.logger.open(run.run_dir)
        begin_record(run)
        if run.stage == "fit":
            begin_logging(run)
        if run.participants.control is not None:
            run.participants.control.open()
        super().begin()
        if run.stage == "fit" and not run.strategy.ranks.alone:
            s.hooks.dismiss = functools.partial(disable_on_all_ranks, run)

    def leave(self) -> None:
        """Remove the hooks of the module and everything else that this run added, and close the loggers."""
        run, hooks = self.run, self.run.state.hooks
        if hooks.observer is self:  # not for explain(), which attaches but does not begin
            log_ending(run)
        hooks.observer, hooks.dismiss = None, hooks.disable
        run.plan.agree_on_wants(None)
        for handle in self.handles:
            run.participants.module_hooks.append(handle.entry)
            handle.remove()
        while run.participants.on_close:
            run.participants.on_close.pop()()
        run.plan.clear_run()
        attach_run(run, None)
        run.rows.flush()
        if is_refused(run):
            discard_files(run)
        run.state.logger.close()

    def on_hook_added(self, entry: Entry) -> None:
        """Set up a hook that is added during the run. Before `setup` is emitted there is nothing to do."""
        if self.run.participants.setup_began:
            super().on_hook_added(entry)


def begin_logging(run: Run) -> None:
    """Log the hyperparameters of a fit. This record and those of hooks are held back as long as the fit may
    be refused or fail without changing its directory.
    """
    if leaves_directory(run):
        run.state.logger.hold()
    if run.state.logger:
        run.state.logger.log_hyperparams(
            {
                "options": dataclasses.asdict(run.options),
                "module": type(run.module).__name__,
                "device": run.strategy.device,
                "precision": run.strategy.precision.name,
                "strategy": type(run.strategy).__name__,
                "hooks": run.state.hooks.list_hooks(),
                "torch": torch.__version__,
                "hookline": __version__,
            }
        )
    if run.resume.path is None:
        release_log(run)


def release_log(run: Run) -> None:
    """Write the records that were held back: now, or once the run takes the directory of an earlier run."""
    if leaves_directory(run):
        run.identity.record.on_taken.append(run.state.logger.release)
    else:
        run.state.logger.release()
    begin_record(run)  # the loggers may have created the directory


@contextlib.contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Use deterministic kernels during a run if requested, and restore the setting afterwards."""
    before, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted:
            torch.use_deterministic_algorithms(before, warn_only=only_warned)


@contextlib.contextmanager
def locked(run: Run) -> Iterator[None]:
    """Lock the run's directory. If another job holds the lock, raise `RunLockedError` on all ranks."""
    directory = run.directory
    try:
        # the lock's thread reports that the lock is lost, so that the run ends
        run.strategy.ranks.decide(
            lambda: directory.hold(lambda who: run.participants.commands.send("lock lost", who=who))
        )
        yield
    finally:
        directory.release()


@handles_command("lock lost")
def end_without_lock(run: Run, sender: int, who: str) -> None:
    """End the run, because another job now writes into its directory."""
    raise RunLockedError(
        f"This job did not renew its lock for a while, and another job has taken over its directory. {who}"
    )


def wait_for_ranks(run: Run, **given: Any) -> None:
    """Wait until all ranks have begun this run, if there are several. given: see `start_ranks`."""
    if not run.strategy.ranks.alone:
        from hookline.training.ranks.preflight import start_ranks

        start_ranks(run, **given)


def controlled(run: Run) -> contextlib.AbstractContextManager[object]:
    """Return a context that answers requests from outside the process, unless `control` is switched off."""
    if run.strategy.ranks.alone and not run.options.control:
        return contextlib.nullcontext()
    from hookline.control.server import Control

    run.participants.teardown_removed = functools.partial(teardown_removed, run)
    return Control(run)


def monitoring_ranks(run: Run) -> contextlib.AbstractContextManager[object]:
    """Return a context that monitors the other ranks for failures, if there are several ranks."""
    if run.strategy.ranks.alone:
        return contextlib.nullcontext()
    from hookline.training.ranks.failure_monitor import RankMonitor

    return RankMonitor(run)
