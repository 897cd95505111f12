"""The training loop: epochs of batches, validation when due, save points.

Read it from top to bottom: the order of events is the order of lines.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

from hookline.data.loaders import Loader
from hookline.data.seeding import isolated_rng, rng_state, set_rng_state
from hookline.data.sources import resume_limits
from hookline.reliability.loader_advice import compare_waiting
from hookline.reliability.summary import warn_idle_epoch
from hookline.run.module import Module, PlainSteps, name_of_step
from hookline.run.record import restore_ending, update_record
from hookline.run.run import Run, ending, phase
from hookline.run.state import OPENING
from hookline.run.timer import timed
from hookline.training import run_events
from hookline.training.composition import choose_step
from hookline.training.data_pass import Fetcher, ValidationAbandoned
from hookline.training.evaluate import evaluate
from hookline.training.final_checkpoint import keeping_last, recording_changes, save_final_state
from hookline.training.first_batches import after_resume
from hookline.training.loading import load
from hookline.training.participants import teardown_removed
from hookline.training.pass_events import VALIDATION, SanityCheck
from hookline.training.preflight import check_before_training
from hookline.training.restore import restoring
from hookline.training.resume import START_OVER, begin_log
from hookline.training.rollback import find_target, roll_back
from hookline.training.run_events import end_as, end_training, start_epoch, start_training
from hookline.training.saving import copy_small, finish_saving, save_due, state_before_validation
from hookline.training.schedulers import advance_epoch, advance_on_metric, advance_plateau
from hookline.util.errors import END_EPOCH, LossError, OptionError, StopTraining

log = logging.getLogger("hookline")

STOPPED_BY_CHECK = (
    " (requested in the sanity check, before the first batch: ask for `sanity_checking` in the hook to leave "
    "the check out, or set num_sanity_val_steps=0)"
)


def fit(run: Run) -> None:
    """Train: a sanity check, then epochs until a limit is reached or a stop is requested."""
    s = run.state
    s.hooks.begin_training()
    s.timer.begin()
    if not run.progress.position:  # a run that resumes inside an epoch was checked when it began
        sanity_check(run)
    load(run, "train")
    for warning in itertools.chain(*map(resume_limits, run.data.loaders["train"])):
        log.warning(warning)
    run.traits.rules.load_validation(run, lambda: load(run, "val"))
    run.boundary.sync_point()
    if run.signals.number:
        run.saves.is_final = True  # nothing was trained, so there is nothing to save
    if is_finished(run):
        report_nothing_to_train(run)
        return
    if not run.module.training:
        log.warning(
            "%s is in eval mode: dropout and batch norm will not train. Call .train() on it, or on the "
            "parts that should, before fit.",
            type(run.module).__name__,
        )
    check_before_training(run)  # before the loggers mark an earlier log as superseded
    begin_log(run)
    with keeping_last(run):
        start_training(run)
        run.boundary.sync_point()
        if run.saves.requests:
            save_due(run)
        while not is_finished(run):
            train_epoch(run)
            if run.resume.rollback is not None and find_target(run):
                roll_back(run)
    run.watch.check_now()
    refuse_untrained(run)
    if run.signals.number:
        save_due(run)  # the signal may have arrived between two epochs
    end_as(run, ending(run))
    save_final_state(run)
    with recording_changes(run):
        end_training(run)
    run.rows.write_pending()
    run.rows.reduce({}, "end")
    run.boundary.sync_point()
    save_due(run)
    finish_saving(run)
    compare_waiting(run)


def refuse_untrained(run: Run) -> None:
    """Raise if the training step never returned a loss. A hook, a signal or manual optimization may have left
    out all updates on purpose, batches without tokens have none, and Lightning allows it.
    """
    s, progress = run.state, run.progress
    is_untrained = s.step == 0 and progress.skip_reasons == {"no_loss"} and run.window.by == "batches"
    is_ours = run.traits.rules.refuses_empty_data and isinstance(run.steps, Module | PlainSteps)
    if is_untrained and is_ours and ending(run) == "completed":
        raise LossError(
            f"{name_of_step(run.steps)} returned no loss for any of {s.batches_seen} batches, so nothing was "
            "trained. Does it end with `return loss`?"
        )


def report_nothing_to_train(run: Run) -> None:
    """Log why there is nothing to train. A run that had finished before keeps its status and reason."""
    if not run.signals.number and not run.state.rank:
        advice = "" if run.resume.path is None or run.resume.finished else f". {START_OVER}"
        log.warning("Nothing to train: %s", why_finished(run) + advice)
    if run.resume.finished:
        restore_ending(run)


def train_epoch(run: Run) -> None:
    """Train one epoch; a resumed run continues at its position in the epoch."""
    s, options = run.state, run.options
    run.traits.rules.begin_epoch(run)
    loader = run.data.train
    before = begin_epoch(run)
    start_epoch(
        run,
        run.progress.position,
        loader.name,
        emits=run.progress.position == 0 or run.traits.rules.starts_resumed_epochs,
    )
    run.boundary.sync_point()

    s.log.mode = "train"
    exhausted = False
    is_leaving, batches = open_epoch(run, loader, before)
    is_validation_due = run.traits.rules.validation_due(run)
    fetcher = Fetcher(run, batches, run.progress.position, s.timer)
    assert run.step is not None
    while fetcher.fetch():
        if run.saves.first_batches is not None:
            run.saves.first_batches.fetched()
        batches_left = None if loader.length is None else loader.length - s.batch_idx
        try:
            if run.step(batches_left) is END_EPOCH:
                run.traits.rules.epoch_cut(run)
                exhausted = True
                break
        except StopTraining as stop:  # raised by the module; the plan handles those that hooks raise
            s.request_stop(stop.reason)
        run.progress.position = s.batch_idx + 1  # for skipped batches; `BatchEvents.end` sets it otherwise
        if run.participants.leaving:
            teardown_removed(run)
        if is_validation_due is not None and is_validation_due():
            validate(run)
        if run.progress.plateau_due:
            advance_plateau(run)
        run.boundary.poll()
        if run.resume.rollback is not None and find_target(run):
            break
        if run.progress.validation_requested:
            validate_on_request(run)
        if run.saves.requests:
            save_due(run)
        is_at_limit = 0 <= options.max_steps <= s.step or options.max_time is not None
        if (s.should_stop or is_at_limit) and is_finished(run):
            break
    else:
        exhausted = not is_leaving
        check_loader_end(run, loader, exhausted)
    fetcher.close()
    if run.resume.target is not None:
        return  # the run goes back to a checkpoint, and this epoch is abandoned
    close_epoch(run, exhausted or run.progress.position == loader.length)


def open_epoch(run: Run, loader: Loader, before: Any) -> tuple[bool, Iterator[Any]]:
    """Return whether the run ends before the first batch of the epoch, and the batches."""
    is_leaving = run.boundary.is_stopping and is_finished(run)  # requested at the start of the epoch
    if is_leaving and before is not None:
        run.resume.contents["rng"] = before  # a resume repeats this epoch with the same random numbers
    batches = iter(()) if is_leaving else open_loader(run, loader)
    run.step = choose_step(run)
    is_waiting = run.progress.validation_pending or run.progress.validation_requested
    if is_waiting and not is_leaving and is_finished_after_validation(run):
        return True, iter(())
    return is_leaving, batches


def close_epoch(run: Run, complete: bool) -> None:
    """Close an open accumulation window after the last batch, validate if due, and end the epoch."""
    run.boundary.sync_point()
    if complete and not run.signals.number:
        assert run.step is not None
        run.step.close_window()  # the last window may have fewer batches than the others
        run.traits.rules.window_closed(run)
        advance_epoch(run)
    run.state.log.mode = "now"
    is_validated = run.progress.validated_at == (run.state.epoch, run.state.batches_seen)
    if not run.signals.number and not is_validated and run.traits.rules.validation_due_at_end(run, complete):
        validate(run)
        run.boundary.sync_point()
    elif run.progress.validation_requested and not run.signals.number:
        validate_on_request(run)
    advance_plateau(run)
    if run.signals.number:  # save before the epoch's end is emitted, because a resume emits it again
        save_due(run)
        complete = False
    finish_epoch(run, complete)


def begin_epoch(run: Run) -> Any:
    """Record where the epoch begins. Return the random number state if that is at its first batch."""
    s = run.state
    run.progress.epoch_began = (
        s.step if run.progress.position == 0 else -1,
        run.progress.skips,
        s.batches_seen,
    )
    if run.progress.position:
        return None
    if (streams := run.resume.contents.pop("rng", None)) is not None:
        set_rng_state(streams)  # resumed between two epochs
    run.progress.epoch_advanced = False
    return rng_state()


@phase(OPENING)
@timed("data")
def open_loader(run: Run, loader: Loader) -> Iterator[Any]:
    """Return the batches of the epoch; in a resumed epoch, the remaining ones in their original order."""
    from hookline.training.samples import describe_order

    saved, streams = run.resume.contents.pop("loader", None), run.resume.contents.pop("rng", None)
    for each in run.data.loaders["train"]:
        each.keeps_indices = "sample_ids" in run.plan.wanted or bool(run.options.digest)
    if saved is None:
        batches = loader.open(run.state.epoch, run.progress.position, run.options.seed)
    else:
        with restoring(run.resume.path, "the position of the training data"):
            loader.load_state_dict(saved)
            after_resume(run)
            batches = loader.open(run.state.epoch, run.progress.position, run.options.seed)
    describe_order(run)
    if streams is not None:  # the set-up of the run, and drawing a seed, have used random numbers
        set_rng_state(streams)
    return batches


def finish_epoch(run: Run, complete: bool) -> None:
    """Reduce the epoch's metrics, emit its end and write them; then comes the second save point."""
    s = run.state
    if not complete:
        run.progress.unfinished = {"metric_objects": copy_small(s.log.object_state(run.module))}
    results = run.rows.finish("train", {}, s.log.pending)
    if run.data.is_mixture:
        counted = run.data.train.metrics()
        s.log.newest.raw().update(counted)
        results |= counted
        s.log.loader = ""
    if complete:
        warn_idle_epoch(run)
    run.rows.write(run_events.end_epoch(run, results, complete), "epoch")
    if complete:
        advance_on_metric(run)
        run.progress.position = 0
    update_record(run)
    run.boundary.sync_point()
    if run.saves.requests:
        save_due(run)


