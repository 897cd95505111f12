"""A run that goes on: its log is read as it grows, never twice from the beginning unless it
was written anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookline.loggers.log_reader import LONGEST_LINE, RESUME, lines_of
from hookline.report.reader import LOG, RunData, read_beside, read_logged, take
from hookline.report.trace_columns import TraceReader

PIECE = 1 << 20
TAIL = 200
"""Bytes by which a log is known again."""


class FollowedRun:
    """What is known of a run, and what has come since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = path / LOG
        self._traces = TraceReader(path)
        self._seen: tuple[Any, ...] = ()
        self._begin()

    def refresh(self) -> bool:
        """Take in what is new; whether there was anything."""
        seen, traced = self._look(), self._traces.refresh()
        if seen == self._seen and not traced:
            return False
        if not self._goes_on() or not self._grow():
            self._begin()
            return True
        self.run.settle()
        self._read_beside(seen)
        return True

    def _begin(self) -> None:
        seen = self._look()
        self._end = _whole_lines(self._log)
        self._tail = _before(self._log, self._end)
        self.run: RunData = read_logged(self.path, until=self._end)
        self._traces.refresh()
        self._read_beside(seen)

    def _read_beside(self, seen: tuple[Any, ...]) -> None:
        read_beside(self.run)
        self.run.trace = self._traces.data()
        self._seen = seen

    def _goes_on(self) -> bool:
        """Whether the log is the one that is known: what stands before the new lines is as it was; each line
        has its time.
        """
        return self._log.is_file() and _before(self._log, self._end) == self._tail

    def _grow(self) -> bool:
        """Read the lines that were added; False if one of them says that earlier ones no longer hold."""
        with self._log.open("rb") as file:
            file.seek(self._end)
            for line in lines_of(file):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break  # it is being written right now
                if line.startswith(RESUME):
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
        """By what a change is noticed: the log's identity and length, and when its neighbours were last
        written.
        """
        found: list[Any] = []
        for path in (self._log, self.path / "run.json", self.path / "checkpoints", self.path / "hangs.log"):
            try:
                about = path.stat()
                found.append((about.st_ino, about.st_size, about.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)


def _whole_lines(path: Path) -> int:
    """Up to where a log consists of whole lines."""
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
    """What stands right before a position."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, end - TAIL))
            return file.read(min(end, TAIL))
    except OSError:
        return b""
