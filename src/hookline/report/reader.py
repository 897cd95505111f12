"""Read a run's directory: its log, its record and its checkpoints, once or as they grow. Missing or damaged
parts are left out and do not raise.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline.checkpoint.catalog import FoundCheckpoint, find_with_files
from hookline.control.client import check_directory
from hookline.loggers.log_reader import BEGINS, LONGEST_LINE, RESUME_START, is_after_fit, lines_of, read_log
from hookline.reliability.summary import PRUNED
from hookline.report.trace_columns import LAST_STEP, TraceData, TraceReader, read_traces
from hookline.run.record import RECORD, read_record
from hookline.run.timings import SAMPLED, TIMED_PARTS
from hookline.util.errors import OptionError, folders_with
from hookline.util.text import list_some

LOG = "log.jsonl"
EPOCH = " (epoch)"
"""Added to the name of an epoch's mean if the metric also has a value for every step."""
AFTER = " (after the fit)"  # a metric of the fit, measured again by a later evaluation
MOST_NAMES = 5000
"""Metrics that are kept; names with a number in them can be any number of metrics."""
MOST_EVENTS = 2000
LATEST_SECOND = 1e11
"""Seconds since 1970. A larger value, or NaN, is not a time."""
LASTING = ("failure", "control", "resume", "rollback", "spike", "nonfinite", "exclusion", "warning")
"""Records about the job, or why it went back: shown even if a resume has superseded the steps around them."""
MOST_TEXTS = 20
"""Texts kept of one tag, the newest ones."""
MOST_SAMPLES = 12
"""The number of samples that an event on the page names."""
Floats = NDArray[np.float64]


@dataclass
class Series:
    """One metric of a run, as logged."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def arrays(self) -> tuple[Floats, Floats]:
        """Return steps and values, not copied."""
        return np.frombuffer(self.steps), np.frombuffer(self.values)


@dataclass
class RunEvent:
    """An event on the page: a kind, a text, and its time and step."""

    kind: str
    text: str
    time: float | None = None
    step: int | None = None


@dataclass
class Times:
    """When a run was running, from the records of its log."""

    began: float | None = None
    ended: float | None = None
    spent: float = 0.0
    """Seconds in its jobs, without the pauses between them."""
    holds_since: float | None = None
    """The time of the first record that no resume has superseded."""
    is_beginning: bool = False
    """Whether the last record was the first of a job."""
    is_over: bool = False
    """Whether the newest job has ended. Later records are of evaluations, which are not part of it."""
    started: float | None = None
    """When the newest job began; a run may be resumed many times."""


@dataclass
class Costs:
    """The cost of the job that ended last."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows of its hooks."""
    rows_since: int | None = None
    """The step at which that job resumed, if it did."""
    changes: list[dict[str, Any]] | None = None
    """What its hooks have changed; None if it was not audited."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds in each part of the job; empty if the log does not have them."""
    timings_since: int | None = None
    """The step at which that job resumed, if it did."""


@dataclass
class Epochs:
    """The epochs of a run."""

    newest: int | None = None
    """The number of the epoch of the newest row, from 0."""
    complete: int | None = None
    """Completed epochs, from the newest row of an epoch's means."""
    at: int = 0
    """The step at which this row was written."""
    has_rows: bool = False  # of training, not only of evaluations


@dataclass
class Texts:
    """The texts of one tag."""

    kept: deque[tuple[int | None, str]] = field(default_factory=lambda: deque(maxlen=MOST_TEXTS))
    """The newest ones, with their steps."""
    count: int = 0


