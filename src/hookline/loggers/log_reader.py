"""Reading a run's log: the records that still hold, also after kills and resumes.

A log is only ever added to. A run that goes on from a checkpoint adds a `resume` record, which names the
bytes that were written after that checkpoint: they are superseded. A resume that lies in such bytes itself is
void with them, so whichever checkpoints a run went on from, in whatever order, what is left is the one course
of events that led to its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

RESUME = b'{"type": "resume"'
"""How the line of such a record begins; `JSONLines` writes the type first."""

LONGEST_LINE = 2**26
"""Bytes."""

Range = tuple[int, int]

_decode = (
    json.JSONDecoder().decode
)  # a third faster than json.loads, which looks for the encoding of every line


def read_log(
    path: str | Path, superseded: bool = False, until: int | None = None
) -> Iterator[dict[str, Any]]:
    """The records of a run's log (the file, or the run's directory), in the order they were written, read as
    you go.

    Those that a resume has superseded are left out; with `superseded=True` they come too, with
    `record["superseded"]` being True (in a `resume` record that holds, it is the range of bytes). Half a
    line, as a kill leaves it, is skipped. The log of a running run is read up to where it is when the reading
    begins, or up to the byte `until`.
    """
    path = Path(path)
    with (path / "log.jsonl" if path.is_dir() else path).open("rb") as file:
        resumes, end = _resumes(file)
        ranges = superseded_ranges(resumes)
        end = end if until is None else min(end, until)
        ranges.append((end, end))
        file.seek(0)
        start, (first, last) = 0, ranges.pop(0)
        for line in lines_of(file):
            if start >= end:
                break
            while start >= last and ranges:
                first, last = ranges.pop(0)
            holds = start < first or start >= last
            start += len(line)
            if holds or superseded:
                record = _parse(line)
                if record is not None:
                    yield record if holds else {**record, "superseded": True}


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a log. One that is longer than any that we write comes in pieces, which are no JSON."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def _resumes(file: BinaryIO) -> tuple[list[tuple[int, Range]], int]:
    """Where each resume record is, with the bytes that it supersedes; and how long the log is."""
    found: list[tuple[int, Range]] = []
    start = 0
    for line in lines_of(file):
        if line.startswith(RESUME):
            marked = (_parse(line) or {}).get("superseded")
            if isinstance(marked, dict):
                first, last = marked.get("from"), marked.get("to")
                if isinstance(first, int) and isinstance(last, int) and 0 <= first < last <= start:
                    found.append((start, (first, last)))
        start += len(line)
    return found, start


def superseded_ranges(resumes: list[tuple[int, Range]]) -> list[Range]:
    """The bytes that no longer hold, as ranges in order that do not touch, from resume records in the order
    of the log.
    """
    holding: list[Range] = []
    for start, marked in reversed(resumes):  # the last one holds, and says which of those before it do
        if not any(first <= start < last for first, last in holding):
            holding.append(marked)
    joined: list[Range] = []
    for first, last in sorted(holding):
        if joined and first <= joined[-1][1]:
            first, last = joined[-1][0], max(joined.pop()[1], last)
        joined.append((first, last))
    return joined


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = _decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
