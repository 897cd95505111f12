"""When hooks were called: a run's trace, grouped into as many columns as a screen can show."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACE_FILES = ("trace.json", "trace.rank*.json")
"""One for each rank; merged files are ignored."""
MOST_TRACES = 8
"""Ranks that are read; more would take long to read and are not comparable by eye."""
COLUMNS = 600
"""At most twice as many are kept; then neighbours are merged, and a column covers twice the time."""
FIRST_WIDTH = 100.0
"""Initial width of a column in microseconds."""
MOST_LANES = 120
LINE_BYTES = 1_000_000
LATEST_MICROSECOND = 1e17
"""Microseconds. A larger value is not a time."""
LAST_STEP = 1 << 53
"""The largest integer that a browser represents exactly; a larger value is not a step."""


@dataclass
class Lane:
    """One hook on one rank."""

    name: str
    rank: int
    calls: int = 0
    total: float = 0.0
    """Microseconds."""
    busy: array[float] = field(default_factory=lambda: array("d"))
    """Microseconds in every column."""
    counts: array[int] = field(default_factory=lambda: array("l"))
    longest: dict[int, tuple[float, str, int]] = field(default_factory=dict)
    """For every column that has a call: the microseconds, event and step of the longest one."""


@dataclass
class TraceData:
    """The calls in the traces of a run."""

    lanes: dict[tuple[int, str], Lane] = field(default_factory=dict)
    width: float = FIRST_WIDTH
    began: float | None = None
    """Microseconds since 1970."""
    columns: int = 0
    left_out: int = 0
    """Calls of hooks that are not kept."""
    unread: int = 0
    """Traces of ranks that are not read."""

    def add(self, event: dict[str, Any], shift: float) -> None:
        """Add one complete event of the trace, if it is a hook's.

        shift: converts its clock to the time of day.
        """
        found = _call(event)
        if found is None:
            return
        rank, name, what, start, took, step = found
        start += shift
        if self.began is None:
            self.began = start
        lane = self.lanes.get((rank, name))
        if lane is None:
            if len(self.lanes) >= MOST_LANES:
                self.left_out += 1
                return
            lane = self.lanes[rank, name] = Lane(name, rank)
        start = max(0.0, start - self.began)
        while (start + took) / self.width >= 2 * COLUMNS:
            self._halve()
        self._put(lane, start, took, what, step)

    def _put(self, lane: Lane, start: float, took: float, what: str, step: int) -> None:
        first, last = int(start / self.width), int((start + took) / self.width)
        missing = last + 1 - len(lane.busy)
        if missing > 0:
            lane.busy.extend([0.0] * missing)
            lane.counts.extend([0] * missing)
        self.columns = max(self.columns, last + 1)
        lane.calls += 1
        lane.total += took
        lane.counts[first] += 1
        if took > lane.longest.get(first, (-1.0,))[0]:
            lane.longest[first] = (took, what, step)
        for column in range(first, last + 1):
            begin, end = max(start, column * self.width), min(start + took, (column + 1) * self.width)
            lane.busy[column] += max(0.0, end - begin)

    def _halve(self) -> None:
        """Merge neighbouring columns."""
        self.width *= 2
        self.columns = -(-self.columns // 2)
        for lane in self.lanes.values():
            if len(lane.busy) % 2:
                lane.busy.append(0.0)
                lane.counts.append(0)
            lane.busy = array("d", (lane.busy[at] + lane.busy[at + 1] for at in range(0, len(lane.busy), 2)))
            lane.counts = array(
                "l", (lane.counts[at] + lane.counts[at + 1] for at in range(0, len(lane.counts), 2))
            )
            longest: dict[int, tuple[float, str, int]] = {}
            for column, call in lane.longest.items():
                if call[0] > longest.get(column // 2, (-1.0,))[0]:
                    longest[column // 2] = call
            lane.longest = longest


class TraceReader:
    """Reads the traces in a run's directory, and later their new lines."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read: dict[Path, tuple[int, int]] = {}
        """The identity of every file, and how far it was read."""
        self._shifts: dict[Path, float] = {}
        self._data = TraceData()

    def data(self) -> TraceData | None:
        """Return the calls read so far."""
        return self._data if self._data.lanes else None

    def refresh(self) -> bool:
        """Read what is new; return whether there was anything."""
        found = [path for pattern in TRACE_FILES for path in self._run_dir.glob(pattern) if path.is_file()]
        first = sorted(found, key=lambda path: (len(path.name), path.name))[:MOST_TRACES]
        files = {path: path.stat() for path in first}
        if any(
            path not in files or files[path].st_ino != known or files[path].st_size < at
            for path, (known, at) in self._read.items()
        ):
            self._read, self._shifts, self._data = {}, {}, TraceData()  # a file was rewritten
        self._data.unread = len(found) - len(first)
        grown = False
        for path, about in files.items():
            _, at = self._read.get(path, (0, 0))
            if about.st_size > at:
                for ends, event in events_from(path, at):
                    at, grown = ends, True
                    self._shifts[path] = _shift(event, self._shifts.get(path, 0.0))
                    self._data.add(event, self._shifts[path])
                self._read[path] = (about.st_ino, at)
        return grown


def read_traces(run_dir: Path) -> TraceData | None:
    """Return the calls in the traces of a run's directory; None if there are none."""
    reader = TraceReader(run_dir)
    reader.refresh()
    return reader.data()


def events_from(path: Path, at: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the events of a trace that has one per line, from a byte on, each with the position of its end.

    The array need not be closed and the last line may be incomplete, because a killed run leaves it so.
    """
    try:
        with path.open("rb") as file:
            file.seek(at)
            while line := file.readline(LINE_BYTES):
                if not line.endswith(b"\n"):
                    return
                at += len(line)
                try:
                    event = json.loads(line.strip().lstrip(b"[").rstrip(b",]"))
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield at, event
    except OSError:
        return


def _shift(event: dict[str, Any], before: float) -> float:
    """Return the microseconds from a trace's clock to the time of day, which the trace records when it begins
    or continues.
    """
    if event.get("ph") != "M" or event.get("name") != "hookline":
        return before
    about = event.get("args")
    of_day, own = (about.get("unix_ns"), about.get("clock_ns")) if isinstance(about, dict) else (None, None)
    if (
        not (isinstance(of_day, int) and isinstance(own, int))
        or max(abs(of_day), abs(own)) > 1e3 * LATEST_MICROSECOND
    ):
        return before
    return (of_day - own) / 1e3


def _call(event: dict[str, Any]) -> tuple[int, str, str, float, float, int] | None:
    """Return rank, hook, event, start, duration and step of a hook's call; None for any other event."""
    if event.get("ph") != "X" or event.get("cat") != "hook":
        return None
    about = event.get("args")
    about = about if isinstance(about, dict) else {}
    name, start, took, rank = event.get("name"), event.get("ts"), event.get("dur"), event.get("pid")
    if not (isinstance(name, str) and isinstance(start, int | float) and isinstance(took, int | float)):
        return None
    if not (
        -LATEST_MICROSECOND < start < LATEST_MICROSECOND and 0 <= took < LATEST_MICROSECOND
    ):  # neither is NaN
        return None
    rank = rank if isinstance(rank, int) and 0 <= rank < LAST_STEP else 0
    step = about.get("step")
    return (
        rank,
        str(about.get("hook", name)),
        str(about.get("event", name)),
        float(start),
        float(took),
        step if isinstance(step, int) and abs(step) < LAST_STEP else 0,
    )
