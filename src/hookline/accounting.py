"""What hooks cost: calls and time per hook and event, as rows and as a short table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

SLOW = 0.05
"""The share of the training time from which a hook is called slow."""
SHORT = 0.1
"""Seconds: a hook that took less is not called slow, however short the run was."""
SHOWN = 6
"""Rows of the table at the end of a run; the rest is summed up."""


@dataclass(slots=True)
class Account:
    """What one listener has cost so far, in nanoseconds."""

    calls: int = 0
    total: int = 0
    worst: int = 0

    def clear(self) -> None:
        """A run begins."""
        self.calls = self.total = self.worst = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one hook spent at one event, in seconds."""

    hook: str
    event: str
    calls: int
    seconds: float
    worst: float
    share: float = 0.0
    """Of the training time, which begins after set-up, from 0 to 1."""

    @property
    def mean(self) -> float:
        """Seconds per call."""
        return self.seconds / self.calls if self.calls else 0.0

    def data(self) -> dict[str, str | int | float]:
        """As the run's log has it."""
        return {
            "hook": self.hook,
            "event": self.event,
            "calls": self.calls,
            "total": self.seconds,
            "mean": self.mean,
            "worst": self.worst,
            "share": self.share,
        }


class Stopwatch:
    """How long a run has been training; it stands still when the run is over."""

    def __init__(self) -> None:
        self._began = self._ended = 0
        self.counted_twice = 0.0
        """Seconds of hooks inside another hook's call: one that validates in the middle of a run."""

    def start(self) -> None:
        """From now on."""
        self._began, self._ended, self.counted_twice = time.perf_counter_ns(), 0, 0.0

    def stop(self) -> None:
        """The run is over."""
        self._ended = self._ended or time.perf_counter_ns()

    @property
    def seconds(self) -> float:
        """So far, or altogether."""
        return ((self._ended or time.perf_counter_ns()) - self._began) / 1e9 if self._began else 0.0


def cost_table(rows: Sequence[Cost], seconds: float, counted_twice: float = 0.0) -> str:
    """The dearest rows as text, and the slow hooks by name. A row has all that happened within its calls."""
    shown = rows[:SHOWN]
    cells = [("hook", "event", "calls", "total", "mean", "worst", "share")]
    cells += [
        (
            row.hook,
            row.event,
            str(row.calls),
            duration(row.seconds),
            duration(row.mean),
            duration(row.worst),
            f"{row.share:.1%}",
        )
        for row in shown
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    together = sum(row.seconds for row in rows) - counted_twice
    part = f", {together / seconds:.1%}" if seconds else ""
    lines = [
        f"Hooks took {duration(together)} of {duration(seconds)} of training{part}, validation and saving "
        f"included:"
    ]
    for line in cells:
        parts = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  " + "  ".join(parts).rstrip())
    if rest := rows[SHOWN:]:
        lines.append(
            f"  and {len(rest)} more, {duration(sum(row.seconds for row in rest))} together: "
            f"trainer.hooks.cost()"
        )
    lines += [
        f"  slow: {name}, {min(share, 1):.0%} of the training time"
        for name, share in slow_hooks(rows).items()
    ]
    return "\n".join(lines)


def slow_hooks(rows: Sequence[Cost]) -> dict[str, float]:
    """The hooks whose events together take more than a few per cent, with their share.

    The worst call of each event is not counted: a cost that comes once, such as an import, does not grow with
    the run.
    """
    shares, seconds, total = dict[str, float](), dict[str, float](), dict[str, float]()
    for row in rows:
        again = row.seconds - row.worst
        total[row.hook] = total.get(row.hook, 0.0) + row.share
        shares[row.hook] = shares.get(row.hook, 0.0) + (
            row.share * again / row.seconds if row.seconds else 0.0
        )
        seconds[row.hook] = seconds.get(row.hook, 0.0) + again
    return {name: total[name] for name, share in shares.items() if share >= SLOW and seconds[name] >= SHORT}


def duration(seconds: float) -> str:
    """`1.25 s`, `3.1 ms`, `850 µs`: three digits at most before the point."""
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
