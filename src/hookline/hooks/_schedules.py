"""Read schedules: the facts that a function takes, and moments such as '2 epochs'."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from hookline.engine.filters import parse_interval
from hookline.util.errors import OptionError, closest


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
