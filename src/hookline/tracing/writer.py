"""Write a trace file: a JSON array with one object per line. Viewers load it even if it is cut off."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import IO, Any

from hookline._version import __version__
from hookline.engine.cost import OFTEN
from hookline.engine.events import Event, EventTable
from hookline.util.errors import OptionError
from hookline.util.text import redact

# ---- The recorded facts


COUNTER_SOURCES: dict[str, str] = {
    "step": "s.step",
    "epoch": "s.epoch",
    "batch_idx": "s.batch_idx",
    "batches_seen": "s.batches_seen",
    "samples_seen": "s.samples_seen",
    "epochs_seen": "s.epochs_seen",
    "lr": "s.lr",
    "sanity_checking": "s.sanity_checking",
    "status": "s.status",
    "tokens_seen": "s.tokens_seen if 'tokens_seen' in p.wanted else None",
}
"""Facts of every event; written when they change."""
FACT_SOURCES: dict[str, str] = {
    "s.loss": "s.last_loss",
    "s.path": "recordable(s.path)",
    "s.window_loss": "s.mean_of_window()",
    "s.used_lr": "s.used_lr",
    "s.grad_norm": "s.norm_on_device() if 'grad_norm' in p.wanted else s.norm_tensor",
    "s.metrics": "dict(s.metrics.raw())",
    "s.batch_metrics": "s._batch_values(s.returned)",
    "s.row": "dict(s.row.raw())",
    **{
        f"s.{name}": f"s.{name}"
        for name in (
            "dataloader_idx",
            "dataloader_name",
            "optimizer_idx",
            "reason",
            "stage",
            "saved_step",
            "metric",
            "gradient_clip_val",
            "gradient_clip_algorithm",
        )
    },
}
"""Expressions for an event's own facts that do not read from a device; tensors are read when written."""

FactReader = Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
NOT_RECORDABLE = object()
DEEPEST_RECORDED = 20
"""The deepest nesting of containers that is recorded; containers may hold themselves."""


def own_facts(event: Event, table: EventTable) -> dict[str, str]:
    """Return the event's recorded facts besides the counters: key -> the expression that a listener reads.

    A key is the fact's name. A counter that has another meaning at this event, such as the learning rate that
    an update has used, has a separate key: `used_lr`.
    """
    kept = {}
    for name in event.facts:
        fact = table.fact(name, event)
        expression = table.expression(fact, event) if fact is not None else ""
        if expression in FACT_SOURCES or event.inside == "own":
            kept[expression.removeprefix("s.") if name in COUNTER_SOURCES else name] = expression
    return kept


def make_reader(event: Event, table: EventTable, plan: Any) -> FactReader:
    """Compile `lambda s: ((counters), (own facts))` from expressions of the table and of this module."""
    own = [
        FACT_SOURCES.get(expression, f"recordable({expression})")
        for expression in own_facts(event, table).values()
    ]
    source = f"lambda s: (({', '.join(COUNTER_SOURCES.values())},), ({', '.join(own)}{',' if own else ''}))"
    made: FactReader = eval(
        compile(source, "<hookline trace>", "eval"), {"p": plan, "recordable": recordable}
    )
    return made


def recordable(value: Any, depth: int = 0) -> Any:
    """Return plain data for JSON, or NOT_RECORDABLE for other objects. NaN and infinity become text."""
    if isinstance(value, str):
        return redact(value)  # the path of a checkpoint may be a URL
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if depth > DEEPEST_RECORDED:
        return NOT_RECORDABLE
    if isinstance(value, Mapping):
        pairs = {str(key): recordable(each, depth + 1) for key, each in value.items()}
        return {key: each for key, each in pairs.items() if each is not NOT_RECORDABLE}
    if isinstance(value, list | tuple):
        parts = [recordable(each, depth + 1) for each in value]
        return NOT_RECORDABLE if any(each is NOT_RECORDABLE for each in parts) else parts
    is_scalar = getattr(value, "ndim", None) == 0 or getattr(value, "shape", None) == (1,)
    if not is_scalar:  # only a tensor or array of one number is recorded
        return NOT_RECORDABLE
    try:
        return recordable(value.item())
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a tensor on the meta device
        return NOT_RECORDABLE


def parse_number(value: Any) -> Any:
    """Convert the text of NaN and infinity back to a number."""
    return float(value) if value in ("nan", "inf", "-inf") else value


