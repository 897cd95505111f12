"""Count the events and calls in a trace, and compare them with the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.engine.cost import format_seconds
from hookline.engine.events import EVENTS, RECEIVERS
from hookline.engine.explain import Explanation, explain_rows
from hookline.tracing.reader import TraceRecord, read_trace

CATEGORIES = {word.removesuffix("s"): word for word in RECEIVERS.values()}
"""A call's category in a trace -> the receiver as `explain` calls it."""
SOMETIMES = (
    "on_step_skipped",
    "on_gradient_clip",
    "on_validation_abandoned",
    "on_load_checkpoint",
    "module_load_checkpoint",
    "on_checkpoint_load",
)
"""Events that happen only in some runs."""
BAR = "progress_bar"
"""It listens to events of every kind of run, so an event that did not happen is not a difference for it."""
CallKey = tuple[str, str, str]
"""Receiver, name, event."""


@dataclass(slots=True)
class CallCount:
    """The calls of one listener at one event."""

    calls: int = 0
    micros: float = 0.0
    first_step: int = 0
    last_step: int = 0

    def __str__(self) -> str:
        times = "once" if self.calls == 1 else f"{self.calls} times"
        return f"called {times}, {format_seconds(self.micros / 1e6)}"


@dataclass(slots=True)
class EventTime:
    """The time of one event with everything inside it, in microseconds."""

    micros: float = 0.0
    longest: float = 0.0
    longest_step: int = 0

    def add(self, micros: float, step: int) -> None:
        """Add one occurrence."""
        self.micros += micros
        if micros > self.longest:
            self.longest, self.longest_step = micros, step


@dataclass(slots=True)
class TraceCounts:
    """The events and calls of a run, counted from its trace.

    verb: the stage. events: how often each event happened. times: the durations of each event. calls: calls
    and time per listener and event.
    """

    verb: str = "fit"
    partial: bool = False
    """Whether the trace was started in the middle of the run."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The plan, as the trace has it."""
    events: dict[str, int] = field(default_factory=dict)
    times: dict[str, EventTime] = field(default_factory=dict)
    last_step: dict[str, int] = field(default_factory=dict)
    """The last step of every event."""
    calls: dict[CallKey, CallCount] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    """Steps at which an exception was raised."""
    order: dict[str, list[list[tuple[str, str]]]] = field(default_factory=dict)
    """The different orders in which an event's listeners were called."""


def count(records: Iterable[TraceRecord]) -> TraceCounts:
    """Count the events and calls of a trace, in one pass. records: those of `read_trace`."""
    counts = TraceCounts()
    calls: dict[str, list[tuple[float, tuple[str, str]]]] = {}
    for record in records:
        name, cat, args = record["name"], record.get("cat"), record["args"]
        if cat in ("event", "action"):
            counts.events[name] = counts.events.get(name, 0) + 1
            counts.last_step[name] = args.get("step", 0)
            counts.times.setdefault(name, EventTime()).add(record.get("dur", 0.0), counts.last_step[name])
            if name == "on_exception":
                counts.failed.append(counts.last_step[name])
            # a nested call ends first but starts later, so sort by the start
            called = [who for _, who in sorted(calls.pop(name, []))]
            orders = counts.order.setdefault(name, [])
            if called and called not in orders and len(orders) < 20:
                orders.append(called)
        elif cat in CATEGORIES:
            event, step = args.get("event", ""), args.get("step", 0)
            who = (CATEGORIES[cat], name)
            call_count = counts.calls.setdefault((*who, event), CallCount(first_step=step))
            call_count.calls += 1
            call_count.micros += record["dur"]
            call_count.last_step = step
            calls.setdefault(event, []).append((record["ts"], who))
        elif name == "hookline_plan" and not counts.rows:
            counts.verb, counts.rows, counts.partial = args["verb"], args["rows"], args.get("partial", False)
    return counts