@dataclass
class RecordedRun:
    """All data of one run that a page can show."""

    path: Path
    record: dict[str, Any] = field(default_factory=dict)
    """run.json; empty if the run has none."""
    series: dict[str, Series] = field(default_factory=dict)
    """Every curve by its name, after `name_curves`."""
    own: dict[str, Series] = field(default_factory=dict)
    """Values of the rows of steps."""
    between: dict[str, Series] = field(default_factory=dict)
    """Values of rows that do not belong to a single step."""
    events: list[RunEvent] = field(default_factory=list)
    failures: set[tuple[int | None, str]] = field(default_factory=set)
    """Step and text of the failures in the log; other files may repeat them."""
    failed: dict[str, Any] = field(default_factory=dict)
    """The failure that ended the newest job, if it failed: `exception` and `text`."""
    monitors: dict[str, Any] = field(default_factory=dict)
    """The metrics that hooks of the newest job monitor, from the log of a run without run.json."""
    ending: dict[str, Any] = field(default_factory=dict)
    """How that job ended, from its log; empty while it trains, and if it was killed."""
    not_finite: dict[str, RunEvent] = field(default_factory=dict)
    """The first NaN or infinity of every metric that has one."""
    params: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, Texts] = field(default_factory=dict)
    images: list[tuple[str, int | None, str]] = field(default_factory=list)
    """Tag, step, and the path as the log has it."""
    costs: Costs = field(default_factory=Costs)
    resumed_at: int | None = None
    checkpoints: list[FoundCheckpoint] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)
    records: int = 0
    superseded: int = 0
    times: Times = field(default_factory=Times)
    last_step: int = 0
    epochs: Epochs = field(default_factory=Epochs)
    unshown: Counter[str] = field(default_factory=Counter)
    """Parts of the log that a page does not show, with their counts."""
    trace: TraceData | None = None
    """When its hooks were called, if the run was traced."""

    def name_curves(self) -> None:
        """Name the curves from all values read so far.

        The mean of an epoch is logged under the name and step of the last batch's value; in one curve it
        would look like a spike.
        """
        self.series = self.own | {
            f"{name}{EPOCH}" if name in self.own else name: series for name, series in self.between.items()
        }


def read_run(path: Path) -> RecordedRun:
    """Read a run from its directory, whether it is running, has ended or was killed."""
    run = read_logged(path)
    read_beside(run)
    run.trace = read_traces(path)
    return run


def read_logged(path: Path, until: int | None = None) -> RecordedRun:
    """Read the log, or its first bytes."""
    check_run_dir(path)
    run = RecordedRun(path)
    log = path / LOG
    if log.is_file():
        foreign = 0
        for record in read_log(log, superseded=True, until=until):
            if record.get("superseded") is not True:
                foreign += not take(run, record)
            elif record.get("type") in LASTING:
                _take_lasting(run, record)
            else:
                _take_time(run, record)
        if foreign and not run.records:
            raise OptionError(
                f'{log} has {foreign} lines of JSON, but none of Hookline\'s records, which have a "type".'
            )
        if not run.records and until is None and _has_lines(log):
            raise OptionError(f"{log} is not a log of Hookline: it has no line of JSON.")
    run.name_curves()
    return run


def _has_lines(log: Path) -> bool:
    with log.open("rb") as file:
        return b"\n" in file.read(1_000_000)


def read_beside(run: RecordedRun) -> None:
    """Read the files next to the log: how the run ended, and its checkpoints."""
    run.record = read_record(run.path)
    run.checkpoints, run.broken = find_with_files(run.path, run.record)


def check_run_dir(path: Path) -> None:
    """Refuse a path that is not the directory of a run, and suggest one that is."""
    check_directory(path)
    if not (path / LOG).is_file() and not (path / RECORD).is_file():
        below = folders_with(path, LOG)
        hint = f" There are runs below it: {', '.join(below)}." if below else ""
        raise OptionError(f"{path} is not the directory of a run: it has neither {LOG} nor {RECORD}.{hint}")


# ---- one record --------------------------------------------------------------------------------------------


def take(run: RecordedRun, record: dict[str, Any]) -> bool:
    """Add a record of the log; return False if Hookline did not write it."""
    kind = record.get("type")
    if not isinstance(kind, str):
        return False
    run.records += 1
    _take_time(run, record)
    run.times.holds_since = run.times.ended if run.times.holds_since is None else run.times.holds_since
    step = step_of(record)
    run.last_step = max(run.last_step, step or 0)
    if kind == "metrics":
        _take_metrics(run, record, run.last_step if step is None else step)
    elif kind == "histogram":
        run.unshown["histograms"] += 1
    else:
        _TAKERS.get(kind, _take_other)(run, record, step)
    return True