# ---- Spans around the events: batches, epochs, validations


OPENS = {
    "on_train_epoch_start": "epoch",
    "on_validation_start": "validation",
    "on_test_start": "test",
    "on_predict_start": "predict",
}
CLOSES = {
    "on_train_epoch_end": "epoch",
    "on_validation_end": "validation",
    "on_validation_abandoned": "validation",
    "on_test_end": "test",
    "on_predict_end": "predict",
}


MARGIN = 20
"""Nanoseconds that a span is longer than its contents, on either side.

Viewers read times as floating point numbers, and drop a record that seems to end after its span.
"""


@dataclass(slots=True)
class Span:
    """A span of time, from its first event to its last one."""

    name: str
    start: int
    end: int
    step: int
    epoch: int = 0
    batch: int = -1
    is_real: bool = True
    """False for a batch that was only requested: the loader may have no more."""


class Spans:
    """Turns events into spans. It takes the events in the order in which they end."""

    def __init__(self) -> None:
        self._batch: Span | None = None
        self._around: dict[str, Span] = {}

    def take(
        self, name: str, is_often: bool, start: int, end: int, counters: tuple[int, ...]
    ) -> Sequence[Span]:
        """Take an event and return the spans that are complete by then.

        is_often: the event belongs to a batch. counters: begin with step, epoch, batch_idx.
        """
        batch = self._batch
        if is_often:
            if batch is not None and batch.batch == counters[2] and batch.epoch == counters[1]:
                batch.end, batch.is_real = end + MARGIN, True
                return ()
            self._batch = Span(
                f"batch {counters[2]}",
                start - MARGIN,
                end + MARGIN,
                counters[0],
                counters[1],
                counters[2],
                name != "on_before_batch_fetch",
            )
            return () if batch is None or not batch.is_real else (batch,)
        over: list[Span] = []
        opened, closed = OPENS.get(name), CLOSES.get(name)
        if (opened or closed) and batch is not None:
            over += [batch] if batch.is_real else []
            self._batch = None
        if opened:
            title = f"epoch {counters[1]}" if opened == "epoch" else opened
            self._around[opened] = Span(title, start - 2 * MARGIN, end, counters[0])
        for outer in self._around.values():
            outer.end = max(outer.end, end + 2 * MARGIN)
        if closed and (span := self._around.pop(closed, None)) is not None:
            over.append(span)
        return over

    def rest(self) -> list[Span]:
        """Close and return the spans that are open when the trace ends."""
        spans = [
            *([self._batch] if self._batch is not None and self._batch.is_real else []),
            *self._around.values(),
        ]
        last = max((each.end for each in spans), default=0) + MARGIN
        self._batch, self._around = None, {}
        for span in spans:
            span.end = last if span.batch < 0 else span.end
        return spans


# ---- The file


TRACE_FORMAT = 1
FIRST_CHARACTERS = '[{"name":"hookline","ph":"M"'
"""The first characters of a trace file."""
_dump = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_quoted = functools.lru_cache(maxsize=1024)(_dump)
_COUNTERS = [f',"{name}":' if name != "step" else "" for name in COUNTER_SOURCES]
NORM = ',"grad_norm":'
RecordedFacts = tuple[tuple[Any, ...], tuple[Any, ...]]


