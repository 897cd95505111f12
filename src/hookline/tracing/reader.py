"""Read traces line by line, of runs that have ended, still run or were killed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hookline.tracing.writer import TRACE_FORMAT, is_trace
from hookline.util.errors import OptionError, closest

TraceRecord = dict[str, Any]
HEADER = {"stage": str, "rank": int, "world_size": int, "clock_ns": int, "unix_ns": int}
"""The fields of the first line, with their types."""
LISTENER_TEXTS = ("receiver", "name", "function", "origin", "when", "why")
"""The text fields of each listener in the plan."""
MOST_BRANCHES = 20
LINE_CHARACTERS = 2**26
"""Characters. Hookline writes no longer lines; a longer one is read in parts, which are not valid JSON."""
LATEST_TIME = 1e17
"""Microseconds. A larger value, or NaN, is not a valid time."""


def read_trace(path: str | Path) -> Iterator[TraceRecord]:
    """Yield the records of a trace, in the order in which they ended. Incomplete lines are left out.

    Raise an OptionError if the file is not a trace.

    path: the file.
    """
    path = Path(path)
    check_trace(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(LINE_CHARACTERS):
            text = line.strip().removeprefix("[").removesuffix(",")
            if text in ("", "]"):
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                continue  # a line that was cut off when the run was killed
            if isinstance(record, dict) and _is_valid(record):
                yield record


def of_first_rank(records: Iterator[TraceRecord]) -> Iterator[TraceRecord]:
    """Yield only the records of the rank that comes first, so that a merged trace is not counted twice."""
    first = next(records)
    yield first
    yield from (record for record in records if record.get("pid") == first.get("pid"))


def _is_valid(record: TraceRecord) -> bool:
    """Return whether a record has the fields that all readers of a trace need."""
    args = record.get("args")
    if (
        not isinstance(args, dict)
        or not isinstance(record.get("name"), str)
        or not isinstance(record.get("pid", 0), int)
    ):
        return False
    if record.get("ph") == "M" and record["name"] == "hookline":
        return _is_header(args)
    if record.get("ph") == "M" and record["name"] == "hookline_plan":
        return (
            isinstance(args.get("verb"), str)
            and isinstance(args.get("rows"), list)
            and all(map(_is_row, args["rows"]))
        )
    if record.get("ph") != "X":
        return "cat" not in record  # only calls and events have a category
    return (
        isinstance(record.get("cat", ""), str)
        and _is_time(record.get("dur"))
        and _is_time(record.get("ts"))
        and isinstance(args.get("step", 0), int)
        and isinstance(args.get("event", ""), str)
    )


def _is_row(row: Any) -> bool:
    """Return whether this is an event of the plan with its listeners."""
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("branch", "event")):
        return False
    listeners = row.get("listeners")
    return (
        row["branch"].count("/") < MOST_BRANCHES
        and isinstance(listeners, list)
        and all(
            isinstance(each, dict)
            and all(isinstance(each.get(key), str) for key in LISTENER_TEXTS)
            and isinstance(each.get("asks"), list)
            and all(isinstance(fact, str) for fact in each["asks"])
            for each in listeners
        )
    )


def _is_header(args: TraceRecord) -> bool:
    has_fields = all(isinstance(args.get(key), kind) for key, kind in HEADER.items())
    return has_fields and all(abs(args[key]) < 1e3 * LATEST_TIME for key in ("clock_ns", "unix_ns"))


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and -LATEST_TIME < value < LATEST_TIME


def check_trace(path: Path) -> None:
    """Raise if the file is not a trace, and suggest the nearest names."""
    if path.is_dir():
        inside = sorted(str(each) for each in path.glob("trace*.json"))
        raise OptionError(
            f"{path} is a directory; name a trace.{' There are: ' + ', '.join(inside) if inside else ''}"
        )
    if not path.is_file():
        near = [each.name for each in path.parent.glob("*.json")] if path.parent.is_dir() else []
        raise OptionError(
            f"There is no trace {path}.{closest(path.name, near)} A run writes one with --trace or "
            "Trainer(trace=True)."
        )
    if not is_trace(path):
        raise OptionError(f"{path} is not a trace of Hookline: its first line is not the header of a trace.")
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(LINE_CHARACTERS)
    written: Any = None
    try:
        about = json.loads(first.strip().removeprefix("[").removesuffix(","))["args"]
        written = about["format"]
        is_valid = written != TRACE_FORMAT or _is_header(about)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise OptionError(f"{path} is damaged: its first line is incomplete.")
    if written != TRACE_FORMAT:
        raise OptionError(
            f"{path} has format {written!r}; this version of Hookline reads format {TRACE_FORMAT}."
        )


def merge(paths: Sequence[Path], out: Path) -> int:
    """Merge the traces of several ranks into one file, on one clock, and return the number of records.

    Processes of one machine share its clock. Times of another machine are shifted by the time of day.
    """
    for path in paths:
        check_trace(path)
    if out.resolve() in [path.resolve() for path in paths]:
        raise OptionError(f"{out} is one of the traces to merge; name another file.")
    if out.exists() and not (out.is_file() and is_trace(out)):
        raise OptionError(f"{out} exists and is not a trace; it is not overwritten.")
    count = 0
    temporary = out.with_name(f".{out.name}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for record in _on_one_clock(paths):
                file.write(("[" if count == 0 else ",\n") + json.dumps(record, separators=(",", ":")))
                count += 1
            file.write("\n]\n")
        temporary.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OptionError(f"{out} could not be written: {error.strerror or error}.") from error
    return count


def _on_one_clock(paths: Sequence[Path]) -> Iterator[TraceRecord]:
    basis = None
    for path in paths:
        shift = 0.0
        for record in read_trace(path):
            if record["name"] == "hookline" and record.get("ph") == "M":
                offset = record["args"]["unix_ns"] - record["args"]["clock_ns"]
                basis = offset if basis is None else basis
                # on one machine the offsets differ only by the time between the two readings, so do not shift
                shift = (offset - basis) / 1e3 if abs(offset - basis) > 10_000_000 else 0.0
            if _is_time(record.get("ts")) and shift:
                record["ts"] = round(record["ts"] + shift, 3)
            yield record
