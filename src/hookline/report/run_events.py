"""The events of a run besides its metrics: checkpoints, hangs, failures, non-finite values, and its end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hookline.control.client import is_answered
from hookline.reliability.summary import PRUNED
from hookline.report.charts import layer_of
from hookline.report.reader import LOG, RecordedRun, RunEvent, failure_kind
from hookline.report.trace_columns import LAST_STEP, LINE_BYTES
from hookline.run.state import progress

SILENT = 600.0
"""Seconds without a record after which a run that trains by its record counts as silent."""
HANG = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
SERIOUS = ("exception", "failure", "failed", "error", "hang", "not finite", "damaged")
NOTABLE = (
    "skip",
    "skipped",
    "step_skipped",
    "spike",
    "exclusion",
    "rollback",
    "stop",
    "stopped",
    "interrupted",
    "preempted",
    "pruned",
    "warning",
)


def level(kind: str) -> str:
    """Return how an event is drawn."""
    return "bad" if kind in SERIOUS else "warn" if kind in NOTABLE else "info"


def all_events(run: RecordedRun) -> list[RunEvent]:
    """Return all events in order of time; an event without a time comes where its step is."""
    found = [
        *run.events,
        *_checkpoint_events(run),
        *_hangs(run),
        *_of_json_log(run),
        *_not_finite(run),
        *_ending(run),
    ]
    began, _ = time_spent(run)
    if began is not None:
        found.append(RunEvent("start", "the first record", began))
    last = run.times.ended or 0.0
    return sorted(found, key=lambda each: (each.time if each.time is not None else last, each.step or 0))


def missing_log(run: RecordedRun) -> str:
    """Return why a run has no log.jsonl, and how to keep one; empty if it has one."""
    names = run.record.get("loggers")
    if (run.path / LOG).exists() or not isinstance(names, list) or "JSONLines" in names:
        return ""
    why = f"its loggers are {', '.join(map(str, names))}" if names else "it has no logger"
    return (
        f"This run has no {LOG}, because {why}: its metrics, events and the cost of its hooks are not shown. "
        "To keep it, add JSONLines() to the loggers: logger=[..., JSONLines()]."
    )


def status_in_words(run: RecordedRun, now: float) -> tuple[str, str]:
    """Return the status in words, and as good, bad, warn or info."""
    said = ending_of(run)["status"]
    if said:
        return said, "good" if said == "completed" else "warn" if said in NOTABLE else "bad"
    is_known = bool(run.record)
    if not is_known and not run.records:
        return "nothing logged yet", "info"
    if run.times.ended is None:
        return "unfinished", "warn"
    quiet, answers = now - run.times.ended, is_answered(run.path)
    if answers is False:
        return "killed, or trains on another machine", "warn"
    if quiet < SILENT:
        return ("training" if is_known or answers else "running, or just ended"), "info"
    if answers:
        return f"training, silent for {format_duration(quiet)}", "warn"
    # Without run.json, which older versions wrote with the first checkpoint, an end looks like a kill.
    return (
        (f"unfinished, silent for {format_duration(quiet)}", "warn")
        if is_known
        else (f"last record {format_duration(quiet)} ago", "info")
    )


def ending_of(run: RecordedRun) -> dict[str, Any]:
    """Return status, reason, step, epochs and time from run.json, or from the log, which also has failures.

    An empty status: the run is training.
    """
    record = run.record
    said, at = str(record.get("status", "")), timestamp(record.get("noted_at"))
    # In older versions a resumed run kept the record of the previous job until its first checkpoint. That
    # record has no version, and its time has whole seconds.
    started = run.times.started
    is_older = "version" not in record and at is not None and started is not None and at + 1 < started
    if said not in ("", "training") and not is_older:
        if at is not None and run.times.ended is not None and 0 <= run.times.ended - at < 1:
            at = run.times.ended
        found = {
            "status": said,
            "reason": str(record.get("reason") or ""),
            "step": valid_step(record.get("step")),
            "time": at,
            "epochs": valid_step(record.get("epochs")),
        }
    else:
        found = {
            "status": "completed" if _has_only_results(run) else "",
            "reason": "",
            "step": None,
            "time": None,
            **run.ending,
            "epochs": _epochs_at_end(run),
        }
    if found["status"] == "error":
        error = record.get("error")
        exception = run.failed.get("exception") or (error.get("type") if isinstance(error, dict) else None)
        found["status"] = "pruned" if failure_kind(exception) == "pruned" else "failed"
        found["reason"] = found["reason"] or run.failed.get("text", "")
    return found


def _has_only_results(run: RecordedRun) -> bool:
    """Return whether the log has the results of evaluations, and no fit began in it. They have no run.json,
    and are logged when they are over.
    """
    has_trained = run.record or run.epochs.has_rows or run.times.started is not None
    return bool(run.between) and not (has_trained or run.failures)


def _epochs_at_end(run: RecordedRun) -> int | None:
    """Return the completed epochs. Logs of older versions only have the epoch in which a run ended."""
    known, last = valid_step(run.ending.get("epochs")), valid_step(run.ending.get("epoch"))
    if known is not None or last is None or run.epochs.complete is not None:
        return known
    return last + (run.ending.get("status") == "completed")


def time_spent(run: RecordedRun) -> tuple[float | None, float | None]:
    """Return when the run began, and the seconds of its sessions without the pauses between them.

    They come from the log; from the record if there is no log, or if the log begins with an earlier run.
    """
    sessions = run.record.get("sessions")
    known = [each for each in sessions if isinstance(each, dict)] if isinstance(sessions, list) else []
    started = timestamp(known[0].get("started_at")) if known and not known[0].get("resumed_from") else None
    # the record has whole seconds
    if run.times.began is not None and (started is None or run.times.began >= started - 1):
        return run.times.began, run.times.spent
    spans = [
        (timestamp(each.get("started_at")), timestamp(each.get("ended_at") or run.record.get("noted_at")))
        for each in known
    ]
    spent = [end - start for start, end in spans if start is not None and end is not None]
    return started, (sum(spent) if spent else None)


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a run."""

    step: int
    epochs: int | None
    """Completed epochs; None if the log does not have them."""
    is_inside: bool
    """Whether it is within the next epoch."""

    def __str__(self) -> str:
        return progress(self.step, self.epochs, is_inside=self.is_inside)


