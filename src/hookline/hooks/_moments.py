"""A moment of the run, as people write it: `1000`, '500 steps', '2 epochs'."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hookline.errors import OptionError
from hookline.filters import parse_interval


def parse_moment(given: Any, what: str, units: Collection[str] = ("step", "epoch")) -> tuple[int, str]:
    """'2 epochs' -> (2, "epoch"): a count from 0, and a key of `filters.UNITS`. A number alone is steps, also
    if it is text.
    """
    is_step = isinstance(given, int) and not isinstance(given, bool) and given >= 0
    text = f"{given} steps" if is_step or str(given).strip().isdecimal() else given  # keys of a file are text
    number, unit = parse_interval(text, what, from_zero=True) if isinstance(text, str) else (0.0, "")
    if unit not in units:
        raise OptionError(
            f"{what}: {given!r} is no moment; use a step from 0, or text such as '500 steps' "
            f"(units: {', '.join(f'{each}s' for each in units)})."
        )
    return int(number), unit
