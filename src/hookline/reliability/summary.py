"""What a run leaves behind besides its metrics: skips, what hooks cost, and the last words of one that
failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.engine.cost import cost_table
from hookline.engine.slots import failure_source
from hookline.reliability.loader_advice import check_waiting
from hookline.reliability.model_location import model_line_after_failure, show_model
from hookline.run.commands import handles_command
from hookline.run.record import read_record
from hookline.run.run import Run
from hookline.run.state import progress
from hookline.util.errors import Preempted
from hookline.util.text import redact
from hookline.util.urls import is_url, shown

MESSAGE = 500
"""Characters of an error's message in the log and in the last words."""
WHY = {
    "no_loss": "training_step returned no loss",
    "nonfinite": "loss or gradients were not finite",
    "hook": "a hook said so",
}
PRUNED = "TrialPruned"
"""The exception by which a search for hyper-parameters (Optuna) ends a run that is not promising: nothing has
failed.
"""
_WORDS = "__hookline_end_summary__"
log = logging.getLogger("hookline")


def warn_idle_epoch(run: Run) -> None:
    """An epoch that has changed nothing must not look like any other."""
    s = run.state
    step, skips, batches = run.progress.epoch_began
    if s.step > step:
        return
    if run.traits.skips_nonfinite and not run.traits.is_manual:
        run.watch.check_now()  # weights that are not finite stay so
    if s.rank or s.batches_seen == batches:
        return
    left_out = run.progress.skips - skips
    if left_out:
        why, by = WHY[run.progress.last_skip[0]], run.window.by
        if run.progress.last_skip[0] == "no_loss" and by != "batches":
            why += f", or its batches had no {by} to count (accumulate_by={by!r})"
        log.warning(
            "No update was made in epoch %d: %d were left out, the last because %s.", s.epoch, left_out, why
        )
    elif run.traits.is_manual and s.optimizers:
        log.warning(
            "No update was made in epoch %d: its optimization is manual, and training_step of %s has never "
            "called step() on what self.optimizers() returns.",
            s.epoch,
            type(run.module).__name__,
        )


def disable_on_all_ranks(run: Run, name: str) -> None:
    """A hook fails on one rank, or some find it too dear: it is switched off on all of them
    at one boundary.
    """
    run.participants.commands.send("dismiss", hook=name)


@handles_command("dismiss")
def _dismiss(run: Any, sender: int, hook: str) -> None:
    hooks = run.state.hooks
    if hook in hooks:
        if hooks.entry(hook).enabled:
            log.warning("hook %r is switched off, because rank %d has switched it off", hook, sender)
        hooks.disable(hook)


def log_ending(run: Run) -> None:
    """The log's last records: what failed, if something did, what the hooks have cost, and how it ended."""
    s = run.state
    s.hooks.stopwatch.stop()
    if s.timer is not None:
        check_waiting(run, s.timer)
        s.timer.stop()
    run.participants.costs = s.hooks.cost()
    if s.exception is not None and (isinstance(s.exception, Exception) or _is_exit(s.exception)):
        s.logger.log_event("failure", _failure(run, s.exception))
    if run.stage != "fit":
        return
    if run.participants.costs:
        s.logger.log_event(
            "cost",
            {
                "step": s.step,
                "seconds": s.hooks.stopwatch.seconds,
                "rows": [row.data() for row in run.participants.costs],
            },
        )
    if s.timings is not None and s.timings.batches:
        s.logger.log_event("timings", {"step": s.step, **s.timings.record()})
    ended = {
        "step": s.step,
        "epoch": s.epoch,
        "epochs": s.epochs_seen,
        "status": s.status,
        "reason": s.stop_reason,
    }
    s.logger.log_event("end", _as_it_was(run) or ended)


def _as_it_was(run: Run) -> dict[str, Any]:
    """How a run had ended that could not be taken up again; nothing, if it had not ended, or was taken up."""
    known = run.directory.existing()
    record = read_record(known) if known is not None and run.resume.was_refused else {}
    if record.get("id") != run.identity.id or record["status"] == "training":
        return {}
    return {
        "step": record["step"],
        "epoch": run.state.epoch,
        "status": record["status"],
        "reason": record["reason"],
    }


def _failure(run: Run, error: BaseException) -> dict[str, Any]:
    s, source = run.state, failure_source(error)
    if (other := _other_rank(run)) is not None:
        kind, _, message = (
            (type(error).__name__, "", other.text) if other.died else other.text.partition(": ")
        )
        return {"step": s.step, "epoch": s.epoch, "rank": other.rank, "exception": kind, "message": message}
    who = {} if source is None else {"who": source.name, "event": source.event}
    return {
        "step": s.step,
        "epoch": s.epoch,
        "rank": s.rank,
        "exception": type(error).__name__,
        "message": _short(error),
        **who,
    }


def _other_rank(run: Run) -> Any:
    """The failure of the rank that has failed first, if it is another one: what this rank raises is only the
    echo.
    """
    failure = run.failure_monitor.failure if run.failure_monitor is not None else None
    return failure if failure is not None and failure.rank != run.state.rank else None