def _take_time(run: RecordedRun, record: dict[str, Any]) -> None:
    time = record.get("time")
    if (type(time) is float or type(time) is int) and abs(time) < LATEST_SECOND:
        run.times.began = time if run.times.began is None else run.times.began
        begins = record.get("type") in BEGINS and not record.get("in_run")
        is_pause = run.times.is_over or (begins and not run.times.is_beginning)
        if run.times.ended is not None and time > run.times.ended and not is_pause:
            run.times.spent += time - run.times.ended
        run.times.ended, run.times.is_beginning = time, begins
        run.times.is_over = is_after_fit(record, run.times.is_over)


def step_of(record: dict[str, Any]) -> int | None:
    """Return the step of a record, or None."""
    step = record.get("step")
    return step if type(step) is int and -LAST_STEP < step < LAST_STEP else None


def _take_lasting(run: RecordedRun, record: dict[str, Any]) -> None:
    _take_time(run, record)
    _TAKERS.get(record["type"], _take_other)(run, record, step_of(record))


def _take_metrics(run: RecordedRun, record: dict[str, Any], step: int) -> None:
    metrics = record.get("metrics")
    if type(epoch := record.get("epoch")) is int and abs(epoch) < LAST_STEP:
        run.epochs.newest = epoch
    if not isinstance(metrics, dict):
        return
    over = record.get("over") or ("step" if "lr" in metrics else "")  # logs of older versions have no "over"
    run.epochs.has_rows |= over != "evaluation"
    kept = run.own if over == "step" else run.between
    if over == "epoch" and run.epochs.newest is not None:
        run.epochs.complete, run.epochs.at = run.epochs.newest + 1, step
    for name, value in metrics.items():
        if over == "evaluation" and run.ending and name in kept and not name.startswith("test"):
            name += AFTER
        try:
            number = float(value)  # NaN and infinity are text in the log
        except (TypeError, ValueError, OverflowError):
            continue
        series = kept.get(name)
        if series is None:
            if len(kept) >= MOST_NAMES:
                run.unshown["values of further metrics"] += 1
                continue
            series = kept[name] = Series()
        series.steps.append(step)
        series.values.append(number)
        if not isfinite(number) and name not in run.not_finite:
            run.not_finite[name] = RunEvent("not finite", f"{name} is {number}", run.times.ended, step)


