"""Training: epochs of batches, validation when due, save points. Read it to know the lifecycle."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

from hookline.data.loaders import Loader
from hookline.data.seeding import isolated_rng, rng_state, set_rng_state
from hookline.data.sources import resume_limits
from hookline.reliability.summary import note_idle_epoch
from hookline.run.record import restore_ending, update_record
from hookline.run.run import Run, ending, phase
from hookline.run.state import OPENING
from hookline.run.timer import timed
from hookline.training import run_events
from hookline.training.composition import choose_step
from hookline.training.data_pass import Fetcher, GivenUp
from hookline.training.evaluate import evaluate
from hookline.training.final_checkpoint import keeping_last, noticing_changes, save_final_state
from hookline.training.first_batches import after_resume
from hookline.training.loading import load
from hookline.training.participants import teardown_removed
from hookline.training.pass_events import VALIDATION, SanityCheck
from hookline.training.preflight import batches_between, check_before_training
from hookline.training.restore import restoring
from hookline.training.resume import START_OVER
from hookline.training.run_events import end_as, end_training, start_epoch, start_training
from hookline.training.saving import finish_saving, save_due, what_validation_may_change
from hookline.training.schedulers import advance_epoch, advance_on_metric
from hookline.util.errors import END_EPOCH, OptionError, StopTraining
from hookline.util.urls import is_url, shown

log = logging.getLogger("hookline")


def fit(run: Run) -> None:
    """Sanity check, then epochs until the run is finished or told to stop."""
    s = run.state
    s.hooks.begin_training()
    s.timer.begin()
    if not run.progress.position:  # in the middle of an epoch the run has been checked long ago
        sanity_check(run)
    load(run, "train")
    loader = run.data.train
    for each in itertools.chain(*map(resume_limits, run.data.loaders["train"])):
        log.warning(each)
    load(run, "val")
    run.boundary.sync_point()
    if run.signals.number:
        run.saves.is_final = True  # nothing was trained, so there is nothing to save
    if is_finished(run):
        if not run.signals.number:
            log.warning(
                "Nothing to train: %s", why_finished(run) + ("" if run.resume.finished else how_to_train(run))
            )
        if run.resume.finished:
            restore_ending(run)
        return
    if not run.module.training:
        log.warning(
            "%s is in eval mode: dropout and batch norm will not train. Call .train() on it, or on the "
            "parts that should, before fit.",
            type(run.module).__name__,
        )
    check_before_training(run, epoch_length(run))  # before the loggers mark an earlier log as superseded
    if run.resume.path is not None:
        where = (
            shown(run.resume.path) if is_url(run.resume.path) else run.resume.path
        )  # loggers write it down
        s.logger.resume(run.resume.contents.pop("loggers", None), s.step, s.epoch, where)
    else:
        s.logger.begin_afresh()
    if run.identity.record is not None:
        run.identity.record.describe(run)
    with keeping_last(run):
        start_training(run)
        run.boundary.sync_point()
        if run.saves.requests:
            save_due(run)
        while not is_finished(run):
            train_epoch(run, loader)
    run.watch.settle()
    if run.signals.number:
        save_due(run)  # it may have come between two epochs
    end_as(run, ending(run))
    save_final_state(run)
    with noticing_changes(run):
        end_training(run)
    run.rows.write_pending()
    run.rows.reduce({}, "end")
    run.boundary.sync_point()
    save_due(run)
    finish_saving(run)


def train_epoch(run: Run, loader: Any) -> None:
    """One epoch, from wherever a resumed run stands in it."""
    s, options = run.state, run.options
    before = begin_epoch(run)
    start_epoch(run, run.progress.position, loader.name)
    run.boundary.sync_point()

    s.log.mode = "train"
    exhausted = False
    is_leaving = run.boundary.is_stopping and is_finished(run)  # asked for when the epoch began
    if (
        is_leaving and before is not None
    ):  # after a resume the epoch begins again, and draws again what it has drawn
        run.resume.contents["rng"] = before
    batches = iter(()) if is_leaving else open_loader(run, loader)
    validate_every = validation_interval(run)
    run.step = choose_step(run)
    if run.progress.validation_pending and not is_leaving and is_finished_by_owed_validation(run):
        is_leaving, batches = True, iter(())
    fetcher = Fetcher(run, batches, run.progress.position, s.timer)
    while fetcher.fetch():
        if run.saves.first_batches is not None:
            run.saves.first_batches.fetched()
        batches_left = None if loader.length is None else loader.length - s.batch_idx
        try:
            if run.step(batches_left) is END_EPOCH:
                exhausted = True
                break
        except (
            StopTraining
        ) as stop:  # from a step of the module; hooks' own are handled where they are called
            s.request_stop(stop.reason)
        run.progress.position = (
            s.batch_idx + 1
        )  # for batches that were skipped; the others have said so themselves
        if run.participants.leaving:
            teardown_removed(run)
        if validate_every and run.progress.position % validate_every == 0:
            validate(run)
        run.boundary.poll()
        if run.saves.requests:
            save_due(run)
        if (s.should_stop or s.step == options.max_steps or options.max_time is not None) and is_finished(
            run
        ):
            break
    else:
        exhausted = not is_leaving
        refuse_short(run, loader, exhausted)
    fetcher.close()
    close_epoch(run, exhausted or run.progress.position == loader.length)


def close_epoch(run: Run, complete: bool) -> None:
    """After the last batch: update on a window that is still open, validate if that is due, end the epoch."""
    run.boundary.sync_point()
    if complete and not run.signals.number:
        assert run.step is not None
        run.step.close_window()  # a last window that came out short
        advance_epoch(run)
    run.state.log.mode = "now"
    if not run.signals.number and validation_closes_epoch(run, complete):
        validate(run)
        run.boundary.sync_point()
    if (
        run.signals.number
    ):  # whoever hears of this epoch's end hears of it again after the resume, so it is saved before
        save_due(run)
        complete = False
    end_epoch(run, complete)


def begin_epoch(run: Run) -> Any:
    """Note where the epoch begins. Return the random streams as they are now, if that is its first batch."""
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
    """The epoch's batches; in a resumed epoch those that are left, in the order that the epoch began with."""
    saved, streams = run.resume.contents.pop("loader", None), run.resume.contents.pop("rng", None)
    if saved is None:
        batches = loader.open(run.state.epoch, run.progress.position, run.options.seed)
    else:
        with restoring(run.resume.path, "the position of the training data"):
            loader.load_state_dict(saved)
            after_resume(run)
            batches = loader.open(run.state.epoch, run.progress.position, run.options.seed)
    if streams is not None:  # whatever was drawn while the run was set up, and for a seed
        set_rng_state(streams)
    return batches


