"""Plans side by side: what was planned beside what a trace tells, and two plans with each other."""

from __future__ import annotations

from typing import Any

from hookline.explain import Explanation, explain_rows
from hookline.tracing.happened import Happened, differences

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
                f"{event}: {_label(each)} only in {name}"
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
                    f"{event}: {_label(each)}, {what.replace('_', ' ')}: {_shown(each[what])} in {names[0]}, "
                    f"{_shown(other[what])} in {names[1]}"
                )
    return found


def _key(listener: dict[str, Any]) -> tuple[str, str]:
    """A module is what takes its place, whatever its class is called."""
    return listener["receiver"], listener["name"] if listener["receiver"] == "hooks" else ""


def _label(listener: dict[str, Any]) -> str:
    return f"{listener['receiver'].removesuffix('s')} {listener['name']}"


def _shown(value: Any) -> str:
    return (", ".join(value) or "nothing") if isinstance(value, list) else str(value)