def close_failed_epoch(run: Run) -> None:
    """Mark an epoch that failed in its last events as complete, so that a resume begins the next one."""
    if run.state.epochs_seen > run.state.epoch:
        run.progress.position = 0


# ---- when to stop ------------------------------------------------------------------------------------------


def is_finished(run: Run) -> bool:
    """Return whether a limit is reached, or a requested stop may take effect."""
    return why_finished(run) != ""


def why_finished(run: Run) -> str:
    """Return why the run is finished; an empty string if it is not."""
    s, options = run.state, run.options
    assert options.max_epochs is not None
    if run.signals.number or run.resume.finished:
        return run.resume.finished or s.stop_reason
    if 0 <= options.max_epochs <= s.epochs_seen:
        return f"max_epochs={options.max_epochs} is reached"
    if 0 <= options.max_steps <= s.step:
        return f"max_steps={options.max_steps} is reached"
    if run.data.train.length == 0:
        return (
            "limit_train_batches=0" if options.limit_train_batches == 0 else "there are no training batches"
        )
    if run.out_of_time and not run.boundary.is_stopping:
        s.request_stop(f"max_time={options.max_time:g} s is over")
        run.boundary.stop_by_clock()
    return (
        s.stop_reason or "a stop was requested"
        if run.boundary.is_stopping and run.traits.rules.may_stop(run)
        else ""
    )


