"""The summary of a run: skipped updates, the cost of hooks, and the note on how it ended or failed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.engine.changes import change_table
from hookline.engine.slots import failure_source
from hookline.reliability.loader_advice import check_waiting
from hookline.reliability.model_location import model_line_after_failure, show_model
from hookline.run.commands import handles_command
from hookline.run.module import PlainSteps, name_of_step
from hookline.run.record import is_refused, leaves_directory
from hookline.run.run import Run
from hookline.run.state import progress
from hookline.util.errors import Preempted
from hookline.util.short_traceback import shorten_in_notebook
from hookline.util.terminal import in_notebook, notice_file
from hookline.util.text import error_text, list_some, redact
from hookline.util.urls import is_url, shown

MESSAGE = 500
"""Characters of an error message in the log and in the summary."""
WHY = {
    "no_loss": "training_step returned no loss",
    "nonfinite": "loss or gradients were not finite",
    "hook": "a hook skipped it",
}
PRUNED = "TrialPruned"
"""The exception with which Optuna ends a trial that is not promising. It is not a failure."""
_SUMMARY = "__hookline_end_summary__"
log = logging.getLogger("hookline")


def warn_idle_epoch(run: Run) -> None:
    """Warn about an epoch without an update, and say why."""
    s = run.state
    step, skips, batches = run.progress.epoch_began
    if s.step > step:
        return
    if not run.traits.is_manual:
        run.watch.check_now()  # weights that are not finite stay so, if such updates are skipped
    if s.rank or s.batches_seen == batches:
        return
    left_out = run.progress.skips - skips
    if left_out:
        why, by = WHY[run.progress.last_skip[0]], run.window.by
        why = why.replace("training_step", name_of_step(run.steps))
        if run.progress.last_skip[0] == "no_loss" and by != "batches":
            why += f", or its batches had no {by} to count (accumulate_by={by!r})"
        log.warning(
            "No update was made in epoch %d: %d were skipped, the last because %s.", s.epoch, left_out, why
        )
    elif run.traits.is_manual and s.optimizers:
        log.warning(
            "No update was made in epoch %d: optimization is manual, and training_step of %s never called "
            "step() of an optimizer that self.optimizers() returns.",
            s.epoch,
            type(run.module).__name__,
        )


def disable_on_all_ranks(run: Run, name: str) -> None:
    """Disable a hook on all ranks at one boundary, after it failed or exceeded its budget on this rank."""
    run.participants.commands.send("dismiss", hook=name)


@handles_command("dismiss")
def _dismiss(run: Any, sender: int, hook: str) -> None:
    hooks = run.state.hooks
    if hook in hooks:
        if hooks.entry(hook).enabled:
            log.warning("hook %r is switched off, because rank %d switched it off", hook, sender)
        hooks.disable(hook)


def log_ending(run: Run) -> None:
    """Log the last records: the failure if there is one, the cost of the hooks, and how the run ended."""
    s = run.state
    s.hooks.stopwatch.stop()
    if s.timer is not None:
        check_waiting(run, s.timer, is_last=True)
        s.timer.stop()
    run.participants.costs = s.hooks.cost()
    if leaves_directory(run) or is_refused(run):
        return
    if s.exception is not None and (isinstance(s.exception, Exception) or _is_exit(s.exception)):
        s.logger.log_event("failure", _failure(run, s.exception))
    if run.stage != "fit":
        return
    # a session that trained nothing must not replace the records of the one before
    trained = s.timings is not None and s.timings.batches > 0
    if trained and run.participants.costs:
        s.logger.log_event(
            "cost",
            {
                "step": s.step,
                "seconds": s.hooks.stopwatch.seconds,
                "rows": [row.data() for row in run.participants.costs],
            },
        )
    if trained and s.hooks.recorded_changes is not None:
        rows = [row.data() for row in s.hooks.changes()]
        s.logger.log_event("changes", {"step": s.step, "rows": rows})
    if s.timings is not None and trained:
        s.logger.log_event("timings", {"step": s.step, **s.timings.record()})
    ended = {
        "step": s.step,
        "epoch": s.epoch,
        "epochs": s.epochs_seen,
        "status": s.status,
        "reason": s.stop_reason,
    }
    s.logger.log_event("end", ended)


def _failure(run: Run, error: BaseException) -> dict[str, Any]:
    s, source = run.state, failure_source(error)
    if (other := _other_rank(run)) is not None:
        # a rank that died raised nothing
        kind, _, message = ("", "", other.text) if other.died else other.text.partition(": ")
        return {"step": s.step, "epoch": s.epoch, "rank": other.rank, "exception": kind, "message": message}
    who = {} if source is None else {"who": source.name, "event": source.event}
    kind, text = _short_text(error)
    return {"step": s.step, "epoch": s.epoch, "rank": s.rank, "exception": kind, "message": text, **who}


def _other_rank(run: Run) -> Any:
    """Return the failure of another rank if that rank failed first; this rank's error is its result."""
    failure = run.failure_monitor.failure if run.failure_monitor is not None else None
    return failure if failure is not None and failure.rank != run.state.rank else None


