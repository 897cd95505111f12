"""What a trace tells about a run: how often every event came, who was called, and how that differs from what
was planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hookline.accounting import duration
from hookline.events import EVENTS, RECEIVERS
from hookline.tracing.reading import Record

KINDS = {word.removesuffix("s"): word for word in RECEIVERS.values()}
"""A call's category in a trace -> the receiver as `explain` calls it."""
SOMETIMES = (
    "on_step_skipped",
    "on_gradient_clip",
    "on_validation_abandoned",
    "on_load_checkpoint",
    "module_load_checkpoint",
    "on_checkpoint_load",
)
BAR = "progress_bar"
"""Hears of whatever there may be, asked for or not: it does not miss a validation in a run that has none."""
Who = tuple[str, str, str]
"""Receiver, name, event."""


@dataclass(slots=True)
class Heard:
    """One listener's calls at one event."""

    calls: int = 0
    micros: float = 0.0
    first_step: int = 0
    last_step: int = 0

    def __str__(self) -> str:
        times = "once" if self.calls == 1 else f"{self.calls} times"
        return f"called {times}, {duration(self.micros / 1e6)}"


@dataclass(slots=True)
class Happened:
    """A run, counted."""

    verb: str = "fit"
    partial: bool = False
    """Whether the trace was started in the middle, so that what came before is not in it."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The plan that was written down when the run began."""
    events: dict[str, int] = field(default_factory=dict)
    last_step: dict[str, int] = field(default_factory=dict)
    """Of every event, when it came last."""
    heard: dict[Who, Heard] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    """Steps at which it came to an exception."""
    order: dict[str, list[list[tuple[str, str]]]] = field(default_factory=dict)
    """The different orders in which an event's listeners were called."""


def count(records: Iterable[Record]) -> Happened:
    """Go through a trace once."""
    told = Happened()
    calls: dict[str, list[tuple[float, tuple[str, str]]]] = {}
    for record in records:
        name, cat, args = record["name"], record.get("cat"), record["args"]
        if cat in ("event", "action"):
            told.events[name] = told.events.get(name, 0) + 1
            told.last_step[name] = args.get("step", 0)
            if name == "on_exception":
                told.failed.append(told.last_step[name])
            called = [
                who for _, who in sorted(calls.pop(name, []))
            ]  # one inside another is over first, and began later
            orders = told.order.setdefault(name, [])
            if called and called not in orders and len(orders) < 20:
                orders.append(called)
        elif cat in KINDS:
            event, step = args.get("event", ""), args.get("step", 0)
            who = (KINDS[cat], name)
            heard = told.heard.setdefault((*who, event), Heard(first_step=step))
            heard.calls += 1
            heard.micros += record["dur"]
            heard.last_step = step
            calls.setdefault(event, []).append((record["ts"], who))
        elif name == "hookline_plan" and not told.rows:
            told.verb, told.rows, told.partial = args["verb"], args["rows"], args.get("partial", False)
    return told


def differences(planned: list[dict[str, Any]], told: Happened) -> list[str]:
    """Every way in which the run was not as planned, in words."""
    found: list[str] = []
    if told.failed:
        steps = ", ".join(map(str, told.failed))
        found.append(
            f"the run failed, or was interrupted, at step {steps}: what was planned right after that did "
            f"not come"
        )
    known: set[Who] = set()
    for row in planned:
        event, listeners = row["event"], row["listeners"]
        times = told.events.get(event, 0)
        waiting = [each for each in listeners if each["name"] != BAR]
        if waiting and not times and not told.partial and not is_conditional(event):
            who = ", ".join(dict.fromkeys(_label(each["receiver"], each["name"]) for each in waiting))
            found.append(f"{event} never came: {who} was not called there")
        for each in listeners:
            who_at = (each["receiver"], each["name"], event)
            known.add(who_at)
            found += _of_listener(each, event, times, told) if times and not _stands_back(each, row) else []
        found += _of_order([(each["receiver"], each["name"]) for each in listeners], event, told)
    for (receiver, name, event), heard in told.heard.items():
        if (receiver, name, event) not in known:
            found.append(
                f"{_label(receiver, name)} was called in {event} and was not planned there: {heard}, "
                f"from step {heard.first_step} on"
            )
    return found


def _of_listener(listener: dict[str, Any], event: str, times: int, told: Happened) -> list[str]:
    heard = told.heard.get((listener["receiver"], listener["name"], event))
    label, is_filtered = _label(listener["receiver"], listener["name"]), listener["when"] != "always"
    came = "once" if times == 1 else f"{times} times"
    if heard is None:
        why = (
            f"; it asks for {listener['when']}"
            if is_filtered
            else "; it was switched off, removed or not there"
        )
        return [f"{label} was never called in {event}, which came {came}{why}"]
    expected = times - len(told.failed)  # whoever fails keeps the event from those after it
    if heard.calls >= expected or is_filtered:
        return []
    gap = (
        "in between it"
        if heard.last_step >= told.last_step.get(event, 0)
        else f"the last at step {heard.last_step}, then it"
    )
    return [
        f"{label} was called in {event} {heard.calls} of {times} times: {gap} was switched off, removed or "
        "held back by its budget"
    ]


def _of_order(planned: list[tuple[str, str]], event: str, told: Happened) -> list[str]:
    for order in told.order.get(event, []):
        seen = [each for each in dict.fromkeys(order) if each in planned]
        if (
            event in told.events
            and seen != [each for each in planned if each in seen]
            and len(seen) == len(order)
        ):
            calls = " → ".join(name for _, name in seen)
            return [f"{event} called {calls}, planned was {' → '.join(name for _, name in planned)}"]
    return []


def is_conditional(event: str) -> bool:
    """Whether an event comes only if there is a reason for it, so that its absence is as planned too. Steps
    need their data.
    """
    if event not in EVENTS:
        return False
    return event in SOMETIMES or EVENTS[event].action or EVENTS[event].inside in ("failure", "save", "sanity")


def _stands_back(listener: dict[str, Any], row: dict[str, Any]) -> bool:
    """Where the data module hears an event instead of the module."""
    event, others = row["event"], [each["receiver"] for each in row["listeners"]]
    return (
        listener["receiver"] == "module"
        and "data module" in others
        and event in EVENTS
        and EVENTS[event].either
    )


def _label(receiver: str, name: str) -> str:
    return f"{receiver.removesuffix('s')} {name}"
