"""The progress of a metric: which direction is better, its last and best value, and its trend."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.metrics.direction import HIGHER, LOWER, REVERSING, ROUNDING, direction_of
from hookline.report.reader import EPOCH, RecordedRun, Series

VALIDATION_WORDS = ("val", "valid", "validation", "eval", "dev")
LOSSES = ("val/loss", "train/loss")
"""The losses that every run logs by itself."""
DIRECTIONS = {"min": "lower", "max": "higher"}
"""The mode of a hook that monitors a metric -> the better direction."""
SHORTEST = 4
"""Values below which there is no trend."""
FLAT = 0.01
RULES = {
    "direction": "The mode of a hook that monitors the metric; else by the words in its name: lower is "
    "better for "
    f"{', '.join(LOWER)}; higher for {', '.join(HIGHER)}; unknown (null) if the name has words of both, or "
    f"one of {', '.join(REVERSING)}, and for other names.",
    "trend": f"Of the last third of the finite values (at least {SHORTEST}), the mean of the later half is "
    f"compared with that "
    f"of the earlier half. 'flat': they differ by less than {FLAT:.0%} of the larger one, or by less than "
    f"twice the "
    "standard error of the difference. Else 'improving' or 'worsening', or 'rising' or 'falling' if the "
    "direction is "
    f"unknown. 'too short': fewer than {SHORTEST} values. 'not finite': the last value is NaN or infinite.",
}
"""In words, for people and programs that read a summary."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric and its step."""

    value: float
    step: int

    def data(self) -> dict[str, Any]:
        """Return a dictionary for JSON, with NaN and infinity as text."""
        return {"value": self.value if math.isfinite(self.value) else str(self.value), "step": self.step}


@dataclass(frozen=True, slots=True)
class MetricProgress:
    """One metric of a run."""

    name: str
    over: str
    """'step', or 'epoch' for values that do not belong to a single step: means of epochs, and validations."""
    count: int
    last: Point
    lowest: Point | None
    highest: Point | None
    direction: str | None
    """The better direction, 'lower' or 'higher'; None: unknown."""
    is_monitored: bool
    trend: str

    @property
    def best(self) -> Point | None:
        """Return the best value, if the better direction is known."""
        return {"lower": self.lowest, "higher": self.highest}.get(self.direction or "")

    def data(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        points = {"last": self.last, "best": self.best, "lowest": self.lowest, "highest": self.highest}
        source = None if self.direction is None else "monitor" if self.is_monitored else "name"
        return {
            "name": self.name,
            "over": self.over,
            "count": self.count,
            "direction": self.direction,
            "direction_from": source,
            "trend": self.trend,
            **{key: None if point is None else point.data() for key, point in points.items()},
        }


def progress_of(run: RecordedRun) -> list[MetricProgress]:
    """Return every metric of a run, as logged."""
    modes = modes_of(run)
    return [
        _progress(name, over, series, modes.get(name))
        for over, kept in (("step", run.own), ("epoch", run.between))
        for name, series in kept.items()
        if series.values
    ]


def _progress(name: str, over: str, series: Series, mode: str | None) -> MetricProgress:
    steps, values = series.arrays()
    direction = DIRECTIONS[mode] if mode else direction_of(name)
    finite = np.isfinite(values)
    lowest = highest = None
    if finite.any():
        # of equal values the first one, where the value was reached
        lowest, highest = (
            Point(float(values[at]), int(steps[at]))
            for at in (
                int(np.argmax(np.isclose(values, extreme, ROUNDING, 0.0)))
                for extreme in (values[finite].min(), values[finite].max())
            )
        )
    last = Point(float(values[-1]), int(steps[-1]))
    return MetricProgress(
        name,
        over,
        len(values),
        last,
        lowest,
        highest,
        direction,
        mode is not None,
        trend_of(values, direction),
    )


def trend_of(values: Any, direction: str | None) -> str:
    """Return the trend of the values, by the rule in RULES."""
    if len(values) and not math.isfinite(values[-1]):
        return "not finite"
    finite = values[np.isfinite(values)]
    if len(finite) < SHORTEST:
        return "too short"
    part = finite[-max(SHORTEST, len(finite) // 3) :]
    part = part / (np.abs(part).max() or 1.0)  # otherwise squares of large values would overflow
    early, late = part[: len(part) // 2], part[len(part) // 2 :]
    change = float(late.mean() - early.mean())
    noise = math.sqrt(float(early.var(ddof=1)) / len(early) + float(late.var(ddof=1)) / len(late))
    if abs(change) <= max(FLAT * max(abs(float(early.mean())), abs(float(late.mean()))), 2 * noise):
        return "flat"
    if direction is None:
        return "rising" if change > 0 else "falling"
    return "improving" if (change < 0) == (direction == "lower") else "worsening"


def modes_of(run: RecordedRun) -> dict[str, str]:
    """Return 'min' or 'max' for every metric that a hook of the run monitors, those of the record first."""
    found: dict[str, str] = {}
    for monitor in _recorded_monitors(run):
        found.setdefault(monitor["metric"], monitor["mode"])
    for checkpoint in run.checkpoints:
        kept: Any = checkpoint.manifest.get("monitor")
        if _is_monitor_of(kept, "name"):
            found.setdefault(kept["name"], kept["mode"])
    return found


def _recorded_monitors(run: RecordedRun) -> list[dict[str, Any]]:
    monitors = run.record.get("monitors", run.monitors)
    return [
        each
        for each in (monitors.values() if isinstance(monitors, dict) else ())
        if _is_monitor_of(each, "metric")
    ]


def _is_monitor_of(about: Any, name: str) -> bool:
    return (
        isinstance(about, dict) and isinstance(about.get(name), str) and about.get("mode") in ("min", "max")
    )


# ---- the one number of a run -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Best:
    """The main metric of a run, and its best value."""

    metric: str
    value: float
    direction: str
    step: int | None = None
    """None if the log does not have it."""

    def data(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {"metric": self.metric, "value": self.value, "direction": self.direction, "step": self.step}


def best_of(run: RecordedRun, metric: str | None = None) -> Best | None:
    """Return the best value of a metric, by default of the one that a hook monitors, else of the validation
    loss.

    Without either: of another validation metric, else of the training loss, if the better direction is known.
    """
    known = {
        f"{each.name}{EPOCH}" if each.over == "epoch" and each.name in run.own else each.name: each
        for each in progress_of(run)
    }
    usable = {name: each for name, each in known.items() if each.best is not None}
    recorded = _recorded_bests(run)
    chosen = [metric] if metric is not None else [*modes_of(run), *sorted(usable, key=_preference)]
    for name in chosen:
        # prefer the mean of an epoch to the value of a single step
        each = usable.get(f"{name}{EPOCH}") or usable.get(name)
        if each is not None and each.best is not None and each.direction is not None:
            return Best(each.name, each.best.value, each.direction, each.best.step)
        if name in recorded:
            return recorded[name]
    return None


def _preference(name: str) -> tuple[bool, bool, bool, int, str]:
    words = re.findall(r"[a-z]+[0-9]*|[0-9]+", name.lower())
    is_validation = any(each in VALIDATION_WORDS for each in words)
    return not is_validation, name not in LOSSES, "loss" not in words, len(name), name


def _recorded_bests(run: RecordedRun) -> dict[str, Best]:
    """Return the best values that the run's hooks found, from its record."""
    found: dict[str, Best] = {}
    for monitor in _recorded_monitors(run):
        name, value = monitor["metric"], monitor.get("best")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found.setdefault(name, Best(name, float(value), DIRECTIONS[monitor["mode"]]))
    return found
