"""The runs below a directory: their status, progress, best value, age and size."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hookline.control.client import is_answered
from hookline.report.progress import Best, best_of
from hookline.report.reader import LOG, RecordedRun, read_logged, take
from hookline.report.run_events import SILENT, ending_of, format_duration, position, timestamp, valid_step
from hookline.report.settings import column_titles, differences, format_column, recorded_settings
from hookline.run.lock import is_running
from hookline.run.record import RECORD, read_record
from hookline.util.errors import OptionError, closest, folders_beside
from hookline.util.snapshot import TRACKER_FOLDERS
from hookline.util.text import format_number, format_size, format_table, printable
from hookline.util.urls import MANIFEST

LOG_BYTES = 4_000_000
"""Logs up to this size are read completely for the list; of a longer one only the end."""
TAIL_BYTES = 256_000
MOST_FOLDERS = 200_000
MOST_FILES_COUNTED = 100_000
"""Files of one run that are counted for its size."""
INNER_FOLDERS = ("checkpoints", "media", "logs", *TRACKER_FOLDERS)
"""Folders of a run that do not contain other runs."""
COLUMNS = ("run", "status", "step", "epochs", "best", "age", "size")
MOST_SETTINGS = 4
"""Settings beside each run in the table of a notebook; `hookline summary` has more of them."""
SURROUNDINGS = ("versions.", "machine.", "git")
"""Beginnings of the names of settings that are not in this table."""
MOST_PROBLEMS = 20


@dataclass(slots=True)
class ListedRun:
    """One run in the list.

    path: its directory. run: all that was read of it. status: as in `run.json`, or 'running' or 'killed'.
    step, epochs: the progress. best: the best value of the monitored metric, or None. started: seconds since
    1970. bytes: the size of the directory. reason: why it stopped.
    """

    path: Path
    run: RecordedRun = field(repr=False)
    status: str
    is_certain: bool
    """False if the files do not show whether the run was killed or runs on another machine."""
    step: int
    epochs: int | None
    best: Best | None
    is_partial: bool
    """Whether the best value is from the end of a log that is too long to be read completely."""
    started: float | None
    bytes: int
    reason: str = ""

    def data(self, now: float | None = None) -> dict[str, Any]:
        """Return a dictionary for JSON. now: the time in seconds since 1970, which the age is of; None: now.

        A best value without a step in the record is looked up in the log, unless that is long.
        """
        now = time.time() if now is None else now
        best = self.best
        if best is not None and best.step is None:
            best = _in_log(self.path, best) or best
        return {
            "path": str(self.path),
            "id": self.run.record.get("id"),
            "status": self.status,
            "is_certain": self.is_certain,
            "reason": self.reason,
            "step": self.step,
            "epochs": self.epochs,
            "best": None if best is None else {**best.data(), "is_partial": self.is_partial},
            "started_at": utc(self.started),
            "age": None if self.started is None else round(now - self.started),
            "bytes": self.bytes,
        }

    def cells(self, folder: Path, now: float) -> list[str]:
        """Return the texts of a row; their titles are `COLUMNS`."""
        end = " (end of the log)" if self.is_partial else ""
        return [
            str(self.path.relative_to(folder) if self.path != folder else self.path),
            status_word(self.status, self.is_certain),
            f"{self.step:,}",
            "" if self.epochs is None else f"{self.epochs:,}",
            "" if self.best is None else f"{self.best.metric} {format_number(self.best.value)}{end}",
            "" if self.started is None else format_duration(max(0.0, now - self.started)),
            format_size(self.bytes),
        ]


@dataclass(slots=True, repr=False)
class Listing:
    """All runs below a directory, the newest first. `print` it, or put it in the last line of a cell, for a
    table, also of the settings that differ.

    folder: the directory. runs: the runs, each a `ListedRun`.
    """

    folder: Path
    runs: list[ListedRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Directories that cannot be read, and other reasons why the list is incomplete."""

    def data(self, now: float) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        runs = [each.data(now) for each in self.runs]
        return {"version": 1, "directory": str(self.folder), "runs": runs, "problems": self.problems}

    def text(self, now: float) -> str:
        """Return the table as text, without settings, as `hookline runs` prints it."""
        return self._text([list(COLUMNS), *(run.cells(self.folder, now) for run in self.runs)])

    def _text(self, rows: list[list[str]]) -> str:
        empty = f"There are no runs in {printable(self.folder)} or below it."
        return "\n".join([format_table(rows) if self.runs else empty, *self._problems()])

    def _problems(self) -> list[str]:
        return [f"not read: {printable(problem)}" for problem in self.problems[:MOST_PROBLEMS]]

    def _rows(self) -> list[list[str]]:
        """Return the titles and the rows, with the settings that differ between the runs."""
        settings = [recorded_settings(each.run) for each in self.runs]
        differing = [each for each in differences(settings) if not each["key"].startswith(SURROUNDINGS)]
        # a run that failed at once has few settings: what only such a run lacks does not tell runs apart
        trained = [bool(each.run.record.get("step")) for each in self.runs]
        differing = [
            row
            for row in differing
            if len(
                {
                    repr(each)
                    for each, is_known in zip(row["values"], trained, strict=True)
                    if is_known or each
                }
            )
            > 1
        ]
        shown, now = differing[:MOST_SETTINGS], time.time()
        cells = [format_column(each["key"], each["values"]) for each in shown]
        rows = [[*COLUMNS, *column_titles([each["key"] for each in shown])]]
        for index, run in enumerate(self.runs):
            rows.append([*run.cells(self.folder, now), *(column[index] for column in cells)])
        return rows

    def __repr__(self) -> str:
        return self._text(self._rows())

    def _repr_html_(self) -> str:
        from hookline.util.notebook import escape, table  # only a notebook calls this

        if not self.runs:
            return f"<div>{escape(self)}</div>"
        titles, *rows = self._rows()
        return table(titles, rows) + "".join(f"<div>{escape(line)}</div>" for line in self._problems())


