"""Spans of a run, made from the table of events: what lies between two events, and the calls of listeners.

Rare events (a run, an epoch, a validation, a checkpoint) are always traced. Those of every batch are traced
in sampled steps only: a sample swaps their slots, so that they cost nothing in other steps.
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
from hookline.engine.events import BRANCHES, EVERY_STAGE, RECEIVERS, Event, EventTable
from hookline.engine.hook_list import Entry
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.engine.table import EventPair
from hookline.util.errors import StopTraining
from hookline.util.text import mask_text
from hookline.util.urls import shown

STEP = "step"
"""The span of a sampled step: an accumulation window and its update."""
TRAIN_BATCH = "train_batch"
"""A pair that every step has."""
STEP_BRANCHES = ("batch", "window", "update", "own")
"""The branches of the lifecycle whose events belong to a step. Declared events may come at any time; the
calls of their listeners are traced in sampled steps.
"""
OVERLAPPING = ("save",)
"""Branches whose pairs may end later than what they began in: a background thread writes a checkpoint."""
MOST_NODES = 500
"""Spans of one sample. A validation inside a step may have any number of batches."""
LONGEST_STACK = 8000
"""Characters of a traceback."""
FACTS = {"path": "hookline.path", "reason": "hookline.reason", "dataloader_name": "hookline.dataloader"}
"""Facts of single events that are attributes of their spans; those of the run are in `attributes`."""
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


class Roles:
    """What each event of a table does to the spans: it begins one, ends some, or is one by itself."""

    def __init__(self, table: EventTable) -> None:
        self.begins: dict[str, EventPair] = {}
        self.ends: dict[str, list[EventPair]] = {}
        for pair in table.pairs():
            self.begins[pair.begin.name] = pair
            for end in pair.ends:
                self.ends.setdefault(end.name, []).append(pair)
        self._names = {pair.name for pair in self.begins.values()}

    def spans_itself(self, event: Event) -> bool:
        """Return whether the slot of an event is a span: an action, unless a pair has its name."""
        return event.action and event.name not in self._names


def attributes(s: Any, event: Event) -> dict[str, Any]:
    """Return the attributes of a span that begins at this event, without a read from the device."""
    found = {"hookline.epoch": s.epoch, "hookline.step": s.step}
    if event.inside in OFTEN:
        found["hookline.batch"] = s.batch_idx
    for fact, name in FACTS.items():
        value = getattr(s, fact) if fact in event.facts else None
        if value is not None and value != "":
            found[name] = shown(value)
    return found


def describe_call(listener: Listener) -> tuple[str, dict[str, Any]]:
    """Return the name and the attributes of the span of a listener's call."""
    about = {
        "hookline.event": listener.event.name,
        "hookline.receiver": RECEIVERS[listener.receiver].removesuffix("s"),
    }
    if listener.receiver == "H":
        about["hookline.hook"] = listener.name
    return f"{listener.name}.{listener.event.name}", about


# ---- one sampled window ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    """A span of a sample: recorded with two reads of the clock, and made into a span later."""

    name: str
    about: dict[str, Any]
    start: int
    parent: int
    end: int = 0
    hook: str = ""
    """The event of a hook's call."""
    is_pair: bool = False
    error: BaseException | None = None


