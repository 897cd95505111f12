"""The charts of a page: which metrics share one, with how many points; heat maps of layers, timelines of
hooks.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline.report.reader import EPOCH, Floats, RecordedRun, Series
from hookline.report.trace_columns import Lane, TraceData

POINTS = 45_000
"""Points of all curves of a page together; with the picture budget it keeps a page below about 3 MB."""
MOST_SERIES = 400
POINTS_PER_CURVE = (100, 1000)
HEAT_MAP_CELLS = 50_000
"""Cells of all heat maps together."""
MOST_LAYERS = 200
COLUMNS_PER_MAP = (16, 160)
MOST_DIGITS = 15
"""Digits of a number in a curve."""

STAGE_PREFIXES = ("train", "val", "valid", "validation", "test")
OF_STAGE = re.compile(rf"({'|'.join(STAGE_PREFIXES)})([/_])(.+)")
"""A metric of a stage: `val/loss`, or `val_loss` as in Lightning."""
LEVEL = re.compile(r"(?<!_per)_(?:step|epoch)$")
"""The ending that Lightning adds to a metric of both levels: `train_loss_step`, `train_loss_epoch`."""
HEADLINES = ("train/loss", "val/loss")
"""Shown on the card of a run."""
CHART_SECTIONS = ("Loss and metrics", "Learning rate", "Gradients", "Throughput", "Device", "Other metrics")
DEVICE_PREFIXES = ("cpu", "cuda", "gpu", "device")
RATE_DETAIL = re.compile(r"-(momentum|beta2|weight_decay)(?=/|$)")
FAMILIES = (
    (re.compile(r"(grad_norm)/(.+)"), "gradient norm"),
    (re.compile(r"(update_ratio)/(.+)"), "size of the update over size of the weights"),
    (re.compile(r"(gradients/p[\d.]+)/(.+)"), "percentile of gradient magnitudes"),
    (re.compile(r"activations/(?P<row>.+)/(?P<family>[^/]+)"), "activations"),
)
"""Metrics with one value per layer: one heat map each, not a hundred curves."""


def layer_of(name: str) -> tuple[str, str, str] | None:
    """Return the heat map, row and meaning of a metric that belongs to a layer; None for any other."""
    for pattern, meaning in FAMILIES:
        if match := pattern.fullmatch(name):
            named = match.groupdict()
            family = f"activations: {named['family']}" if named else match[1]
            return family, named.get("row") or match[2], meaning
    return None


def section_of(name: str) -> tuple[str, str]:
    """Return the section of a metric, and the chart that it shares with others."""
    name = name.removesuffix(EPOCH)
    first, slash, rest = name.partition("/")
    if first == "lr" or first.startswith("lr-"):
        detail = RATE_DETAIL.search(name)
        return "Learning rate", f"{detail[1].replace('_', ' ')}" if detail else "learning rate"
    if first in ("grad_norm", "gradients", "loss_scale"):
        return "Gradients", name
    if match := OF_STAGE.fullmatch(name):
        rest = match[3] if match[2] == "/" else LEVEL.sub("", match[3])
        loader, _, metric = rest.partition("/")
        return "Loss and metrics", f"{metric} of each loader" if loader.startswith("dl_") and metric else rest
    if not slash:
        return "Loss and metrics", name
    if first == "loss":
        return "Loss and metrics", name
    if first == "throughput":
        return "Throughput", rest.replace("_per_sec", " per second")
    return ("Device" if first in DEVICE_PREFIXES else "Other metrics"), name


def sections(runs: list[RecordedRun]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return all charts by section, and the names of the metrics that are not drawn."""
    charts: dict[tuple[str, str], list[tuple[int, str, Series]]] = {}
    for number, run in enumerate(runs):
        for name, series in drawn_series(run).items():
            if layer_of(name) is None:
                charts.setdefault(section_of(name), []).append((number, name, series))
    ordered = sorted(charts, key=_chart_order)
    count = sum(len(each) for each in charts.values())
    most = max(POINTS_PER_CURVE[0], min(POINTS_PER_CURVE[1], POINTS // max(1, min(count, MOST_SERIES))))
    made: dict[str, list[dict[str, Any]]] = {}
    left_out: list[str] = []
    room = MOST_SERIES
    for section, title in ordered:
        members = sorted(
            charts[section, title], key=lambda each: (_stage(each[1]), _natural(each[1]), each[0])
        )
        left_out += [name for _, name, _ in members[max(0, room) :]]
        drawn = [_curve(number, name, series, most) for number, name, series in members[: max(0, room)]]
        room -= len(drawn)
        if any(each["x"] for each in drawn):
            made.setdefault(section, []).append({"title": title, "series": drawn})
    return [{"title": title, "charts": made[title]} for title in CHART_SECTIONS if title in made], sorted(
        set(left_out)
    )


def _chart_order(chart: tuple[str, str]) -> tuple[int, bool, int]:
    """Return the sort key of a chart: losses first, the shortest name before longer ones, the rest as
    logged.
    """
    section, title = chart
    is_loss = "loss" in title
    return CHART_SECTIONS.index(section), not is_loss, len(title) if is_loss else 0


def _stage(name: str) -> int:
    match = OF_STAGE.fullmatch(name)
    return STAGE_PREFIXES.index(match[1]) if match else len(STAGE_PREFIXES)


def _natural(name: str) -> list[Any]:
    """Return a sort key that compares numbers in a name as numbers: 2 before 10."""
    parts = re.split(r"([0-9]+)", name)  # the numbers, of any length, are at odd indices
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if index % 2 else part for index, part in enumerate(parts)
    ]


def _curve(run: int, name: str, series: Series, most: int) -> dict[str, Any]:
    steps, values = in_order(*series.arrays())
    x, y, means = min_max(steps, values, most)
    digits = _digits(y)
    made = {
        "run": run,
        "name": name,
        "x": x.astype(np.int64).tolist(),
        "y": _round_values(y, digits),
        "of": len(series.steps),
    }
    return made if means is None else {**made, "mean": _round_values(means, digits)}


def metric_rows(runs: list[RecordedRun]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return every metric's last, lowest and highest value, from all of its values and unrounded; and the
    names without a row.
    """
    each_shown = [drawn_series(run) for run in runs]
    names = list(dict.fromkeys(name for found in each_shown for name in found if layer_of(name) is None))
    names, left_out = names[:MOST_SERIES], names[MOST_SERIES:]
    names.sort(
        key=lambda name: (
            CHART_SECTIONS.index(section_of(name)[0]),
            "loss" not in name,
            _natural(section_of(name)[1]),
            _stage(name),
            _natural(name),
        )
    )
    rows = []
    for name in names:
        for number, found in enumerate(each_shown):
            if name in found:
                rows.append({"run": number, "name": name, **_extremes(found[name])})
    return rows, left_out


def drawn_series(run: RecordedRun) -> dict[str, Series]:
    """Return the metrics of a run that have values, each once.

    Every row of a step has the rate of the first parameter group as `lr`, and LRMonitor logs it under another
    name. The one with fewer values is left out.
    """
    found = {name: series for name, series in run.series.items() if series.steps}
    rates = [name for name in found if name.startswith("lr-") and not RATE_DETAIL.search(name)]
    if "lr" in found and rates:
        plain, named = found["lr"], found[rates[0]]
        if len(rates) == 1 and len(named.values) <= len(plain.values):
            if np.isin(named.arrays()[1], plain.arrays()[1]).all():
                del found[rates[0]]
        elif np.isin(plain.arrays()[1], named.arrays()[1]).all():
            del found["lr"]
    return found


def headline_losses(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the losses for a run's card: the newest step's value, or the epoch's mean if it is as new, and
    the lowest.
    """
    found = drawn_series(run)
    rows: list[dict[str, Any]] = []
    for name in HEADLINES:
        known = [each for each in (f"{name}{EPOCH}", name) if each in found]
        if known:
            # of equals the first, which is the mean
            chosen = max(known, key=lambda each: found[each].steps[-1])
            row = _extremes(found[chosen])
            rows.append({"name": chosen, "last": row["last"], "min": row.get("min")})
    return rows


def _extremes(series: Series) -> dict[str, Any]:
    steps, values = series.arrays()
    last = float(values[-1])
    finite = np.flatnonzero(np.isfinite(values))
    found: dict[str, Any] = {
        "count": len(values),
        "bad": int(len(values) - finite.size),
        "last_step": int(steps[-1]),
        "last": last if math.isfinite(last) else str(last),
    }
    if finite.size:
        for what, index in (
            ("min", finite[np.argmin(values[finite])]),
            ("max", finite[np.argmax(values[finite])]),
        ):
            found |= {what: float(values[index]), f"{what}_step": int(steps[index])}
    return found


def heat_maps(runs: list[RecordedRun]) -> list[dict[str, Any]]:
    """Return one map per run and family: a row for every layer in logged order, a column for a few steps."""
    families: dict[tuple[int, str, str], dict[str, Series]] = {}
    for number, run in enumerate(runs):
        for name, series in run.series.items():
            if series.steps and (found := layer_of(name)) is not None:
                families.setdefault((number, found[0], found[2]), {})[found[1]] = series
    rows = sum(min(MOST_LAYERS, len(each)) for each in families.values())
    most = max(COLUMNS_PER_MAP[0], min(COLUMNS_PER_MAP[1], HEAT_MAP_CELLS // max(1, rows)))
    return [_heat_map(key, layers, most) for key, layers in families.items()]


def _heat_map(key: tuple[int, str, str], layers: dict[str, Series], most: int) -> dict[str, Any]:
    names = list(layers)[:MOST_LAYERS]
    arrays = [layers[name].arrays() for name in names]
    firsts, column = group_columns(np.concatenate([steps for steps, _ in arrays]), most)
    values, done = [], 0
    for steps, row in arrays:
        found = strongest(column[done : done + steps.size], row, firsts.size)
        done += steps.size
        values.append([_cell(each) for each in found.tolist()])
    return {
        "run": key[0],
        "family": key[1],
        "meaning": key[2],
        "rows": names,
        "steps": firsts.astype(np.int64).tolist(),
        "values": values,
        "left_out": len(layers) - len(names),
    }


def _cell(value: float) -> float | str | None:
    """Return a cell for JSON, which has no value for missing or non-finite numbers."""
    return None if math.isnan(value) else "x" if math.isinf(value) else float(f"{value:.4g}")


def _digits(values: Floats) -> int:
    """Return the digits that show the shape of a curve: a curve near a million needs more than a curve around
    zero.
    """
    if not values.size:
        return 6
    low, high = float(values.min()), float(values.max())
    spread, size = high - low, max(abs(low), abs(high))
    if not spread or not math.isfinite(spread):
        return MOST_DIGITS  # a constant is short or exact
    return min(MOST_DIGITS, 6 + max(0, math.ceil(math.log10(size / spread))))


def _round_values(values: Floats, digits: int) -> list[float]:
    return [float(f"{each:.{digits}g}") for each in values.tolist()]


# ---- downsampling ------------------------------------------------------------------------------------------


def in_order(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the finite values sorted by step.

    Steps in a log may go back: a user's own counter, or a second fit into one directory.
    """
    kept = np.isfinite(values) & np.isfinite(steps)
    steps, values = steps[kept], values[kept]
    if steps.size > 1 and np.any(np.diff(steps) < 0):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    return steps, values


def min_max(steps: Floats, values: Floats, most: int) -> tuple[Floats, Floats, Floats | None]:
    """Return at most `most` of the points, each a true one: the lowest and highest of every bucket, and both
    ends.

    The third result is the mean of each point's bucket, from which a smoothed curve starts; None if no point
    was left out. The steps must be sorted. Buckets are equally wide in steps, as pixels are.
    """
    if steps.size <= most:
        return steps, values, None
    buckets = max(1, (most - 2) // 2)
    width = (steps[-1] - steps[0]) / buckets
    if width > 0:
        bucket = np.minimum(((steps - steps[0]) / width).astype(np.int64), buckets - 1)
    else:  # all values have the same step
        bucket = np.zeros(steps.size, dtype=np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    by_value = np.lexsort((values, bucket))  # within each bucket from the lowest to the highest
    ends = np.append(starts[1:], steps.size) - 1
    chosen = np.unique(np.concatenate(([0, steps.size - 1], by_value[starts], by_value[ends])))
    means = np.add.reduceat(values, starts) / (ends - starts + 1)
    which = np.cumsum(np.diff(bucket, prepend=-1) != 0) - 1  # empty buckets are not counted
    return steps[chosen], values[chosen], means[which[chosen]]


def group_columns(steps: Floats, most: int) -> tuple[Floats, NDArray[np.int64]]:
    """Group steps into at most `most` columns; return the first step of each column, and the column of every
    step.
    """
    distinct, index = np.unique(steps, return_inverse=True)
    per_column = -(-distinct.size // most)
    return distinct[::per_column], index.reshape(-1).astype(np.int64) // max(1, per_column)


def strongest(column: NDArray[np.int64], values: Floats, count: int) -> Floats:
    """Return the value of the largest magnitude per column, a non-finite value before all others; NaN for an
    empty column.

    Infinity stands for any non-finite value, so that an explosion shows among a thousand normal steps.
    """
    found = np.full(count, np.nan)
    magnitude = np.where(np.isfinite(values), np.abs(values), np.inf)
    order = np.argsort(magnitude, kind="stable")  # later writes win
    found[column[order]] = np.where(np.isfinite(values), values, np.inf)[order]
    return found


# ---- the timeline of hooks ---------------------------------------------------------------------------------


TIMELINE_CELLS = 20_000
"""The most cells of all timelines of a page."""
CELLS_PER_LANE = (40, 300)
MOST_LANES_SHOWN = 40
"""The most lanes of one rank, by cost."""


def timelines(runs: list[RecordedRun]) -> list[dict[str, Any]]:
    """Return one timeline for each run and rank that was traced."""
    found = [
        (number, rank, run.trace)
        for number, run in enumerate(runs)
        if run.trace is not None
        for rank in sorted({lane.rank for lane in run.trace.lanes.values()})
    ]
    lanes = sum(len(_most_expensive(trace, rank)) for _, rank, trace in found)
    most = max(CELLS_PER_LANE[0], min(CELLS_PER_LANE[1], TIMELINE_CELLS // max(1, lanes)))
    return [_timeline(number, rank, trace, most) for number, rank, trace in found]


def _most_expensive(trace: TraceData, rank: int) -> list[Lane]:
    lanes = [each for each in trace.lanes.values() if each.rank == rank]
    return sorted(lanes, key=lambda each: -each.total)[:MOST_LANES_SHOWN]


def _timeline(run: int, rank: int, trace: TraceData, most: int) -> dict[str, Any]:
    """Return the cells that have a call: lane, column, seconds, calls, and the longest call's seconds, event
    and step.
    """
    lanes = _most_expensive(trace, rank)
    together = -(-trace.columns // most)
    columns = -(-trace.columns // together)
    events = list(dict.fromkeys(what for lane in lanes for _, what, _ in lane.longest.values()))
    cells = [cell for row, lane in enumerate(lanes) for cell in _cells(row, lane, together, columns, events)]
    return {
        "run": run,
        "rank": rank,
        "width": trace.width * together / 1e6,
        "columns": columns,
        "events": events,
        "cells": cells,
        "lanes": [{"name": each.name, "calls": each.calls, "total": each.total / 1e6} for each in lanes],
        "left_out": len([each for each in trace.lanes.values() if each.rank == rank]) - len(lanes),
    }


def _cells(row: int, lane: Lane, together: int, columns: int, events: list[str]) -> list[list[float]]:
    made = []
    for column in range(columns):
        part = range(column * together, min((column + 1) * together, len(lane.busy)))
        busy, calls = sum(lane.busy[at] for at in part), sum(lane.counts[at] for at in part)
        if busy or calls:
            took, what, step = max(
                (lane.longest[at] for at in part if at in lane.longest), default=(0.0, "", 0)
            )
            seconds, longest = float(f"{busy / 1e6:.4g}"), float(f"{took / 1e6:.4g}")
            made.append([row, column, seconds, calls, longest, events.index(what) if what else -1, step])
    return made
