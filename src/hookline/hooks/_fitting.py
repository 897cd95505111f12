"""What of a bar fits on a line. Clock and metrics are the first to go, then time left and rate; name and
count stay longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.cells import cell_len

BAR, LONGEST_BAR, CLOCK = 5, 40, 8


class Told(Protocol):
    """What there is to say about one pass over data."""

    name: str
    numbers: list[str]

    @property
    def count(self) -> str:
        """`3/10`."""
        ...

    @property
    def rate(self) -> str:
        """`4.0 it/s`."""
        ...

    @property
    def eta(self) -> str:
        """`eta 0:00:24`, or nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Fit:
    """The widths of name and bar (0: none), whether there is room for a clock, and the end of each line."""

    name: int
    bar: int
    clock: bool
    ends: list[str]


def fit(bars: Sequence[Told], width: int, longest_bar: int = LONGEST_BAR, clock: bool = True) -> Fit:
    """For lines that stand below each other, and so have columns."""
    left = width - max(cell_len(each.count) for each in bars)
    name = min(max(cell_len(each.name) for each in bars), max(left - 1, 0))
    left -= name + 1
    bar = min(BAR, longest_bar) if left > BAR else 0
    left -= bar + 1 if bar else 0
    ends: list[list[str]] = [[] for _ in bars]
    used = 0
    for texts in ([each.rate for each in bars], [each.eta for each in bars]):
        wide = max(cell_len(text) + 1 for text in texts)
        if used + wide > left:
            break
        used += wide
        for end, text in zip(ends, texts, strict=True):
            end += [text] if text else []
    else:  # metrics only if all the rest has found its place
        used = max(_add_numbers(each.numbers, end, left) for each, end in zip(bars, ends, strict=True))
    left -= used
    clock = clock and left >= CLOCK and bar > 0
    left -= CLOCK if clock else 0
    return Fit(
        name, min(longest_bar, bar + max(left, 0)) if bar else 0, clock, [" ".join(end) for end in ends]
    )


def _add_numbers(numbers: list[str], end: list[str], room: int) -> int:
    """As many as fit, the first ones first; how wide it all is."""
    wide = sum(cell_len(each) + 1 for each in end)
    for each in numbers:
        if wide + cell_len(each) + 1 > room:
            break
        wide += cell_len(each) + 1
        end.append(each)
    return wide
