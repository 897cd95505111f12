"""What a trace tells about a run: how often every event came, who was called, and how that differs from what
was planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hookline.engine.cost import duration
from hookline.engine.events import EVENTS, RECEIVERS
from hookline.engine.explain import Explanation, explain_rows
from hookline.tracing.reader import Record

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


# ---- Plans side by side


Listeners = dict[str, list[dict[str, Any]]]
LISTENER = ("function", "asks", "when", "on_error")
"""What two plans may say differently about one listener."""


def beside(told: Happened, planned: list[dict[str, Any]] | None = None) -> tuple[Explanation, list[str]]:
    """The tree of what was planned with what happened, and the differences. `planned`: by default as the
    trace has it.
    """
    rows = [{**row, "listeners": [dict(each) for each in row["listeners"]]} for row in planned or told.rows]
    different = differences(rows, told)
    places = {row["event"]: row for row in rows}
    for (receiver, name, event), heard in told.heard.items():
        if event not in places:
            places[event] = {"branch": "not planned", "event": event, "listeners": []}
            rows.append(places[event])
        known = [
            each
            for each in places[event]["listeners"]
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
            places[event]["listeners"] += known
        known[0]["happened"] = str(heard)
    for row in rows:
        times = told.events.get(row["event"], 0)
        row["note"] = "did not come" if not times else "came once" if times == 1 else f"came {times} times"
        for each in row["listeners"]:
            each.setdefault("happened", "not called")
    return explain_rows(rows, told.verb), different


def compare(first: Explanation, second: Explanation, names: tuple[str, str]) -> list[str]:
    """Every difference between two plans, in words."""
    left, right = ({row["event"]: row["listeners"] for row in each.data()} for each in (first, second))
    alone = {**_hooks_without(left, right, names[0]), **_hooks_without(right, left, names[1])}
    found = list(alone.values())
    for event in dict.fromkeys([*left, *right]):
        before, after = left.get(event, []), right.get(event, [])
        for only, others, name in ((before, after, names[0]), (after, before, names[1])):
            keys = [_key(each) for each in others]
            found += [
                f"{event}: {_listener_label(each)} only in {name}"
                for each in only
                if _key(each) not in keys and _key(each) not in alone
            ]
        found += _changed(event, before, after, names)
        common = [_key(each) for each in before if _key(each) in map(_key, after)]
        order = [_key(each) for each in after if _key(each) in common]
        if common != order:
            found.append(
                f"{event}: {' → '.join(name for _, name in common)} in {names[0]}, "
                f"{' → '.join(name for _, name in order)} in {names[1]}"
            )
    return found


def _hooks_without(plan: Listeners, other: Listeners, name: str) -> dict[tuple[str, str], str]:
    """Hooks that one plan has and the other has not at all: a line for each, with what it hears."""
    known = {_key(each) for listeners in other.values() for each in listeners}
    heard: dict[tuple[str, str], list[str]] = {}
    for event, listeners in plan.items():
        for each in listeners:
            if each["receiver"] == "hooks" and _key(each) not in known:
                heard.setdefault(_key(each), []).append(event)
    return {key: f"hook {key[1]} only in {name}: {', '.join(events)}" for key, events in heard.items()}


def _changed(
    event: str, before: list[dict[str, Any]], after: list[dict[str, Any]], names: tuple[str, str]
) -> list[str]:
    found = []
    others = {_key(each): each for each in after}
    for each in before:
        other = others.get(_key(each), each)
        for what in LISTENER:
            if each[what] != other[what]:
                found.append(
                    f"{event}: {_listener_label(each)}, {what.replace('_', ' ')}: {_shown(each[what])} "
                    f"in {names[0]}, {_shown(other[what])} in {names[1]}"
                )
    return found


def _key(listener: dict[str, Any]) -> tuple[str, str]:
    """A module is what takes its place, whatever its class is called."""
    return listener["receiver"], listener["name"] if listener["receiver"] == "hooks" else ""


def _listener_label(listener: dict[str, Any]) -> str:
    return f"{listener['receiver'].removesuffix('s')} {listener['name']}"


def _shown(value: Any) -> str:
    return (", ".join(value) or "nothing") if isinstance(value, list) else str(value)