def list_runs(folder: Path | str | None = None, now: float | None = None) -> Listing:
    """Return the runs in a directory and below it. Nothing is written.

    folder: by default `runs/`, or here if there is none. now: the time for the ages, in seconds since 1970;
    None: the clock.
    """
    where = Path(folder) if folder is not None else Path("runs") if Path("runs").is_dir() else Path()
    if not where.is_dir():
        near = folders_beside(where)
        kind = "is a file" if where.exists() else "does not exist"
        raise OptionError(f"{where} {kind}; pass a directory that contains runs.{closest(where.name, near)}")
    listing, now = Listing(where), time.time() if now is None else now
    for path in find_run_dirs(where, listing.problems):
        try:
            listing.runs.append(_list_run(path, now))
        except OSError as error:
            listing.problems.append(f"{path}: {error.strerror or error}")
    listing.runs.sort(key=lambda each: (each.started or 0.0, str(each.path)), reverse=True)
    return listing


def find_run_dirs(folder: Path, problems: list[str]) -> Iterator[Path]:
    """Yield the directories of runs in a folder and below it, without following links."""

    def record(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror or error}")

    for number, (parent, names, files) in enumerate(os.walk(folder, onerror=record)):
        if number == MOST_FOLDERS:
            problems.append(f"{folder} has more than {MOST_FOLDERS:,} folders; the rest is not searched")
            return
        names[:] = sorted(name for name in names if not name.startswith("."))
        if MANIFEST in files:  # a checkpoint
            names.clear()
        elif RECORD in files or LOG in files:
            names[:] = [name for name in names if name not in INNER_FOLDERS]
            yield Path(parent)


