"""Read the valid records of a run's log, also after kills and resumes.

A log is append-only. A run that resumes from a checkpoint adds a `resume` record with the range of bytes that
were written after that checkpoint: they are superseded. A resume record in superseded bytes is not valid
either. So the valid records are those that led to the final state, in whatever order a run was resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

RESUME_START = b'{"type": "resume"'
"""The start of the line of a resume record. `JSONLines` writes the type first."""

BEGINS = ("hyperparams", "resume", "start")
"""The types of the first records of a job. The time before them was not spent in a job."""

LONGEST_LINE = 2**26
"""Bytes."""

Range = tuple[int, int]

_decode = (
    json.JSONDecoder().decode
)  # a third faster than json.loads, which detects the encoding of every line


def read_log(
    path: str | Path, superseded: bool = False, until: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's log (the file, or the run's directory) in order.

    Superseded records are left out; with `superseded=True` they are included, with `record["superseded"]`
    being True (in a valid `resume` record it is the range of bytes). An incomplete line, as a kill leaves it,
    is skipped. The log of a running run is read up to its length at the start, or up to the byte `until`.

    path: the file, or the run's directory. superseded: also yield superseded records. until: the last byte to
    read; None: the length at the start.
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
            if (holds or superseded) and (record := _parse(line)) is not None:
                yield record if holds else {**record, "superseded": True}


def is_after_fit(record: Mapping[str, Any], was: bool) -> bool:
    """Return whether the fit is over at a record; what follows is of later evaluations. was: whether it was
    over at the record before.
    """
    kind = record.get("type")
    return kind == "end" or (was and (kind not in BEGINS or bool(record.get("in_run"))))


def superseded_bytes(path: Path) -> list[Range]:
    """Return the bytes of a log that are superseded, as ordered, disjoint ranges."""
    with path.open("rb") as file:
        return superseded_ranges(_resumes(file)[0])


def read_events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the position and the record of every resume, rollback and control command, superseded or not."""
    starts = (RESUME_START, b'{"type": "rollback"', b'{"type": "control"')
    at = 0
    with path.open("rb") as file:
        for line in lines_of(file):
            if line.startswith(starts) and (record := _parse(line)) is not None:
                yield at, record
            at += len(line)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a log. A line above the limit is split into pieces, which are not JSON."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def _resumes(file: BinaryIO) -> tuple[list[tuple[int, Range]], int]:
    """Return the position and the superseded bytes of each resume record, and the length of the log."""
    found: list[tuple[int, Range]] = []
    start = 0
    for line in lines_of(file):
        marked = (_parse(line) or {}).get("superseded") if line.startswith(RESUME_START) else None
        if isinstance(marked, dict):
            first, last = marked.get("from"), marked.get("to")
            if isinstance(first, int) and isinstance(last, int) and 0 <= first < last <= start:
                found.append((start, (first, last)))
        start += len(line)
    return found, start


def superseded_ranges(resumes: list[tuple[int, Range]]) -> list[Range]:
    """Return the superseded bytes as ordered, disjoint ranges, from resume records in order."""
    holding: list[Range] = []
    for start, marked in reversed(resumes):  # the last record is valid, and decides which earlier ones are
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