class Sample:
    """The spans of one step, or of the first batch of a pass over data. It observes the steps of a fit.

    It is a tracer of the plan, which composes slots with it; they replace those of the plan meanwhile.
    """

    def __init__(self, spans: RunSpans, every: int) -> None:
        """Take every, the steps from one sampled step to the next; 0: none."""
        self._spans, self._every = spans, every
        self.due: float = 0 if every else math.inf
        self.is_open = False
        self._branch = ""
        self._nodes: list[Node] = []
        self._stack: list[int] = []
        self._slots: dict[str, tuple[Caller, Caller]] = {}
        """For each event: the slot of the plan, and the slot with this tracer."""
        self._swapped: list[str] = []
        self._begun_at = 0

    @property
    def branch(self) -> str:
        """The branch whose first batch is sampled; empty for a step."""
        return self._branch

    def begin(self) -> None:
        """Begin the sample of a step."""
        s, plan = self._spans.state, self._spans.plan
        self.end()  # of a pass that failed and was caught
        self.due = s.step + self._every
        if self._spans.is_on:
            with self._spans.guard():
                self._open("", STEP_BRANCHES)
                self._begun_at = s.step
                self.enter(STEP, plan.table["on_step_end"], s, is_pair=True)

    def begin_pass(self, branch: str) -> None:
        """Begin the sample of the first batch of a pass over data, unless a step is being sampled."""
        if self._every and not self.is_open and self._spans.is_on:
            self._open(branch, (f"{branch} batch",))

    def _open(self, branch: str, branches: tuple[str, ...]) -> None:
        plan = self._spans.plan
        self.is_open, self._branch = True, branch
        for event in plan.table:
            is_shared = branch and event.inside == "batch" and event.stages == EVERY_STAGE
            if event.inside not in branches and not is_shared:
                continue
            slot: Caller = getattr(plan, event.name)
            if event.name not in self._slots or self._slots[event.name][0] is not slot:
                self._slots[event.name] = (slot, plan.traced_slot(event.name, self))
            if self._slots[event.name][1] is not slot:
                setattr(plan, event.name, self._slots[event.name][1])
                self._swapped.append(event.name)

    def end(self, error: BaseException | None = None) -> None:
        """End the sample and make its spans. error: the one that ended the run in this step."""
        if not self.is_open:
            return
        plan, nodes = self._spans.plan, self._nodes
        slots = vars(plan)
        for name in self._swapped:
            slot, traced = self._slots[name]
            if slots.get(name) is traced:  # else the hooks have changed, and the slot was composed again
                setattr(plan, name, slot)
        left, is_step, s = self._stack, not self._branch, self._spans.state
        self.is_open, self._nodes, self._stack, self._swapped = False, [], [], []
        for index in left:
            nodes[index].end = self._spans.now()
        if error is not None and left:
            nodes[left[-1]].error = error
        if is_step and nodes:
            # a multiple of `every`, or the next update if this window made none
            step = s.step
            self.due = step - step % self._every + self._every - 1 if step > self._begun_at else step + 1
            nodes[0].about |= attributes(s, plan.table["on_step_end"])
        if not is_step or any(each.name == TRAIN_BATCH for each in nodes):  # else the loader had no batch
            self._spans.emit(nodes)

    # ---- records -------------------------------------------------------------------------------------------

    def enter(
        self,
        name: str,
        event: Event,
        s: Any,
        about: dict[str, Any] | None = None,
        hook: str = "",
        is_pair: bool = False,
    ) -> int:
        """Record the begin of a span; return its number, or -1 if the sample is full or over."""
        if len(self._nodes) >= MOST_NODES or not self.is_open:
            return -1
        with self._spans.guard():
            parent = self._stack[-1] if self._stack else -1
            found = {**(about or {}), **attributes(s, event)}
            self._nodes.append(Node(name, found, self._spans.now(), parent, hook=hook, is_pair=is_pair))
            self._stack.append(len(self._nodes) - 1)
            return len(self._nodes) - 1
        return -1

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """Record the end of a span, and of those inside it that did not end."""
        if index not in self._stack:  # a sample that is over, and -1
            return
        now = self._spans.now()
        self._nodes[index].error = error
        while self._stack:
            last = self._stack.pop()
            self._nodes[last].end = now
            if last == index:
                return

    def leave_pair(self, name: str) -> None:
        """Record the end of the innermost pair of this name."""
        for index in reversed(self._stack):
            if self._nodes[index].name == name and self._nodes[index].is_pair:
                self.leave(index)
                return

    # ---- the tracer ----------------------------------------------------------------------------------------

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Return the call of a listener with its span; actions have the span of their slot."""
        if not self._spans.traces(listener) or listener.event.action:
            return call
        name, about = describe_call(listener)
        hook = listener.event.name if listener.receiver == "H" else ""

        def traced(s: Any) -> Any:
            index, error = self.enter(name, listener.event, s, about, hook), None
            try:
                return call(s)
            except BaseException as raised:
                error = None if isinstance(raised, StopTraining) else raised
                raise
            finally:
                self.leave(index, error)

        return traced

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot of an event that begins, ends or is a span, with its records."""
        roles = self._spans.roles
        begins, ends = roles.begins.get(event.name), roles.ends.get(event.name, [])
        name = begins.name if begins else event.name if roles.spans_itself(event) else ""
        is_last = event.name == "on_step_end" or any(pair.begin.inside.endswith(" batch") for pair in ends)
        if event.inside == "own" or not (name or ends or is_last):
            return slot  # the pairs of declared events are traced at all times

        def traced(s: Any) -> Any:
            index = self.enter(name, event, s, is_pair=begins is not None) if name else -1
            try:
                return slot(s)
            finally:
                if not begins:
                    self.leave(index)
                for pair in ends:
                    self.leave_pair(pair.name)
                if is_last and bool(self._branch) == bool(ends):
                    self.end()

        return traced