class Recorded:
    """A `with` around a run: traces, audits and digests it, then shows the table of costs, and a summary if
    the run failed.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        trainer = run.trainer
        self._recorders = [
            each.during(run) for each in (trainer.tracing, trainer.auditing, trainer.digesting)
        ]

    def __enter__(self) -> None:
        show_reuse(self._run)
        for each in self._recorders:
            each.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for each in reversed(self._recorders):
            each.__exit__(kind, error, trace)
        show_costs(self._run)
        if error is None:
            show_unfinished(self._run)
            show_stop(self._run)
            warn_of_nan(self._run)
            show_model(self._run)
        else:
            shorten_in_notebook(error)
        if error is None or self._run.stage != "fit" or not self._run.participants.setup_began:
            return
        is_inside = (
            self._run.state.current.interrupted_batch is not None or self._run.failure_monitor is not None
        )
        if is_refused(self._run, error) and not is_inside:  # a position says nothing more
            if words := words_about_earlier(self._run):
                error.add_note(words)
        else:
            summary = EndSummary.of(self._run, error)
            # after a second Ctrl-C, which ended the run at once, the traceback is of interest
            is_at_once = getattr(error, "__hookline_at_once__", False)
            if isinstance(error, KeyboardInterrupt) and self._run.signals.number and not is_at_once:
                error._render_traceback_ = summary.note().splitlines  # type: ignore[attr-defined]  # IPython shows it
                error.__traceback__ = None  # it ended in good order: frames below `fit` say nothing
            with contextlib.suppress(AttributeError):  # an exception with slots
                setattr(error, _SUMMARY, summary)
            error.add_note(summary.note())
            if _is_exit(error):
                print(summary.note(), file=sys.stderr, flush=True)  # Python shows nothing for SystemExit


def show_reuse(run: Run) -> None:
    """Report once that a call without `loss` and `step` uses those of the last run of the same module."""
    steps = run.steps
    if not isinstance(steps, PlainSteps) or not steps.is_reused or run.stage == "predict":
        return
    steps.is_reused, function = None, steps.given_functions["training_step"]
    if function is None:  # the model computes its loss itself
        return
    argument = "loss" if steps.arguments()["step"] is None else "step"
    name = getattr(function, "__name__", type(function).__name__)
    show_notice(run, f"{run.stage}() uses {argument}={name}, as the last run of this module did.")


def show_notice(run: Run, line: str) -> None:
    """Print a line on rank zero; without a progress bar, log it at level INFO."""
    if not run.state.rank and run.options.enable_progress_bar:
        print(line, file=notice_file(), flush=True)
    elif not run.state.rank:
        log.info("%s", line)


def show_unfinished(run: Run) -> None:
    """Print that a signal ended the run early, and how to resume: Python shows nothing for this exit."""
    if (
        run.stage == "fit"
        and run.state.status == "preempted"
        and not run.state.rank
        and run.trainer.shows_model
    ):
        summary = EndSummary.of(run, None)
        # show_model prints the line about the model next
        print(dataclasses.replace(summary, model="").note(), file=sys.stderr, flush=True)


def show_stop(run: Run) -> None:
    """Print why a fit ended before its limits; without a progress bar, log it at level INFO."""
    s = run.state
    if run.stage == "fit" and s.status == "stopped" and s.stop_reason:
        show_notice(run, f"Stopped in epoch {s.epoch}, at step {s.step}: {redact(s.stop_reason)}")


def warn_of_nan(run: Run) -> None:
    """Warn if the last validation of a fit had a metric that is NaN: a completed run looks like a success."""
    found = run.progress.newest_validation
    if run.stage != "fit" or run.state.rank or found is None or run.strategy.device.type == "meta":
        return  # meta tensors have no values
    names = [name for name, value in found.read().items() if value != value]  # only NaN differs from itself
    if names:
        log.warning("NaN in the last validation: %s. The model may be of no use.", list_some(names))


def show_costs(run: Run) -> None:
    """Print the cost of the hooks, if there are others than the progress bar, and where the time went.

    In a notebook the cost and the times are folded below one line.
    """
    s = run.state
    if not run.options.enable_progress_bar or run.stage != "fit" or s.rank:
        return
    if s.timings is None or not s.timings.batches:
        return  # nothing was trained, so shares of the time mean nothing
    costs, file = run.participants.costs, notice_file()
    times = f"Time: {s.timings}"
    if any(row.hook != "progress_bar" for row in costs):
        text = costs.table()
        if in_notebook():
            from hookline.util.notebook import escape, show_folded

            content = f"{costs.html()}<div>{escape(times)}</div>"
            show_folded(costs.headline(), content, "\n".join(filter(None, (text, times))))
            times = ""
        else:
            print(text, file=file, flush=True)
    if s.hooks.recorded_changes is not None:
        print(change_table(s.hooks.changes()), file=file, flush=True)
    if times:
        print(times, file=file, flush=True)


@dataclass(frozen=True, slots=True)
class EndSummary:
    """The summary of a run that failed or was interrupted."""

    failed: str
    saved: str
    """The newest checkpoint that can be resumed from; empty if there is none."""
    step: int
    trained: bool
    refused: bool
    """Whether the run failed to resume from it."""
    model: str = ""
    """Where the model is and how to load it."""
    is_found: bool = False
    """Whether the same program resumes from it, because of resume='auto' and a run_dir."""
    flaw: str = ""
    """The buffers in it that are not finite."""
    is_requeued: bool = False
    """Whether the job's scheduler starts the same program again."""

    @classmethod
    def of(cls, run: Run, error: BaseException | None) -> EndSummary:
        """Make the summary when the run is over. error: None if a signal ended the run and it was saved."""
        s = run.state
        batches = run.progress.position if s.epoch == s.epochs_seen else 0
        at = progress(s.step, s.epochs_seen, batches)
        if error is None:
            failed = f"Unfinished: {signal.Signals(run.signals.number).name} ended the run at {at}."
        elif isinstance(error, KeyboardInterrupt):
            failed = f"Interrupted at {at}."
        else:
            failed = _describe_failure(run, error)
        if about_earlier := words_about_earlier(run):
            failed += f" {about_earlier}"
        if (other := _other_rank(run)) is not None:
            failed = f"Failed with rank {other.rank}, at {s.position}."  # the error itself says why
        path, step = (
            (run.saves.newest.path, run.saves.newest.step)
            if run.saves.newest is not None
            else (run.resume.path, 0)
        )
        exists = path is not None and (is_url(path) or Path(path).exists())
        if not exists and not s.step and not isinstance(error, Exception):  # a signal ended the run
            failed += " Nothing was trained, so nothing was saved."
        return cls(
            redact(failed),
            shown(path) if exists else "",
            step,
            s.step > 0,
            run.saves.newest is None and run.resume.was_refused,
            model_line_after_failure(run) if exists else "",
            run.resume.is_auto and Path(str(path)).is_relative_to(str(run.options.run_dir)),
            list_some(run.watch.buffers.broken) if run.watch.buffers is not None else "",
            any(getattr(each.hook, "has_requeued", False) for each in run.state.hooks.entries()),
        )

    def note(self, command: str = "") -> str:
        """Return the summary as lines. command: the shell command that resumes, instead of Python code."""
        if not self.saved:
            return "\n".join(
                [
                    self.failed,
                    *(["Nothing was saved, so there is nothing to resume from."] if self.trained else []),
                ]
            )
        if self.refused:  # the same resume would fail again
            return "\n".join([self.failed, f"Nothing was trained, and {self.saved} is unchanged."])
        at = f", at step {self.step}" if self.step else ", which this run began with"
        flaw = f" Buffers in it are not finite: {self.flaw}." if self.flaw else ""
        what = "run the cell" if in_notebook() else "run the same command"
        again = f"{what} again, because resume='auto' finds this checkpoint"
        how = command or (again if self.is_found else f"trainer.fit(module, ..., resume={self.saved!r})")
        if self.is_found and self.is_requeued:
            how = "the job is in SLURM's queue again, and resume='auto' finds this checkpoint"
        return "\n".join(
            [
                self.failed,
                f"Saved: {self.saved}{at}.{flaw}",
                f"To resume: {how}",
                *([self.model] if self.model else []),
            ]
        )