class Recorded:
    """For `with`, around a run: its trace; and when it is over the table of costs, and the last words if it
    failed.
    """

    def __init__(self, run: Run, tracing: Any) -> None:
        self._run = run
        self._tracing = tracing.during(run)

    def __enter__(self) -> None:
        self._tracing.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._tracing.__exit__(kind, error, trace)
        show_costs(self._run)
        if error is None:
            show_unfinished(self._run)
            show_model(self._run)
        if error is not None and self._run.stage == "fit" and self._run.participants.setup_began:
            words = EndSummary.of(self._run, error)
            if isinstance(error, KeyboardInterrupt) and self._run.signals.number and not _is_at_once(error):
                error._render_traceback_ = words.note().splitlines  # type: ignore[attr-defined]  # what IPython shows instead
            with contextlib.suppress(AttributeError):  # an exception with slots
                setattr(error, _WORDS, words)
            error.add_note(words.note())
            if _is_exit(error):
                print(words.note(), file=sys.stderr, flush=True)  # of this one Python shows nothing


def show_unfinished(run: Run) -> None:
    """Say that a signal has ended the run before its end, and how to resume: for this exit Python shows
    nothing.
    """
    if (
        run.stage == "fit"
        and run.state.status == "preempted"
        and not run.state.rank
        and run.trainer.shows_model
    ):
        words = EndSummary.of(run, None)
        print(
            dataclasses.replace(words, model="").note(), file=sys.stderr, flush=True
        )  # it is the line after this


def show_costs(run: Run) -> None:
    """Where the progress bar was: a short table, if there are other hooks than the bar itself, and where the
    time went.
    """
    s, watch = run.state, run.state.hooks.stopwatch
    if not run.options.enable_progress_bar or run.stage != "fit" or s.rank:
        return
    if s.exception is None and s.timings is not None and not s.timings.batches:
        return  # nothing was trained: shares of set-up and tear-down say nothing
    if any(row.hook != "progress_bar" for row in run.participants.costs):
        print(
            cost_table(run.participants.costs, watch.seconds, watch.counted_twice),
            file=sys.stderr,
            flush=True,
        )
    if s.timings is not None and s.timings.batches:
        print(f"Time: {s.timings}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class EndSummary:
    """What is said last about a run that failed."""

    failed: str
    saved: str
    """The newest checkpoint that can be resumed from; empty if there is none."""
    step: int
    trained: bool
    refused: bool
    """Whether the run was to go on from it, and could not."""
    model: str = ""
    """Where the model is and how to load it."""

    @classmethod
    def of(cls, run: Run, error: BaseException | None) -> EndSummary:
        """Gathered when the run is over. error: None for a signal that has ended it in good order."""
        s = run.state
        batches = run.progress.position if s.epoch == s.epochs_seen else 0
        at = progress(s.step, s.epochs_seen, batches)
        if error is None:
            failed = f"Unfinished: {signal.Signals(run.signals.number).name} has ended the run at {at}."
        else:
            failed = f"Interrupted at {at}." if isinstance(error, KeyboardInterrupt) else _failed(run, error)
        if (other := _other_rank(run)) is not None:
            failed = (
                f"Failed: rank {other.rank}: {other.text} Rank {s.rank} could not go on without it, at "
                f"{s.position}."
            )
        path, step = (
            (run.saves.newest.path, run.saves.newest.step)
            if run.saves.newest is not None
            else (run.resume.path, 0)
        )
        exists = path is not None and (is_url(path) or Path(path).exists())
        return cls(
            redact(failed),
            shown(path) if exists else "",
            step,
            s.step > 0,
            run.saves.newest is None and run.resume.was_refused,
            model_line_after_failure(run) if exists else "",
        )

    def note(self, command: str = "") -> str:
        """In lines; `command`: what to type, instead of what to write in a program."""
        if not self.saved:
            return "\n".join(
                [
                    self.failed,
                    *(["Nothing was saved, so there is nothing to resume from."] if self.trained else []),
                ]
            )
        if self.refused:  # the same once more would end the same
            return "\n".join([self.failed, f"Nothing was trained, and {self.saved} is as it was."])
        at = f", at step {self.step}" if self.step else ", which this run began with"
        how = command or f"trainer.fit(module, ..., resume={self.saved!r})"
        return "\n".join(
            [
                self.failed,
                f"Saved: {self.saved}{at}.",
                f"To resume: {how}",
                *([self.model] if self.model else []),
            ]
        )


def _failed(run: Run, error: BaseException) -> str:
    source, text = failure_source(error), _short(error)
    who = f"in {source.name}, {source.event}, " if source is not None else "at "
    word, kind = "Pruned" if type(error).__name__ == PRUNED else "Failed", type(error).__name__
    return f"{word}: {kind}{': ' if text else ''}{text}, {who}{run.state.position}, rank {run.state.rank}."


def _is_exit(error: BaseException) -> bool:
    """Whether somebody has called `sys.exit` in the middle of the run."""
    return isinstance(error, SystemExit) and not isinstance(error, Preempted)


def _is_at_once(error: BaseException) -> bool:
    """Whether a second Ctrl-C has broken off what was going on: then its traceback says where that was."""
    return getattr(error, "__hookline_at_once__", False)


def end_summary(error: BaseException) -> EndSummary | None:
    """Those of a run that has failed with this error."""
    return getattr(error, _WORDS, None)


def _short(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # the error of the run must not be lost for that
        return f"(its text cannot be told: {type(broken).__name__})"
    text = redact(text)
    return text if len(text) <= MESSAGE else f"{text[:MESSAGE]}…"