# ---- the spans of a run ------------------------------------------------------------------------------------


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
        if self.state.timer is not None:
            self.state.timer.observers.append(self.sample)

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
            for frame in self._overlapping:
                self._end(frame)
            self.root.set_attributes(
                {"hookline.status": s.status, "hookline.step": s.step, "hookline.resumed": s.resumed}
            )
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
        span.set_status(Status(StatusCode.ERROR, mask_text(f"{type(error).__name__}: {error}")))

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
            for node in nodes:
                inside = self._stack[-1].context if node.parent < 0 else contexts[node.parent]
                span = self._tracer.start_span(
                    node.name,
                    context=inside,
                    start_time=node.start,
                    attributes={**self._common, **node.about},
                )
                contexts.append(trace.set_span_in_context(span, inside))
                if node.error is not None:
                    self._record(span, node.error)
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
                error = None if isinstance(raised, StopTraining) else raised
                raise
            finally:
                self._leave(frame, error)

        return traced

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot of an event that does not come with every batch, with what it does to the spans."""
        if event.inside in OFTEN:
            is_first = event.name == "on_train_batch_start" and self.state.timer is None
            return self._sampling(event, slot) if is_first else slot
        if event.inside == "own":
            self.roles = Roles(self.plan.table)  # it may have been declared since
        roles = self.roles

        def traced(s: Any) -> Any:
            frame = self._before(event, roles, s)
            try:
                return slot(s)
            finally:
                self._after(event, roles, frame, s)

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

    def _after(self, event: Event, roles: Roles, frame: Frame | None, s: Any) -> None:
        begins, ends = roles.begins.get(event.name), roles.ends.get(event.name, [])
        with self.guard():
            if begins is not None and frame is not None and event.inside in OVERLAPPING:
                self._stack.remove(frame)
                self._leave_context(frame)
                self._overlapping.append(frame)
            elif begins is None:
                error = s.exception if "exception" in event.facts and event.name != "on_exception" else None
                if frame is not None:
                    self._pop(frame, error)
                for pair in ends if frame is None else ():
                    self._end_pair(pair)
            if begins is not None and f"{event.inside} batch" in BRANCHES and self.is_on:
                self.sample.begin_pass(event.inside)
        if event.name == "teardown":
            self.is_tearing_down = False
            self._on_teardown()

    def _end_pair(self, pair: EventPair) -> None:
        if self.sample.is_open and self.sample.branch == pair.begin.inside:
            self.sample.end()  # the pass had no batch, or its first batch has failed
        above: list[Frame] = []
        for frame in reversed(self._stack[1:]):
            if frame.name == pair.name and not frame.is_call:
                break
            above.append(frame)
        else:
            return
        if any(each.is_call for each in above):  # a hook ends what began before its call
            self._stack.remove(frame)
            self._end(frame)
        else:
            self._pop(frame)

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