def check_loader_end(run: Run, loader: Loader, exhausted: bool) -> None:
    """Refuse a loader that yields no batch, which would loop forever, or fewer than its length."""
    if exhausted and run.progress.position == 0 and run.traits.rules.refuses_empty_data:
        hint = (
            "; a generator can be iterated over only once, pass a list or a DataLoader"
            if run.state.epoch
            else ""
        )
        if getattr(loader, "exclusions", None):  # a mixture has none of its own
            hint = f": {len(loader.exclusions.samples)} of its samples are excluded"
        raise OptionError(
            f"The training loader {loader.name!r} yielded no batch in epoch {run.state.epoch}{hint}."
        )
    if exhausted and loader.is_exact and loader.length is not None and run.progress.position < loader.length:
        raise OptionError(
            f"The training loader {loader.name!r} ended after {run.progress.position} of {loader.length} "
            "batches. Does its dataset raise StopIteration?"
        )


# ---- validation --------------------------------------------------------------------------------------------


def sanity_check(run: Run) -> None:
    """Run a few validation batches before training, so that a broken validation fails at once."""
    steps = run.options.num_sanity_val_steps
    if steps == 0 or run.options.limit_val_batches == 0:
        return
    check = SanityCheck(run)
    with isolated_rng(), contextlib.suppress(ValidationAbandoned):
        if not run.traits.rules.sanity_check(run, lambda: load(run, "val"), check.start):
            return
        evaluate(run, VALIDATION, limit=None if steps < 0 else steps, can_be_cut=True)
        check.end()
    check.forget()
    if run.state.ending.stop_reason:
        run.state.ending.stop_reason += STOPPED_BY_CHECK