def _list_run(path: Path, now: float) -> ListedRun:
    run = RecordedRun(path, record=read_record(path))
    best, is_partial, said = best_of(run), False, ""
    alive = is_running(path)
    if best is None or not run.record or (run.record["status"] == "training" and not alive):
        run, is_partial, said = _read_log(run)
        best = best_of(run)
    status, is_certain = run_status(run, now, alive)
    if said and not run.record:
        status = "unreadable"
    at, record = position(run), run.record
    is_over = bool(ending_of(run)["status"])
    step = at.step if is_over or not record else max(at.step, record["step"])
    epochs = at.epochs if at.epochs is not None else valid_step(record.get("epochs"))
    started = timestamp(record.get("started_at") or record.get("noted_at"))
    return ListedRun(
        path,
        run,
        status,
        is_certain,
        step,
        epochs,
        best,
        is_partial and best is not None,
        run.times.began if started is None else started,
        disk_usage(path),
        said or ending_of(run)["reason"],
    )


def _in_log(path: Path, best: Best) -> Best | None:
    """Return a best value with its step, from the log and the record; None if the log does not have it, or is
    long.
    """
    try:
        if (path / LOG).stat().st_size > LOG_BYTES:
            return None
        run = read_logged(path)
    except (OSError, OptionError):
        return None
    run.record = read_record(path)
    return best_of(run, best.metric)


def _read_log(run: RecordedRun) -> tuple[RecordedRun, bool, str]:
    """Return the run with its log, or with the end of a long log; whether that is only a part of it; and its
    problem, if any.
    """
    log = run.path / LOG
    if not log.is_file():
        return run, False, "" if run.record else f"{RECORD} cannot be read"
    if log.stat().st_size > LOG_BYTES:
        for record in (*first_records(log), *last_records(log)):
            take(run, record)
        run.name_curves()
        return run, True, ""
    try:
        read = read_logged(run.path)
    except OptionError as error:
        return run, False, str(error)
    read.record = run.record
    return read, False, ""


def first_records(log: Path) -> list[dict[str, Any]]:
    """Return the first records of jobs at the start of a log, which say what hooks monitor."""
    with log.open("rb") as file:
        lines = file.read(TAIL_BYTES).split(b"\n")[:-1]
    return [record for record in _parsed(lines) if record.get("type") == "start"]


def last_records(log: Path) -> list[dict[str, Any]]:
    """Return the complete records at the end of a log that no later resume has superseded."""
    with log.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(max(0, length - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).split(b"\n")
    records: list[dict[str, Any]] = []
    for record in _parsed(lines[1 if length > TAIL_BYTES else 0 :]):
        records = [] if record.get("type") == "resume" else records
        records.append(record)
    return records


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):
                yield record


def run_status(run: RecordedRun, now: float, alive: bool | None = None) -> tuple[str, bool]:
    """Return the status of a run in one word ('running', 'killed', or how it ended), and whether that is
    certain.

    alive: whether its lock is held. A run that trains by its record was killed if no process is active in its
    directory.
    """
    said = ending_of(run)["status"]
    if alive:  # even if an earlier session has ended
        return "running", True
    if said:
        return said, True
    if not run.record and not run.records:
        return "empty", True
    if alive is None:
        answers = is_answered(run.path)
        if answers is not None:
            return ("running", True) if answers else ("killed", False)
        last_sign = max(run.times.ended or 0.0, timestamp(run.record.get("noted_at")) or 0.0)
        return ("running", False) if now - last_sign < SILENT else ("killed", False)
    return "killed", True


def recorded_status(path: Path, record: dict[str, Any]) -> tuple[str, bool]:
    """Return the status of the run in a directory by its record and its lock, as `standing` does."""
    return run_status(RecordedRun(path, record=record), time.time(), is_running(path))


def status_word(status: str, is_certain: bool) -> str:
    """Return 'killed', or 'killed?' if that is not certain."""
    return status if is_certain else f"{status}?"


def disk_usage(folder: Path) -> int:
    """Return the bytes of all files below a folder, without following links."""
    total = count = 0
    waiting = [str(folder)]
    while waiting and count < MOST_FILES_COUNTED:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total


def utc(seconds: float | None) -> str | None:
    """Return a time as text in UTC."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None