def describe_trace(path: Path) -> dict[str, Any]:
    """Return what a trace contains, and where its time went, for JSON: the slowest events and calls first."""
    header = next(read_trace(path))["args"]
    counts = count(read_trace(path))
    events = sorted(counts.times.items(), key=lambda each: -each[1].micros)
    calls = sorted(counts.calls.items(), key=lambda each: -each[1].micros)
    return {
        "trace": str(path),
        "stage": header["stage"],
        "rank": header["rank"],
        "world_size": header["world_size"],
        "step": max(counts.last_step.values(), default=0),
        "events": sum(counts.events.values()),
        "calls": sum(each.calls for each in counts.calls.values()),
        "failed_steps": counts.failed,
        "slowest_events": [
            {
                "event": name,
                "count": counts.events[name],
                "total": each.micros / 1e6,
                "longest": each.longest / 1e6,
                "longest_step": each.longest_step,
            }
            for name, each in events
        ],
        "slowest_calls": [
            {
                "receiver": receiver,
                "name": name,
                "event": event,
                "calls": each.calls,
                "total": each.micros / 1e6,
                "first_step": each.first_step,
                "last_step": each.last_step,
            }
            for (receiver, name, event), each in calls
        ],
    }


def differences_from_plan(planned: list[dict[str, Any]], counts: TraceCounts) -> list[str]:
    """Return every difference between the plan and the run, a sentence each."""
    found: list[str] = []
    if counts.failed:
        steps = ", ".join(map(str, counts.failed))
        found.append(
            f"the run failed, or was interrupted, at step {steps}: the events planned right after that did "
            f"not happen"
        )
    known: set[CallKey] = set()
    for row in planned:
        event, listeners = row["event"], row["listeners"]
        times = counts.events.get(event, 0)
        waiting = [each for each in listeners if each["name"] != BAR]
        if waiting and not times and not counts.partial and not is_conditional(event):
            who = ", ".join(dict.fromkeys(_label(each["receiver"], each["name"]) for each in waiting))
            found.append(f"{event} never happened: {who} was not called")
        for listener in listeners:
            known.add((listener["receiver"], listener["name"], event))
            if times and not _is_replaced(listener, row):
                found += _call_differences(listener, event, times, counts)
        found += _order_differences([(each["receiver"], each["name"]) for each in listeners], event, counts)
    for (receiver, name, event), call_count in counts.calls.items():
        if (receiver, name, event) not in known:
            found.append(
                f"{_label(receiver, name)} was called in {event} but was not planned: {call_count}, "
                f"from step {call_count.first_step} on"
            )
    return found


def _call_differences(listener: dict[str, Any], event: str, times: int, counts: TraceCounts) -> list[str]:
    call_count = counts.calls.get((listener["receiver"], listener["name"], event))
    label, is_filtered = _label(listener["receiver"], listener["name"]), listener["when"] != "always"
    often = "once" if times == 1 else f"{times} times"
    if call_count is None:
        why = (
            f"; its filter is {listener['when']}"
            if is_filtered
            else "; it was switched off, removed or not added"
        )
        return [f"{label} was never called in {event}, which happened {often}{why}"]
    expected = times - len(counts.failed)  # the listeners after one that fails are not called
    if call_count.calls >= expected or is_filtered:
        return []
    gap = (
        "in between it"
        if call_count.last_step >= counts.last_step.get(event, 0)
        else f"the last at step {call_count.last_step}, then it"
    )
    return [
        f"{label} was called in {event} {call_count.calls} of {times} times: {gap} was switched off, removed "
        "or skipped because of its budget"
    ]


def _order_differences(planned: list[tuple[str, str]], event: str, counts: TraceCounts) -> list[str]:
    for order in counts.order.get(event, []):
        seen = [each for each in dict.fromkeys(order) if each in planned]
        if (
            event in counts.events
            and seen != [each for each in planned if each in seen]
            and len(seen) == len(order)
        ):
            calls = " → ".join(name for _, name in seen)
            return [f"{event} called {calls}, but the plan is {' → '.join(name for _, name in planned)}"]
    return []


def is_conditional(event: str) -> bool:
    """Return whether an event happens only in some runs, so that its absence is not a difference."""
    if event not in EVENTS:
        return False
    return event in SOMETIMES or EVENTS[event].action or EVENTS[event].inside in ("failure", "save", "sanity")