def position(run: RecordedRun) -> Position:
    """Return the position of a run, now or at its end."""
    end = ending_of(run)
    step = run.last_step if end["step"] is None else end["step"]
    epochs = run.epochs.complete if end["epochs"] is None else end["epochs"]
    if epochs is None and not end["status"] and run.epochs.newest is not None:
        epochs = run.epochs.newest  # no row of an epoch's means yet: the epochs before this one are complete
    of_rows = run.epochs.complete or 0  # the last row may be of an epoch that was interrupted
    return Position(
        step,
        epochs,
        epochs is not None and (epochs < of_rows or (epochs == of_rows and step > run.epochs.at)),
    )


def format_duration(seconds: float) -> str:
    """Format seconds with at most two units: `3 h 20 min`."""
    left, parts = round(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])


def valid_step(value: Any) -> int | None:
    """Return the value if it is a valid step, else None."""
    return value if type(value) is int and abs(value) < LAST_STEP else None


def timestamp(text: Any) -> float | None:
    """Return the seconds since 1970 of a time in ISO format."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def format_score(manifest: dict[str, Any]) -> str:
    """Return the metric and value for which a checkpoint was kept, as text."""
    monitor = manifest.get("monitor")
    if not isinstance(monitor, dict):
        return ""
    value = monitor.get("score")
    return (
        f"{monitor.get('name', '?')} {value:.6g}"
        if isinstance(value, float | int)
        else f"{monitor.get('name', '?')} {value}"
    )


def _checkpoint_events(run: RecordedRun) -> Iterator[RunEvent]:
    for checkpoint in run.checkpoints:
        kept = f", {format_score(checkpoint.manifest)}" if checkpoint.manifest.get("monitor") else ""
        yield RunEvent(
            "checkpoint",
            f"{checkpoint.path.name} ({checkpoint.manifest['reason']}{kept})",
            timestamp(checkpoint.manifest["saved_at"]),
            checkpoint.manifest["step"],
        )
    for path, why in run.broken.items():
        yield RunEvent("damaged", f"checkpoint {path.name}: {why}")


def _hangs(run: RecordedRun) -> Iterator[RunEvent]:
    for line in _lines(run.path / "hangs.log"):
        if match := HANG.match(line.decode("utf-8", "replace")):
            step = re.search(r"\bstep (\d{1,15})\b", match[2])
            # the file has local times
            yield RunEvent("hang", match[2], timestamp(match[1]), int(step[1]) if step else None)


def _of_json_log(run: RecordedRun) -> Iterator[RunEvent]:
    """Yield failures and endings from the files of the hook JSONLog, without parsing other lines."""
    for path in sorted(run.path.glob("logs/*.jsonl")):
        for line in _lines(path):
            if not line.startswith((b'{"type": "exception"', b'{"type": "train_end"')):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            at, step = record.get("time"), valid_step(record.get("step"))
            at = at if isinstance(at, float) else None
            text = f"{record.get('exception', '')}: {record.get('message', '')}".removeprefix(": ")
            if record["type"] == "exception" and (step, text) not in run.failures:
                yield RunEvent("pruned" if record.get("exception") == PRUNED else "exception", text, at, step)
            elif record["type"] == "train_end" and record.get("reason"):
                yield RunEvent("stop", str(record["reason"]), at, step)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that may be missing. A path that is not a regular file is skipped, because
    reading a pipe would block.
    """
    try:
        if path.is_file():
            with path.open("rb") as file:
                while line := file.readline(LINE_BYTES):
                    yield line
    except OSError:
        return


def _not_finite(run: RecordedRun) -> Iterator[RunEvent]:
    """Yield the first non-finite value of every metric; one event for many layers at the same step."""
    of_layers: dict[tuple[str, int | None], list[str]] = {}
    for name, event in run.not_finite.items():
        if (layer := layer_of(name)) is None:
            yield event
        else:
            of_layers.setdefault((layer[0], event.step), []).append(name)
    for (family, _), layers in of_layers.items():
        first = run.not_finite[layers[0]]
        yield (
            replace(first, text=f"{family} of {len(layers)} layers, such as {layers[0]}")
            if len(layers) > 1
            else first
        )


def _ending(run: RecordedRun) -> Iterator[RunEvent]:
    end = ending_of(run)
    said, reason = end["status"], end["reason"]
    # the log has the failure already, with more detail
    if said and not (said in ("failed", "pruned") and end["step"] in [step for step, _ in run.failures]):
        kind = {"completed": "end", "stopped": "stop", "failed": "failure"}.get(said, said)
        yield RunEvent(kind, f"{said}: {reason}" if reason else said, end["time"], end["step"])
