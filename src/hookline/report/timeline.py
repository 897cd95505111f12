"""The timeline of hooks: when each was called, and its share of the time."""

from __future__ import annotations

from typing import Any

from hookline.report.reader import RunData
from hookline.report.trace_columns import Lane, TraceData

CELLS = 20_000
"""The most cells of all timelines of a page."""
PER_LANE = (40, 300)
MOST_LANES = 40
"""The most lanes of one rank, by cost."""


def timelines(runs: list[RunData]) -> list[dict[str, Any]]:
    """Return one timeline for each run and rank that was traced."""
    found = [
        (number, rank, run.trace)
        for number, run in enumerate(runs)
        if run.trace is not None
        for rank in sorted({lane.rank for lane in run.trace.lanes.values()})
    ]
    lanes = sum(len(_most_expensive(trace, rank)) for _, rank, trace in found)
    most = max(PER_LANE[0], min(PER_LANE[1], CELLS // max(1, lanes)))
    return [_timeline(number, rank, trace, most) for number, rank, trace in found]


def _most_expensive(trace: TraceData, rank: int) -> list[Lane]:
    lanes = [each for each in trace.lanes.values() if each.rank == rank]
    return sorted(lanes, key=lambda each: -each.total)[:MOST_LANES]


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
