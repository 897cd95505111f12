"""Sample the spans of a step, or of the first batch of a pass: their slots are swapped meanwhile.

The spans of a sample are recorded with two reads of the clock each, and made when it is over.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

from hookline.engine.binding import Caller
from hookline.engine.cost import OFTEN
from hookline.engine.events import EVERY_STAGE, RECEIVERS, Event, EventTable
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.engine.table import EventPair
from hookline.util.errors import StopTraining
from hookline.util.urls import shown

STEP = "step"
"""The span of a sampled step: an accumulation window and its update."""
TRAIN_BATCH = "train_batch"
"""A pair that every step has."""
STEP_BRANCHES = ("batch", "window", "update", "own")
"""The branches of the lifecycle whose events belong to a step. Declared events may come at any time: the
calls of their listeners, and those that come often, are traced in sampled steps.
"""
MOST_NODES = 500
"""Spans of one sample. A validation inside a step may have any number of batches."""
FACTS = {"path": "hookline.path", "reason": "hookline.reason", "dataloader_name": "hookline.dataloader"}
"""Facts of single events that are attributes of their spans; those of the run are in `attributes`."""


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


def failure_of(error: BaseException) -> BaseException | None:
    """Return the error, or None for a request to stop."""
    return None if isinstance(error, StopTraining) else error


class SampledRun(Protocol):
    """The run that a sample is taken of: `RunSpans`."""

    plan: Plan
    state: Any
    roles: Roles
    frequent: set[str]

    @property
    def is_on(self) -> bool:
        """Whether to trace."""
        ...

    def now(self) -> int:
        """Return the nanoseconds of the clock of all spans."""
        ...

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error does not end the run."""
        ...

    def traces(self, listener: Listener) -> bool:
        """Return whether the calls of a listener have spans."""
        ...

    def emit(self, nodes: list[Node]) -> None:
        """Make the spans of a sample."""


class Sample:
    """The spans of one step, or of the first batch of a pass over data. It observes the steps of a fit.

    It is a tracer of the plan, which composes slots with it; they replace those of the plan meanwhile.
    """

    def __init__(self, spans: SampledRun, every: int) -> None:
        """Take every, the steps from one sampled step to the next; 0: none."""
        self._spans, self.every = spans, every
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
        self.due = s.step + self.every
        if self._spans.is_on:
            with self._spans.guard():
                self._open("", STEP_BRANCHES)
                self._begun_at = s.step
                self.enter(STEP, plan.table["on_step_end"], s, is_pair=True)

    def begin_pass(self, branch: str) -> None:
        """Begin the sample of the first batch of a pass over data, unless a step is being sampled."""
        if self.every and not self.is_open and self._spans.is_on:
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
        now = self._spans.now()
        for index in left:
            nodes[index].end, nodes[index].error = now, error
        if is_step and nodes:
            # a multiple of `every`, or the next update if this window made none
            step = s.step
            self.due = step - step % self.every + self.every - 1 if step > self._begun_at else step + 1
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
            index = self.enter(name, listener.event, s, about, hook)
            error: BaseException | None = None
            try:
                return call(s)
            except BaseException as raised:
                error = failure_of(raised)
                raise
            finally:
                self.leave(index, error)
                error = None  # its traceback holds this frame

        return traced

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot of an event that begins, ends or is a span, with its records."""
        roles = self._spans.roles
        begins, ends = roles.begins.get(event.name), roles.ends.get(event.name, [])
        name = begins.name if begins else event.name if roles.spans_itself(event) else ""
        is_last = event.name == "on_step_end" or any(pair.begin.inside.endswith(" batch") for pair in ends)
        is_live = event.inside == "own" and event.name not in self._spans.frequent
        if is_live or not (name or ends or is_last):
            return slot

        def traced(s: Any) -> Any:
            index = self.enter(name, event, s, is_pair=begins is not None) if name else -1
            error: BaseException | None = None
            try:
                return slot(s)
            except BaseException as raised:
                error = failure_of(raised)
                raise
            finally:
                if not begins:
                    self.leave(index, error)
                for pair in ends:
                    self.leave_pair(pair.name)
                if is_last and bool(self._branch) == bool(ends):
                    self.end()
                error = None

        return traced