def words_about_earlier(run: Run) -> str:
    """Return that the directory still belongs to an earlier run, if it does."""
    if run.identity.record is None or not (earlier := run.identity.record.earlier):
        return ""
    return (
        f"{run.directory.intended()} still belongs to the earlier run ({earlier['status']} at step "
        f"{earlier['step']})."
    )


def _describe_failure(run: Run, error: BaseException) -> str:
    source, (kind, text) = failure_source(error), _short_text(error, lines=1)
    who = f"in {source.name}, {source.event}, " if source is not None else "at "
    word = "Pruned" if kind == PRUNED else "Failed"
    where = "the start" if run.resume.was_refused and source is None else run.state.position
    # the whole text is shown with the error itself; an ellipsis ends no sentence, and neither does "no. 7"
    first = re.split(r"(?<!\.)\. (?!\d)", text)[0].rstrip(".:")
    return f"{word}: {kind}{': ' if first else ''}{first}, {who}{where}, rank {run.state.rank}."


def _is_exit(error: BaseException) -> bool:
    """Return whether the program called `sys.exit` during the run."""
    return isinstance(error, SystemExit) and not isinstance(error, Preempted)


def end_summary(error: BaseException) -> EndSummary | None:
    """Return the summary of the run that failed with this error, if there is one."""
    return getattr(error, _SUMMARY, None)


def _short_text(error: BaseException, lines: int | None = None) -> tuple[str, str]:
    """Return the type of an error, and its message, or the first lines of it, on one line."""
    kind, text = error_text(error)
    text = redact(" ".join(" ".join(text.strip().splitlines()[:lines]).split()))
    return kind, text if len(text) <= MESSAGE else f"{text[:MESSAGE]}…"
