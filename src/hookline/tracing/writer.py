"""The file of a trace: one JSON object per line in an array that need not be closed, so that a killed run's
file loads too.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import IO, Any

from hookline._version import __version__
from hookline.budget import OFTEN
from hookline.errors import OptionError
from hookline.events import Event
from hookline.tracing.facts import ABSENT, COUNTERS, plain
from hookline.tracing.spans import Spans

FORMAT = 1
MARK = '[{"name":"hookline","ph":"M"'
"""How the file of a trace begins."""
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_quoted = functools.lru_cache(maxsize=1024)(_encode)
_COUNTERS = [f',"{name}":' if name != "step" else "" for name in COUNTERS]
NORM = ',"grad_norm":'
Facts = tuple[tuple[Any, ...], tuple[Any, ...]]


def as_json(value: Any) -> str | None:
    """Plain data as text; None for what is none. The common kinds come first: most of a
    trace's cost is here.
    """
    kind = type(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    if kind is str:
        return _quoted(value)
    if kind is dict:
        parts = [
            f"{_quoted(str(key))}:{text}"
            for key, each in value.items()
            if (text := as_json(each)) is not None
        ]
        return f"{{{','.join(parts)}}}"
    known = plain(value)
    return None if known is ABSENT else _encode(known)


class Kind:
    """What all records of one event have in common."""

    __slots__ = ("event", "head", "is_often", "prefixes")

    def __init__(self, event: Event, head: str, names: Iterable[str]) -> None:
        self.event = event
        self.head = head
        self.is_often = event.inside in OFTEN and event.name != "on_train_metrics"
        """Whether it belongs to a batch; metrics also go out at an epoch's end."""
        self.prefixes = [f",{_encode(name)}:" for name in names]


class TraceFile:
    """Writes chunks of records as lines. Times are nanoseconds of this machine's clock, so its processes lie
    side by side.
    """

    def __init__(self, path: Path, about: dict[str, Any], goes_on: bool) -> None:
        self.path = path
        self.pid = int(about["rank"])
        self._spans = Spans()
        self._known: tuple[Any, ...] = ()
        check_writable(path)
        clock = {"clock_ns": time.perf_counter_ns(), "unix_ns": time.time_ns()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_first = not (goes_on and _reopen(path))
            self._file: IO[str] = path.open("w" if is_first else "a", encoding="utf-8")
            self._separator = "[" if is_first else ",\n"
            self.lines(
                [
                    self.meta("hookline", {"format": FORMAT, "version": __version__, **clock, **about}),
                    self.meta("process_name", {"name": f"rank {self.pid}"}),
                ]
            )
        except OSError as error:
            raise OptionError(f"trace={str(path)!r} cannot be written: {error}") from error

    def meta(self, name: str, args: dict[str, Any]) -> str:
        """A line about the trace itself."""
        return f'{{"name":{_encode(name)},"ph":"M","pid":{self.pid},"tid":0,"args":{_encode(plain(args))}}}'

    def head(self, name: str, cat: str) -> str:
        """The part of a call's or an event's line that is always the same."""
        return f'{{"name":{_encode(name)},"cat":{_encode(cat)},"ph":"X","pid":{self.pid},"tid":0,"args":{{'

    def add_event(self, lines: list[str], kind: Kind, start: int, end: int, facts: Facts) -> None:
        """An event that is over, after the spans that ended before it. Times are written as a number of
        nanoseconds.
        """
        counters, own = facts
        args = f'"step":{counters[0]}' if counters == self._known else self._changed(counters)
        for prefix, value in zip(kind.prefixes, own, strict=True):
            if (text := as_json(value)) is not None and (
                value is not None or prefix != NORM
            ):  # nobody has measured it
                args += prefix + text
        for each in self._spans.take(kind.event.name, kind.is_often, start, end, counters):
            lines.append(self.span(each.name, each.start, each.end, each.step))
        lines.append(f'{kind.head}{args}}},"ts":{start}e-3,"dur":{end - start}e-3}}')

    def _changed(self, counters: tuple[Any, ...]) -> str:
        known = self._known or (ABSENT,) * len(counters)
        self._known = counters
        args = f'"step":{counters[0]}'
        for prefix, value, before in zip(_COUNTERS, counters, known, strict=True):
            # a rate in a tensor is changed in place, so what it was at that moment is not known any more
            if (
                value is not before
                and value is not None
                and value != before
                and type(value) in (int, float, str, bool)
            ):
                args += f"{prefix}{as_json(value)}" if prefix else ""
        return args

    def span(self, name: str, start: int, end: int, step: int, cat: str = "span") -> str:
        """A stretch of time that is no event."""
        return f'{self.head(name, cat)}"step":{step}}},"ts":{start}e-3,"dur":{end - start}e-3}}'

    def lines(self, lines: list[str]) -> None:
        """Append, and hand everything to the operating system: it outlives this process."""
        if lines:
            self._file.write(self._separator + ",\n".join(lines))
            self._separator = ",\n"
            self._file.flush()

    def close(self) -> None:
        """Close the spans that are open, and the array."""
        try:
            self.lines([self.span(each.name, each.start, each.end, each.step) for each in self._spans.rest()])
            self._file.write("\n]\n")
        finally:
            self._file.close()


def check_writable(path: Path) -> None:
    """Refuse to write over what is no trace."""
    if path.is_dir():
        raise OptionError(
            f"trace={str(path)!r} is a directory; name a file in it, such as {path / 'trace.json'}."
        )
    if path.is_file() and path.stat().st_size and not is_trace(path):
        raise OptionError(
            f"trace={str(path)!r} exists and is no trace of Hookline; it is not written over. Name another "
            f"file."
        )


def is_trace(path: Path) -> bool:
    """Whether Hookline has written this file."""
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def _reopen(path: Path) -> bool:
    """Cut off the end of the array, or half a line, so that lines can follow; whether there is anything to go
    on from.
    """
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb+") as file:
        file.seek(max(0, path.stat().st_size - 1_000_000))
        at, tail = file.tell(), file.read()
        kept = tail.removesuffix(b"\n]\n")
        if not kept.endswith(b"}"):  # killed in the middle of a line
            kept = kept[: kept.rfind(b"},\n") + 1]
        file.truncate(at + len(kept))
        file.flush()
        os.fsync(file.fileno())
    return True
