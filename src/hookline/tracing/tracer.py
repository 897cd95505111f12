"""The tracer wraps calls and events: two clock reads and one append each; it writes in chunks."""

from __future__ import annotations

import logging
import time
from typing import Any

from hookline.engine.binding import Caller
from hookline.engine.events import RECEIVERS, Event
from hookline.engine.explain import explain_plan
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.tracing.writer import EventKind, FactReader, TraceFile, make_reader, own_facts

MOST_PENDING = 4096
"""The largest number of records in memory."""
FLUSH_INTERVAL = 1_000_000_000
"""Nanoseconds after which records are written, so that a killed run loses at most that."""
log = logging.getLogger("hookline")


class Tracer:
    """Records every event and call of one plan after `Plan.attach`."""

    def __init__(self, plan: Plan, file: TraceFile, stage: str) -> None:
        self._plan = plan
        self._file = file
        self._stage = stage
        self._kinds: list[str | EventKind] = []
        """By the number in a record: an event, or the beginning of a call's line."""
        self._numbers: dict[tuple[str, ...], int] = {}
        self._readers: dict[str, FactReader] = {}
        self._records: list[tuple[Any, ...]] = []
        self._due = 0
        self._closed = False
        self.failed = False

    def write_plan(self, partial: bool = False) -> None:
        """Write the planned listeners of each event, for a comparison with the calls.

        partial: the trace starts in the middle of the run.
        """
        rows = [
            {key: row[key] for key in ("branch", "event", "listeners")}
            for row in explain_plan(self._plan, self._stage).data()
            if row["listeners"]
        ]
        self._put([self._file.meta("hookline_plan", {"verb": self._stage, "partial": partial, "rows": rows})])

    # ---- wrappers ------------------------------------------------------------------------------------------

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Wrap the call of a listener."""
        kind = RECEIVERS[listener.receiver].removesuffix("s")
        number = self._number(kind, listener.name, listener.event.name)
        add, clock = self._records.append, time.perf_counter_ns

        def traced(s: Any) -> Any:
            start = clock()
            try:
                return call(s)
            finally:
                add((number, start, clock(), s.step))

        return traced

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Wrap an event; its facts are read before the listeners are called."""
        number = self._number("event", event.name, event=event)
        if event.name not in self._readers:  # compiled once, however often the slot is composed
            self._readers[event.name] = make_reader(event, self._plan.table, self._plan)
        read = self._readers[event.name]
        records, clock = self._records, time.perf_counter_ns
        add = records.append

        def traced(s: Any) -> Any:
            start = clock()
            facts = read(s)
            try:
                return slot(s)
            finally:
                end = clock()
                add((number, start, end, facts))
                if end > self._due or len(records) > MOST_PENDING:
                    self.flush()

        if event.name != "prepare_data":
            return traced

        def first(s: Any) -> Any:
            self.write_plan()  # by now all hooks are added
            return traced(s)

        return first

    def _number(self, *key: str, event: Event | None = None) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._kinds)
            if event is None:
                cat, name, called_at = key
                self._kinds.append(self._file.head(name, cat) + f'"event":"{called_at}","step":')
            else:
                cat = "action" if event.action else "event"
                self._kinds.append(
                    EventKind(event, self._file.head(event.name, cat), own_facts(event, self._plan.table))
                )
        return self._numbers[key]

    # ---- writing -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the records, on the thread that trains; the trace shows how long that takes."""
        began = time.perf_counter_ns()
        records = self._records[:]
        self._records.clear()  # the same list stays, because the wrappers append to it
        self._due = began + FLUSH_INTERVAL
        lines: list[str] = []
        for number, start, end, about in records:
            kind = self._kinds[number]
            if type(kind) is EventKind:
                self._file.add_event(lines, kind, start, end, about)
            else:
                lines.append(f'{kind}{about}}},"ts":{start}e-3,"dur":{end - start}e-3}}')
        if records:
            lines.append(
                self._file.span(
                    "writing the trace", began, time.perf_counter_ns(), _step(records[-1]), "trace"
                )
            )
            self._put(lines)

    def _put(self, lines: list[str]) -> None:
        if self.failed or self._closed:  # an event in which a hook stops the trace ends after the trace
            return
        try:
            self._file.lines(lines)
        except OSError as error:  # a full disk ends the trace, not the run
            self.failed = True
            log.warning("The trace %s ends here, because writing to it failed: %s", self._file.path, error)
            self._plan.detach(self)

    def close(self) -> None:
        """Write the remaining records and close the file."""
        self._plan.detach(self)
        self.flush()
        self._closed = True
        try:
            self._file.close()
        except OSError as error:
            if not self.failed:
                log.warning("The end of the trace %s could not be written: %s", self._file.path, error)


def _step(record: tuple[Any, ...]) -> int:
    last = record[3]
    return int(last if isinstance(last, int) else last[0][0])