def _take_text(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    tag, text = str(record.get("tag", "")), str(record.get("text", ""))
    if tag == "mixture":
        add_event(run, RunEvent("mixture", text, run.times.ended, step))
        return
    texts = run.texts.setdefault(tag, Texts())
    texts.kept.append((step, text))
    texts.count += 1


def _take_image(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    run.images.append((str(record.get("tag", "")), step, str(record.get("path", ""))))


def _take_first(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    """Add one of the first records of a job: its hyper-parameters, or the metrics that hooks monitor."""
    run.times.started, run.ending, run.failed = run.times.ended, {}, {}
    params, monitors = record.get("params"), record.get("monitors")
    if isinstance(params, dict):
        run.params.update(params)
    if isinstance(monitors, dict):
        run.monitors = monitors


def _take_resume(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    marked = record.get("superseded")
    count = marked.get("records", 0) if isinstance(marked, dict) else 0
    if record.get("in_run"):  # the job continues; the record of its rollback follows
        run.superseded += count if isinstance(count, int) else 0
        return
    run.times.started, run.ending, run.failed, run.resumed_at = run.times.ended, {}, {}, step
    if isinstance(marked, dict) and "checkpoint" not in record and run.times.ended is not None:
        # all superseded records are of an earlier run; the others before this one are of this run's set-up
        run.times.began = run.times.ended if run.times.holds_since is None else run.times.holds_since
        run.times.spent = max(0.0, run.times.ended - run.times.began)
    run.superseded += count if isinstance(count, int) else 0
    gone = f"; {count} records after it are superseded" if count else ""
    text = (
        f"from {record['checkpoint']}{gone}"
        if "checkpoint" in record
        else f"from the beginning; {count} records are of an earlier run"
    )
    add_event(run, RunEvent("resume", text, run.times.ended, step))


def _take_cost(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    rows = record.get("rows")
    if isinstance(rows, list):
        run.costs.rows, run.costs.rows_since = [row for row in rows if isinstance(row, dict)], run.resumed_at


def _take_changes(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    rows = record.get("rows")
    if isinstance(rows, list):
        run.costs.changes = [row for row in rows if isinstance(row, dict)]


def _take_timings(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    numbers: dict[str, Any] = {name: record.get(name) for name in ("total", *TIMED_PARTS, *SAMPLED)}
    found = {
        name: float(each)
        for name, each in numbers.items()
        if type(each) in (int, float) and 0 <= each < LATEST_SECOND
    }
    if found.get("total"):
        run.costs.timings, run.costs.timings_since = found, run.resumed_at


def _take_end(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    run.ending = {
        "status": str(record.get("status") or ""),
        "reason": str(record.get("reason") or ""),
        "step": step,
        "time": run.times.ended,
        "epoch": record.get("epoch"),
        "epochs": record.get("epochs"),
    }


def _take_control(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    asked = [
        str(record[key])
        for key in ("command", "hook", "interval", "file", "name", "value")
        if record.get(key) is not None
    ]
    if record.get("group") is not None:
        asked.append(f"of group {record['group']}")
    failed = f": {record['error']}" if record.get("error") else ""
    add_event(run, RunEvent("control", f"{' '.join(asked)}{failed}", run.times.ended, step))


def _take_failure(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    """Add a failure, its hook and event first: a message may fill all the space that is shown."""
    where = f" in {record['event']}" if record.get("event") else ""
    who = f"{record['who']}{where}: " if record.get("who") else ""
    rank = f"on rank {record['rank']}: " if record.get("rank") else ""
    # a rank that died has no exception
    text = f"{record.get('exception', '')}: {record.get('message', '')}".removeprefix(": ")
    run.failures.add((step, text))
    run.failed = {"exception": record.get("exception"), "text": f"{rank}{who}{text}"}
    add_event(run, RunEvent(failure_kind(record.get("exception")), run.failed["text"], run.times.ended, step))


def failure_kind(exception: Any) -> str:
    """Return the kind of an exception: 'pruned' if a search ended the run, else 'failure'."""
    return "pruned" if exception == PRUNED else "failure"


def _take_skip(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    batch = f", batch {record['batch']}" if "batch" in record else ""
    add_event(run, RunEvent("skip", f"{record.get('reason', '')}{batch}", run.times.ended, step))


def _take_spike(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    value, limit = (
        f"{each:.6g}" if type(each) is float else each for each in map(record.get, ("value", "limit"))
    )
    text = (
        f"{record.get('monitor', '')} {value}, limit {limit}, batch {record.get('batch')} "
        f"({record.get('action', '')}){_samples_in(record)}"
    )
    add_event(run, RunEvent("spike", text, run.times.ended, step))


def _take_nonfinite(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    text = f"{record.get('message', '')} batch {record.get('batch')}{_samples_in(record)}"
    add_event(run, RunEvent("not finite", text, run.times.ended, step))


def _take_exclusion(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    reason = f": {record['reason']}" if record.get("reason") else ""
    named = _samples_in({"samples": {record.get("loader"): record.get("samples")}})
    add_event(run, RunEvent("exclusion", f"left out{named}{reason}", run.times.ended, step))


def _samples_in(record: dict[str, Any]) -> str:
    """Return the samples that an event names."""
    known = record.get("samples")
    parts = [
        f"{loader} {list_some(map(str, ids), MOST_SAMPLES)}"
        for loader, ids in (known.items() if isinstance(known, dict) else ())
        if isinstance(ids, list) and ids
    ]
    return f", samples of {'; '.join(parts)}" if parts else ""


def _take_rollback(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    reason = f": {record['reason']}" if record.get("reason") else ""
    text = f"from step {record.get('from_step')} to {record.get('checkpoint', '')}{reason}"
    add_event(run, RunEvent("rollback", text, run.times.ended, step))


_TAKERS = {
    "text": _take_text,
    "image": _take_image,
    "hyperparams": _take_first,
    "start": _take_first,
    "resume": _take_resume,
    "cost": _take_cost,
    "changes": _take_changes,
    "timings": _take_timings,
    "control": _take_control,
    "failure": _take_failure,
    "skip": _take_skip,
    "spike": _take_spike,
    "nonfinite": _take_nonfinite,
    "exclusion": _take_exclusion,
    "rollback": _take_rollback,
    "end": _take_end,
}


def add_event(run: RecordedRun, event: RunEvent) -> None:
    """Keep an event, up to a limit."""
    if len(run.events) < MOST_EVENTS:
        run.events.append(event)
    else:
        run.unshown["further events"] += 1


def _take_other(run: RecordedRun, record: dict[str, Any], step: int | None) -> None:
    """Add a record of another kind as one line: a warning, or a kind of a later version."""
    parts = [
        str(value) if key == "message" else f"{key} {value}"
        for key, value in record.items()
        if key not in ("type", "time", "step", "epoch", "superseded") and value not in (None, "", {}, [])
    ]
    add_event(run, RunEvent(record["type"], ", ".join(parts), run.times.ended, step))


# ---- a run that is in progress -----------------------------------------------------------------------------


PIECE = 1 << 20
TAIL = 200
"""Bytes before a position by which a log is recognised."""


class FollowedRun:
    """The data of a run, updated with what its files have gained."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = path / LOG
        self._traces = TraceReader(path)
        self._seen: tuple[Any, ...] = ()
        self._begin()

    def refresh(self) -> bool:
        """Read what is new; return whether there was anything."""
        seen, traced = self._look(), self._traces.refresh()
        if seen == self._seen and not traced:
            return False
        if not self._is_continued() or not self._grow():
            self._begin()
            return True
        self.run.name_curves()
        self._read_beside(seen)
        return True

    def _begin(self) -> None:
        seen = self._look()
        self._end = _whole_lines(self._log)
        self._tail = _before(self._log, self._end)
        self.run: RecordedRun = read_logged(self.path, until=self._end)
        self._traces.refresh()
        self._read_beside(seen)

    def _read_beside(self, seen: tuple[Any, ...]) -> None:
        read_beside(self.run)
        self.run.trace = self._traces.data()
        self._seen = seen

    def _is_continued(self) -> bool:
        """Return whether the log has only grown: the bytes before the new lines are unchanged, and each line
        has its time.
        """
        return self._log.is_file() and _before(self._log, self._end) == self._tail

    def _grow(self) -> bool:
        """Read the added lines; return False if one of them supersedes earlier ones."""
        with self._log.open("rb") as file:
            file.seek(self._end)
            for line in lines_of(file):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break  # the line is still being written
                if line.startswith(RESUME_START):
                    return False
                self._end += len(line)
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    take(self.run, record)
        self._tail = _before(self._log, self._end)
        return True

    def _look(self) -> tuple[Any, ...]:
        """Return the marks of a change: identity, size and modification time of the run's files."""
        found: list[Any] = []
        for path in (self._log, self.path / "run.json", self.path / "checkpoints", self.path / "hangs.log"):
            try:
                about = path.stat()
                found.append((about.st_ino, about.st_size, about.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)


def _whole_lines(path: Path) -> int:
    """Return the position up to which a log consists of complete lines."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            while end:
                start = max(0, end - PIECE)
                file.seek(start)
                last = file.read(end - start).rfind(b"\n")
                if last >= 0:
                    return start + last + 1
                end = start
    except OSError:
        pass
    return 0


def _before(path: Path, end: int) -> bytes:
    """Return the bytes right before a position."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, end - TAIL))
            return file.read(min(end, TAIL))
    except OSError:
        return b""
