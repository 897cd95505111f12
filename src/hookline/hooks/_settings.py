"""Read settings of hooks: patterns of names, moments such as "2 epochs", functions of facts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from hookline.engine.checks import refused
from hookline.engine.filters import UNITS, parse_interval
from hookline.util.errors import HookError, OptionError, closest
from hookline.util.text import list_some


def as_patterns(what: str, given: Any) -> tuple[str, ...]:
    """Return one or several patterns as a tuple, or raise."""
    patterns = (
        (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple | set) else ()
    )
    if not patterns or not all(isinstance(each, str) and each for each in patterns):
        raise refused(
            what, given, "a name, a part of one, a pattern such as 'blocks.*.mlp', or a list of these"
        )
    return patterns


def is_match(name: str, pattern: str) -> bool:
    """Return whether a name matches: a pattern with `*`, `?` or `[` as a whole, plain text in any part."""
    return fnmatchcase(name, pattern) if any(each in pattern for each in "*?[") else pattern in name


def matching_names(what: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that match a pattern. Raise with the closest name if a pattern matches none."""
    names = list(names)
    for pattern in patterns:
        if not any(is_match(name, pattern) for name in names):
            raise HookError(
                f"{what}: {pattern!r} matches nothing.{closest(pattern, names)} Names: "
                f"{list_some(names, 8) or 'none'}."
            )
    return [name for name in names if any(is_match(name, pattern) for pattern in patterns)]


# ---- moments and functions ---------------------------------------------------------------------------------


def facts_asked(function: Callable[..., Any], what: str, facts: Collection[str]) -> list[str]:
    """Return the facts that a function's parameters name. Raise for another parameter without a default."""
    parameters = inspect.signature(function).parameters.values()
    asked = [each.name for each in parameters if each.name in facts or each.default is each.empty]
    for name in asked:
        if name not in facts:
            raise OptionError(
                f"{what} has the parameter {name!r}.{closest(name, facts)} It may have {', '.join(facts)}."
            )
    return asked


def parse_moment(given: Any, what: str, units: Collection[str] = ("step", "epoch")) -> tuple[int, str]:
    """Return the count and the unit of a moment: '2 epochs' -> (2, "epoch"). A number without a unit is in
    steps, also as text.
    """
    is_step = isinstance(given, int) and not isinstance(given, bool) and given >= 0
    text = f"{given} steps" if is_step or str(given).strip().isdecimal() else given  # keys of a file are text
    number, unit = parse_interval(text, what, from_zero=True) if isinstance(text, str) else (0.0, "")
    if unit not in units:
        raise OptionError(
            f"{what}: {given!r} is not a moment; use a step from 0, or text such as '500 steps' "
            f"(units: {', '.join(f'{each}s' for each in units)})."
        )
    return int(number), unit


Moments = list[tuple[str, int, Any]]
"""Moments in the order written: the count of the state ("step", "epochs_seen"), its number, and the value."""


def read_moments(given: Mapping[int | str, Any], what: str) -> Moments:
    """Return the moments of a mapping and their values."""
    made: Moments = []
    for moment, value in given.items():
        number, unit = parse_moment(moment, what)
        made.append((UNITS[unit], number, value))
    return made


def current_value(moments: Moments, counts: Any) -> Any:
    """Return the last value in order whose moment has come, or None. counts: the state of the run."""
    found = None
    for count, number, value in moments:
        if getattr(counts, count) >= number:
            found = value
    return found