@timed("validation")
def validate(run: Run) -> None:
    """Validate during training. If a signal abandons it, the resumed run validates first."""
    run.progress.validation_pending = True
    if run.signals.number:
        return
    if run.traits.rules.undoes_abandoned_validations:
        run.progress.before_validation = state_before_validation(run)
    if not run.traits.rules.begin_validation(run):
        run.progress.validation_pending, run.progress.before_validation = False, {}
        return
    with contextlib.suppress(ValidationAbandoned):
        results = run.progress.newest_validation = evaluate(run, VALIDATION, can_be_cut=True)
        run.progress.validated_at = (run.state.epoch, run.state.batches_seen)
        run.progress.validation_pending, run.progress.before_validation = False, {}
        run.progress.validation_requested = False
        run.traits.rules.end_validation(run)
        if run.participants.control is not None:
            run.participants.control.report_validated(results)
    if run.progress.validation_pending:
        run.boundary.sync_point()  # one rank has received a signal
        # every rank has abandoned the validation, and must handle the signal before it trains on
        run.boundary.sync_point()


def validate_on_request(run: Run) -> None:
    """Validate because a command requests it, unless it was just done. The training stays as without it.

    Random streams are restored, and validations that are due follow as planned. If a signal abandons it, the
    resumed run does not repeat it.
    """
    own, control = run.progress, run.participants.control
    own.validation_requested = False
    before, now = own.validated_at, (run.state.epoch, run.state.batches_seen)
    if before == now and control is not None and control.repeat_validated():
        return
    try:
        with isolated_rng():
            validate(run)
        if own.validated_at != now and not own.validation_pending and control is not None:
            control.report_validated(None)
    finally:
        own.validated_at, own.validation_pending = before, False
        own.mark_changed()
    run.boundary.sync_point()  # monitors may have requested a checkpoint or a stop


def is_finished_after_validation(run: Run) -> bool:
    """Run the validation that was abandoned before a resume, or that a command requested before the first
    batch; return whether the run is finished then.
    """
    if run.progress.validation_pending:
        validate(run)
    else:
        validate_on_request(run)
    advance_plateau(run)
    run.boundary.sync_point()
    save_due(run)
    return is_finished(run)