def _is_replaced(listener: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether the data module is called at this event instead of the module."""
    event, others = row["event"], [each["receiver"] for each in row["listeners"]]
    return (
        listener["receiver"] == "module"
        and "data module" in others
        and event in EVENTS
        and EVENTS[event].either
    )


def _label(receiver: str, name: str) -> str:
    return f"{receiver.removesuffix('s')} {name}"


# ---- Compare a plan with a trace, or two plans


Listeners = dict[str, list[dict[str, Any]]]
COMPARED = ("function", "asks", "when", "on_error")
"""The properties of a listener that are compared between two plans."""


def beside(counts: TraceCounts, planned: list[dict[str, Any]] | None = None) -> tuple[Explanation, list[str]]:
    """Return the plan as a tree with the counts of the trace, and the differences.

    counts: the result of `count`. planned: by default the plan in the trace.
    """
    rows = [{**row, "listeners": [dict(each) for each in row["listeners"]]} for row in planned or counts.rows]
    different = differences_from_plan(rows, counts)
    by_event = {row["event"]: row for row in rows}
    for (receiver, name, event), call_count in counts.calls.items():
        if event not in by_event:
            by_event[event] = {"branch": "not planned", "event": event, "listeners": []}
            rows.append(by_event[event])
        known = [
            each
            for each in by_event[event]["listeners"]
            if (each["receiver"], each["name"]) == (receiver, name)
        ]
        if not known:
            known = [
                {
                    "receiver": receiver,
                    "name": name,
                    "function": name,
                    "origin": "unknown",
                    "asks": [],
                    "when": "always",
                    "why": "not planned",
                }
            ]
            by_event[event]["listeners"] += known
        known[0]["happened"] = str(call_count)
    for row in rows:
        times = counts.events.get(row["event"], 0)
        row["note"] = (
            "did not happen" if not times else "happened once" if times == 1 else f"happened {times} times"
        )
        for listener in row["listeners"]:
            listener.setdefault("happened", "not called")
    return explain_rows(rows, counts.verb), different


def compare(first: Explanation, second: Explanation, names: tuple[str, str]) -> list[str]:
    """Return every difference between two plans, a line each."""
    left, right = ({row["event"]: row["listeners"] for row in each.data()} for each in (first, second))
    alone = {**_hooks_without(left, right, names[0]), **_hooks_without(right, left, names[1])}
    found = list(alone.values())
    for event in dict.fromkeys([*left, *right]):
        before, after = left.get(event, []), right.get(event, [])
        for only, others, name in ((before, after, names[0]), (after, before, names[1])):
            keys = [_listener_key(each) for each in others]
            found += [
                f"{event}: {_label(each['receiver'], each['name'])} only in {name}"
                for each in only
                if _listener_key(each) not in keys and _listener_key(each) not in alone
            ]
        found += _changed(event, before, after, names)
        common = [_listener_key(each) for each in before if _listener_key(each) in map(_listener_key, after)]
        order = [_listener_key(each) for each in after if _listener_key(each) in common]
        if common != order:
            found.append(
                f"{event}: {' → '.join(name for _, name in common)} in {names[0]}, "
                f"{' → '.join(name for _, name in order)} in {names[1]}"
            )
    return found


def _hooks_without(plan: Listeners, other: Listeners, name: str) -> dict[tuple[str, str], str]:
    """Return a line for each hook that only one plan has, with its events."""
    known = {_listener_key(each) for listeners in other.values() for each in listeners}
    found: dict[tuple[str, str], list[str]] = {}
    for event, listeners in plan.items():
        for listener in listeners:
            if listener["receiver"] == "hooks" and _listener_key(listener) not in known:
                found.setdefault(_listener_key(listener), []).append(event)
    return {key: f"hook {key[1]} only in {name}: {', '.join(events)}" for key, events in found.items()}


def _changed(
    event: str, before: list[dict[str, Any]], after: list[dict[str, Any]], names: tuple[str, str]
) -> list[str]:
    found = []
    others = {_listener_key(each): each for each in after}
    for listener in before:
        other = others.get(_listener_key(listener), listener)
        label = _label(listener["receiver"], listener["name"])
        found += [
            f"{event}: {label}, {what.replace('_', ' ')}: {_property_text(listener[what])} in {names[0]}, "
            f"{_property_text(other[what])} in {names[1]}"
            for what in COMPARED
            if listener[what] != other[what]
        ]
    return found


def _listener_key(listener: dict[str, Any]) -> tuple[str, str]:
    """Return the key that identifies a listener in both plans; a module is the same whatever its class."""
    return listener["receiver"], listener["name"] if listener["receiver"] == "hooks" else ""


def _property_text(value: Any) -> str:
    return (", ".join(value) or "nothing") if isinstance(value, list) else str(value)