def end_epoch(run: Run, complete: bool) -> None:
    """Reduce the epoch's metrics, emit its end, write them; then the second save point."""
    s = run.state
    results = run.rows.finish("train", {}, s.log.pending)
    if run.data.is_mixture:
        counted = run.data.train.metrics()
        s.log.newest.raw().update(counted)
        results |= counted
        s.log.loader = ""
    if complete:
        note_idle_epoch(run)
    pending = run_events.end_epoch(run, results, complete)
    run.rows.write({**results, **run.rows.reduce(pending, "epoch")}, "epoch")
    if complete:
        advance_on_metric(run)
        run.progress.position = 0
    update_record(run)
    run.boundary.sync_point()
    if run.saves.requests:
        save_due(run)


def close_failed_epoch(run: Run) -> None:
    """An epoch that failed in its last events, before it is saved: it is complete, so a resume begins the
    next one.
    """
    if run.state.epochs_seen > run.state.epoch:
        run.progress.position = 0


# ---- when to stop ------------------------------------------------------------------------------------------


def is_finished(run: Run) -> bool:
    """Whether the limits are reached, or a request to stop may be honoured."""
    return why_finished(run) != ""


def why_finished(run: Run) -> str:
    """The reason, or an empty string."""
    s, options = run.state, run.options
    assert options.max_epochs is not None
    if run.signals.number or run.resume.finished:
        return run.resume.finished or s.stop_reason
    if 0 <= options.max_epochs <= s.epochs_seen:
        return f"max_epochs={options.max_epochs} is reached"
    if 0 <= options.max_steps <= s.step:
        return f"max_steps={options.max_steps} is reached"
    if run.data.train.length == 0:
        return "limit_train_batches=0"
    if run.out_of_time and not run.boundary.is_stopping:
        s.request_stop(f"max_time={options.max_time:g} s is over")
        run.boundary.stop_by_clock()
    return (
        s.stop_reason or "a stop was asked for"
        if run.boundary.is_stopping and s.epochs_seen >= options.min_epochs
        else ""
    )


