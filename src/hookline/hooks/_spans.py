"""Spans of a run, made from the table of events: what lies between two events, and the calls of listeners.

Rare events (a run, an epoch, a validation, a checkpoint) are always traced. Those of every batch are traced
in samples (`_span_sample`), so that they cost nothing in other steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hookline.engine.binding import Caller
from hookline.engine.cost import OFTEN
from hookline.engine.events import BRANCHES, Event
from hookline.engine.hook_list import Entry
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.engine.table import EventPair
from hookline.hooks._span_sample import Node, Roles, Sample, attributes, describe_call, failure_of
from hookline.util.text import mask_text

OVERLAPPING = ("save", "own")
"""Branches whose pairs may end later than what they began in: a thread may write a checkpoint, and declared
events begin inside the call that emits them. The span of the run is their parent.
"""
FIRST_DECLARED = 100
"""Occurrences of a declared event after which it is known whether it comes more often than sampled steps."""
LONGEST_STACK = 8000
"""Characters of a traceback."""
log = logging.getLogger("hookline")
Durations = Callable[[str, float, dict[str, Any]], None]
"""Takes the name of a span, its seconds, and what tells it from others of the name."""


class SpanIds:
    """Ids from the operating system. OpenTelemetry's own come from `random`: they would change the random
    numbers of the program, and repeat where it sets the same seed.
    """

    def generate_span_id(self) -> int:
        """Return 64 random bits, not all zero."""
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        """Return 128 random bits, not all zero."""
        return int.from_bytes(os.urandom(16), "big") or 1

    def is_trace_id_random(self) -> bool:
        """Return True, which samplers rely on."""
        return True


@dataclass(slots=True, eq=False)
class Frame:
    """A span that is open."""

    name: str
    """The name of its histogram, which is that of the span but for the run."""
    span: Any
    context: Any
    token: Any
    start: int
    is_call: bool = False
    key: str = ""
    """The path of a checkpoint, which tells two pairs from each other that are open at the same time."""
    labels: dict[str, Any] = field(default_factory=dict)
    """The attributes of its duration."""


class RunSpans:
    """The spans of one run. It is a tracer of the plan for the events that do not come with every batch.

    Each span is the current one of OpenTelemetry's context while it is open, so that spans of the user's code
    are inside it.
    """

    def __init__(
        self,
        tracer: Any,
        state: Any,
        entry: Entry,
        common: dict[str, Any],
        durations: Durations,
        every: int = 50,
    ) -> None:
        """Take an OpenTelemetry tracer. entry: the hook, whose calls are left out. common: attributes."""
        self.plan: Plan = state.trainer.plan
        self.state, self._tracer, self._entry = state, tracer, entry
        self._common, self._durations = common, durations
        self.roles = Roles(self.plan.table)
        self.sample = Sample(self, every)
        self._offset = time.time_ns() - time.perf_counter_ns()
        """Makes the time of day from a clock that never goes back."""
        self._stack: list[Frame] = []
        self._overlapping: list[Frame] = []
        self._declared: dict[str, tuple[int, int]] = {}
        """For each declared event: how often it was traced, and the step of the first time."""
        self.frequent: set[str] = set()
        """Declared events that come so often that they are traced in sampled steps only."""
        self._broken = False
        self._on_teardown: Callable[[], None] = lambda: None
        self.is_tearing_down = False

    def now(self) -> int:
        """Return the nanoseconds of the clock of all spans."""
        return time.perf_counter_ns() + self._offset

    @property
    def is_on(self) -> bool:
        """Whether the hook is switched on."""
        return self._entry.enabled and not self._broken

    def traces(self, listener: Listener) -> bool:
        """Return whether the calls of a listener have spans: not those of this hook."""
        return listener.owner is not self._entry.hook

    # ---- from set-up to teardown ---------------------------------------------------------------------------

    def start(self, parent: Any, on_teardown: Callable[[], None]) -> None:
        """Begin the span of the run inside the context `parent`, and trace from the next event on."""
        self._on_teardown = on_teardown
        self._push("run", {}, parent, title=f"run {self.state.stage}")
        self.plan.attach(self)
        if self._timer_samples:
            self.state.timer.observers.append(self.sample)

    @property
    def _timer_samples(self) -> bool:
        """Whether the loop begins and ends the samples of observers; otherwise events do."""
        return self.state.timer is not None and self.state.timer.takes_samples

    @property
    def root(self) -> Any:
        """The span of the run."""
        return self._stack[0].span

    def close(self) -> None:
        """End all spans and stop tracing. A second call does nothing."""
        s = self.state
        if not self._stack:
            return
        self.plan.detach(self)
        if s.timer is not None and self.sample in s.timer.observers:
            s.timer.observers.remove(self.sample)
        with self.guard():
            self.sample.end()
            while self._overlapping:
                self._end(self._overlapping.pop())
            counts = {"hookline.epoch": s.epoch, "hookline.step": s.step}
            self.root.set_attributes({**counts, "hookline.status": s.status, "hookline.resumed": s.resumed})
            while self._stack:
                self._pop(self._stack[-1])
        self._stack.clear()

    def fail(self, error: BaseException) -> None:
        """Mark the open spans as failed, and record the error in the innermost one and in the run's."""
        self.sample.end(error)
        for frame in self._stack[1:]:
            self._set_error(frame.span, error)
        for frame in {id(each): each for each in (self._stack[0], self._stack[-1])}.values():
            self._record(frame.span, error)

    # ---- spans ---------------------------------------------------------------------------------------------

    def _push(
        self, name: str, about: dict[str, Any], parent: Any = None, title: str = "", **more: Any
    ) -> Frame:
        """Begin a span inside the context `parent`, by default that of the innermost span."""
        from opentelemetry import context, trace

        start = self.now()
        inside = parent if not self._stack else parent or self._stack[-1].context
        span = self._tracer.start_span(
            title or name, context=inside, start_time=start, attributes={**self._common, **about}
        )
        made = trace.set_span_in_context(span, inside)
        frame = Frame(name, span, made, context.attach(made), start, **more)
        self._stack.append(frame)
        return frame

    def _pop(self, frame: Frame, error: BaseException | None = None) -> None:
        """End a span, and those inside it that did not end."""
        if frame not in self._stack:
            return
        while self._stack[-1] is not frame:
            self._leave_context(self._stack[-1])
            self._end(self._stack.pop())
        self._leave_context(self._stack.pop())
        self._end(frame, error)

    def _end(self, frame: Frame, error: BaseException | None = None) -> None:
        if error is not None:
            self._record(frame.span, error)
        end = self.now()
        frame.span.end(end)
        if not frame.is_call:
            self._durations(frame.name, (end - frame.start) / 1e9, frame.labels)
        elif frame.labels:
            self._durations("hook", (end - frame.start) / 1e9, frame.labels)

    @staticmethod
    def _leave_context(frame: Frame) -> None:
        from opentelemetry import context

        if frame.token is not None:
            context.detach(frame.token)

    def _set_error(self, span: Any, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {mask_text(str(error))}"))

    def _record(self, span: Any, error: BaseException) -> None:
        """Mark a span as failed and add the exception, without secrets."""
        self._set_error(span, error)
        stack = mask_text("".join(traceback.format_exception(error)), LONGEST_STACK)
        span.add_event(
            "exception",
            {
                "exception.type": type(error).__name__,
                "exception.message": mask_text(str(error)),
                "exception.stacktrace": stack,
            },
            timestamp=self.now(),
        )

    def emit(self, nodes: list[Node]) -> None:
        """Make the spans of a sample, inside the innermost span that is open."""
        from opentelemetry import trace

        with self.guard():
            contexts: list[Any] = []
            innermost = {id(node.error): index for index, node in enumerate(nodes)}
            for index, node in enumerate(nodes):
                inside = self._stack[-1].context if node.parent < 0 else contexts[node.parent]
                span = self._tracer.start_span(
                    node.name,
                    context=inside,
                    start_time=node.start,
                    attributes={**self._common, **node.about},
                )
                contexts.append(trace.set_span_in_context(span, inside))
                if node.error is not None:
                    is_innermost = innermost[id(node.error)] == index
                    (self._record if is_innermost else self._set_error)(span, node.error)
                span.end(node.end)
                seconds = (node.end - node.start) / 1e9
                if node.hook:
                    self._durations("hook", seconds, _hook_of(node.about))
                elif "hookline.receiver" not in node.about:
                    self._durations(node.name, seconds, {})

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Stop tracing after an error of our own or of OpenTelemetry: it must not end the run."""
        try:
            yield
        except Exception as error:
            if not self._broken:
                self._broken = True
                log.warning("OpenTelemetry: tracing stops (%s); the run continues", type(error).__name__)

    # ---- the tracer ----------------------------------------------------------------------------------------

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Return the call of a listener with its span, if the event does not come with every batch."""
        event = listener.event
        if event.inside in (*OFTEN, "own") or event.action or not self.traces(listener):
            return call
        name, about = describe_call(listener)
        labels = _hook_of(about) if listener.receiver == "H" else {}

        def traced(s: Any) -> Any:
            frame = self._enter(name, event, s, about, is_call=True, labels=labels)
            error: BaseException | None = None
            try:
                return call(s)
            except BaseException as raised:
                error = failure_of(raised)
                raise
            finally:
                self._leave(frame, error)
                error = None

        return traced

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot of an event that does not come with every batch, with what it does to the spans."""
        if event.inside in OFTEN or event.name in self.frequent:
            begins_samples = event.name == "on_train_batch_start" and self.sample.due < math.inf
            return self._sampling(event, slot) if begins_samples and not self._timer_samples else slot
        if event.inside == "own":
            self.roles = Roles(self.plan.table)  # it may have been declared since
        roles = self.roles

        def traced(s: Any) -> Any:
            frame = self._before(event, roles, s)
            error: BaseException | None = None
            try:
                return slot(s)
            except BaseException as raised:
                error = failure_of(raised)
                raise
            finally:
                self._after(event, roles, frame, s, error)
                error = None

        return traced

    def _sampling(self, event: Event, slot: Caller) -> Caller:
        """Return the first slot of a batch in a loop that is not Hookline's: it begins the samples."""

        def sampling(s: Any) -> Any:
            if self.sample.is_open or s.step < self.sample.due:
                return slot(s)
            self.sample.begin()
            return getattr(self.plan, event.name)(s) if self.sample.is_open else slot(s)

        return sampling

    def _enter(
        self, name: str, event: Event, s: Any, about: dict[str, Any] | None = None, **more: Any
    ) -> Frame | None:
        with self.guard():
            if self.is_on and self._stack:
                return self._push(name, {**(about or {}), **attributes(s, event)}, **more)
        return None

    def _leave(self, frame: Frame | None, error: BaseException | None = None) -> None:
        if frame is not None:
            with self.guard():
                self._pop(frame, error)

    def _before(self, event: Event, roles: Roles, s: Any) -> Frame | None:
        if event.name == "teardown":
            self.is_tearing_down = True
        begins, ends = roles.begins.get(event.name), roles.ends.get(event.name)
        if begins is not None:
            is_apart = event.inside in OVERLAPPING
            parent = self._stack[0].context if is_apart and self._stack else None
            return self._enter(begins.name, event, s, parent=parent, key=_key(event, s) if is_apart else "")
        if roles.spans_itself(event):
            return self._enter(event.name, event, s)
        with self.guard():
            if not self.is_on or not self._stack:
                return None
            if ends and event.inside in OVERLAPPING:
                return self._resume(ends, _key(event, s))
            if event.name == "on_exception":
                self.fail(s.exception)
            elif not ends:
                self._stack[-1].span.add_event(event.name, attributes(s, event), timestamp=self.now())
        return None

    def _after(
        self, event: Event, roles: Roles, frame: Frame | None, s: Any, error: BaseException | None
    ) -> None:
        begins, ends = roles.begins.get(event.name), roles.ends.get(event.name, [])
        with self.guard():
            if begins is not None and frame is not None and event.inside in OVERLAPPING:
                self._stack.remove(frame)
                self._leave_context(frame)
                self._overlapping.append(frame)
            elif begins is None:
                if frame is not None:
                    self._pop(frame, s.exception if "exception" in event.facts else error)
                for pair in ends if frame is None else ():
                    self._end_pair(pair)
            if begins is not None and f"{event.inside} batch" in BRANCHES and self.is_on:
                self.sample.begin_pass(event.inside)
            if event.inside == "own" and begins is None:
                self._count_declared(event, ends, s.step)
        if event.name == "teardown":
            self.is_tearing_down = False
            with self.guard():
                self._on_teardown()

    def _count_declared(self, event: Event, ends: list[EventPair], step: int) -> None:
        """Leave a declared event, and the begin of what it ends, to sampled steps if it comes often."""
        count, first = self._declared.get(event.name, (0, step))
        self._declared[event.name] = (count + 1, first)
        if count + 1 < FIRST_DECLARED:
            return
        if step - first >= FIRST_DECLARED * self.sample.every:
            del self._declared[event.name]
            return
        self.frequent |= {event.name, *(pair.begin.name for pair in ends)}
        self.plan.detach(self)
        self.plan.attach(self)

    def _end_pair(self, pair: EventPair) -> None:
        if self.sample.is_open and self.sample.branch == pair.begin.inside:
            self.sample.end()  # the pass had no batch, or its first batch has failed
        for frame in reversed(self._stack[1:]):
            if frame.name == pair.name and not frame.is_call:
                self._pop(frame)
                return

    def _resume(self, ends: list[EventPair], key: str) -> Frame | None:
        """Make the span of a pair that overlaps others the innermost one again, at its end."""
        from opentelemetry import context

        names = [pair.name for pair in ends]
        for frame in self._overlapping:
            if frame.name in names and frame.key in (key, ""):
                self._overlapping.remove(frame)
                frame.token = context.attach(frame.context)
                self._stack.append(frame)
                return frame
        return None


def _key(event: Event, s: Any) -> str:
    return str(s.path) if "path" in event.facts else ""


def _hook_of(about: dict[str, Any]) -> dict[str, Any]:
    return {name: about[name] for name in ("hookline.hook", "hookline.event")}