def encode_fact(value: Any) -> str | None:
    """Return plain data as JSON, None for other objects. Common types come first: this is the main cost."""
    kind = type(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    if kind is str:
        return _quoted(value)
    if kind is dict:
        parts = [
            f"{_quoted(str(key))}:{text}"
            for key, each in value.items()
            if (text := encode_fact(each)) is not None
        ]
        return f"{{{','.join(parts)}}}"
    known = recordable(value)
    return None if known is NOT_RECORDABLE else _dump(known)


class EventKind:
    """The constant part of all records of one event."""

    __slots__ = ("event", "head", "is_often", "prefixes")

    def __init__(self, event: Event, head: str, names: Iterable[str]) -> None:
        self.event = event
        self.head = head
        self.is_often = event.inside in OFTEN and event.name != "on_train_metrics"
        """Whether the event belongs to a batch; on_train_metrics also happens at an epoch's end."""
        self.prefixes = [f",{_dump(name)}:" for name in names]


class TraceFile:
    """Writes records as lines. Times are of this machine's clock, which its processes share."""

    def __init__(self, path: Path, about: dict[str, Any], append: bool) -> None:
        self.path = path
        self.pid = int(about["rank"])
        self._spans = Spans()
        self._known: tuple[Any, ...] = ()
        check_writable(path)
        clock = {"clock_ns": time.perf_counter_ns(), "unix_ns": time.time_ns()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_first = not (append and _reopen(path))
            self._file: IO[str] = path.open("w" if is_first else "a", encoding="utf-8")
            self._separator = "[" if is_first else ",\n"
            self.lines(
                [
                    self.meta("hookline", {"format": TRACE_FORMAT, "version": __version__, **clock, **about}),
                    self.meta("process_name", {"name": f"rank {self.pid}"}),
                ]
            )
        except OSError as error:
            raise OptionError(f"trace={str(path)!r} cannot be written: {error}") from error

    def meta(self, name: str, args: dict[str, Any]) -> str:
        """Return a line about the trace itself."""
        return f'{{"name":{_dump(name)},"ph":"M","pid":{self.pid},"tid":0,"args":{_dump(recordable(args))}}}'

    def head(self, name: str, cat: str) -> str:
        """Return the constant beginning of a call's or an event's line."""
        return f'{{"name":{_dump(name)},"cat":{_dump(cat)},"ph":"X","pid":{self.pid},"tid":0,"args":{{'

    def add_event(
        self, lines: list[str], kind: EventKind, start: int, end: int, facts: RecordedFacts
    ) -> None:
        """Add the line of an event, after the spans that ended before it. Times are in nanoseconds."""
        counters, own = facts
        args = f'"step":{counters[0]}' if counters == self._known else self._changed(counters)
        for prefix, value in zip(kind.prefixes, own, strict=True):
            # a norm of None was not computed, so it is left out
            if (text := encode_fact(value)) is not None and (value is not None or prefix != NORM):
                args += prefix + text
        for span in self._spans.take(kind.event.name, kind.is_often, start, end, counters):
            lines.append(self.span(span.name, span.start, span.end, span.step))
        lines.append(f'{kind.head}{args}}},"ts":{start}e-3,"dur":{end - start}e-3}}')

    def _changed(self, counters: tuple[Any, ...]) -> str:
        known = self._known or (NOT_RECORDABLE,) * len(counters)
        self._known = counters
        args = f'"step":{counters[0]}'
        for prefix, value, before in zip(_COUNTERS, counters, known, strict=True):
            # a learning rate in a tensor changes in place, so its value at that moment is lost; leave it out
            if (
                value is not before
                and value is not None
                and value != before
                and type(value) in (int, float, str, bool)
            ):
                args += f"{prefix}{encode_fact(value)}" if prefix else ""
        return args

    def span(self, name: str, start: int, end: int, step: int, cat: str = "span") -> str:
        """Return the line of a span, which is not an event."""
        return f'{self.head(name, cat)}"step":{step}}},"ts":{start}e-3,"dur":{end - start}e-3}}'

    def lines(self, lines: list[str]) -> None:
        """Append lines and flush them to the operating system, so that a kill does not lose them."""
        if lines:
            self._file.write(self._separator + ",\n".join(lines))
            self._separator = ",\n"
            self._file.flush()

    def close(self) -> None:
        """Close the open spans and the array."""
        try:
            self.lines([self.span(each.name, each.start, each.end, each.step) for each in self._spans.rest()])
            self._file.write("\n]\n")
        finally:
            self._file.close()


def check_writable(path: Path) -> None:
    """Raise if writing would overwrite a file that is not a trace."""
    if path.is_dir():
        raise OptionError(
            f"trace={str(path)!r} is a directory; name a file in it, such as {path / 'trace.json'}."
        )
    if path.is_file() and path.stat().st_size and not is_trace(path):
        raise OptionError(
            f"trace={str(path)!r} exists and is not a trace of Hookline; it is not overwritten. Name another "
            "file."
        )


def is_trace(path: Path) -> bool:
    """Return whether the file is a trace of Hookline."""
    with path.open("rb") as file:
        return file.read(len(FIRST_CHARACTERS)) == FIRST_CHARACTERS.encode()


def _reopen(path: Path) -> bool:
    """Cut off the end of the array, or an incomplete line, so that lines can follow.

    Return False if there is nothing to append to.
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