def how_to_train(run: Run) -> str:
    """Return what to do about a resumed run that has nothing left to train."""
    return "" if run.resume.path is None else f". {START_OVER}"


def refuse_short(run: Run, loader: Loader, exhausted: bool) -> None:
    """A loader that yields nothing would make an endless loop; one that ends too soon hides an error of its
    dataset.
    """
    if exhausted and run.progress.position == 0:
        hint = (
            "; a generator can be iterated over only once, pass a list or a DataLoader"
            if run.state.epoch
            else ""
        )
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
    """A few validation batches before any training, so that a broken validation is not found out after an
    hour.
    """
    steps = run.options.num_sanity_val_steps
    if steps == 0 or run.options.limit_val_batches == 0 or not load(run, "val"):
        return
    check = SanityCheck(run)
    with isolated_rng(), contextlib.suppress(GivenUp):
        check.start()
        evaluate(run, VALIDATION, limit=None if steps < 0 else steps, can_be_cut=True)
        check.end()
    check.forget()


@timed("validation")
def validate(run: Run) -> None:
    """Validation in the course of training. A signal cuts it short; then it is owed to the
    run that resumes.
    """
    run.progress.validation_pending = True
    if run.signals.number:
        return
    run.progress.before_validation = what_validation_may_change(run)
    with contextlib.suppress(GivenUp):
        evaluate(run, VALIDATION, can_be_cut=True)
        run.progress.validated_at = (run.state.epoch, run.state.batches_seen)
        run.progress.validation_pending, run.progress.before_validation = False, {}
    if run.progress.validation_pending:
        run.boundary.sync_point()  # a signal that one rank has heard
    if run.progress.validation_pending:
        # every rank has given it up, and hears of the signal before anything else is trained
        run.boundary.sync_point()


def is_finished_by_owed_validation(run: Run) -> bool:
    """Run the validation that was cut short before a resume; whether the run is finished after it."""
    validate(run)
    run.boundary.sync_point()
    save_due(run)
    return is_finished(run)


def validation_interval(run: Run) -> int:
    """Batches between validations in this epoch; 0 if none is due in it, or only at its end."""
    if not run.data.loaders["val"] or (run.state.epoch + 1) % run.options.check_val_every_n_epoch:
        return 0
    return batches_between(run.options, epoch_length(run))


def epoch_length(run: Run) -> int | None:
    """Batches of a training epoch; None if the loader cannot tell."""
    length: int | None = run.data.train.began_with if run.data.is_mixture else run.data.train.length
    return length


def validation_closes_epoch(run: Run, complete: bool) -> bool:
    """At an epoch's end: once-per-epoch validation that has not run yet, or a last look
    before an early stop.
    """
    s, options = run.state, run.options
    is_validated = run.progress.validated_at == (s.epoch, s.batches_seen)
    if not run.data.loaders["val"] or is_validated or (s.epoch + 1) % options.check_val_every_n_epoch:
        return False
    return (complete and options.val_check_interval == 1.0) or (not complete and run.boundary.is_stopping)
