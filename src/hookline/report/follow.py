"""Follow a run that is in progress: read its log as it grows, from the beginning only if it was rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookline.loggers.log_reader import LONGEST_LINE, RESUME, lines_of
from hookline.report.reader import LOG, RunData, read_beside, read_logged, take
from hookline.report.trace_columns import TraceReader

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
        self.run: RunData = read_logged(self.path, until=self._end)
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
