"""Fewer points, same picture: a million values become as many as a screen can show, and no spike is lost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def in_order(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The finite values by step. A log may go back in steps: somebody's own counter, or a second fit into one
    directory.
    """
    kept = np.isfinite(values) & np.isfinite(steps)
    steps, values = steps[kept], values[kept]
    if steps.size > 1 and np.any(np.diff(steps) < 0):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    return steps, values


def min_max(steps: Floats, values: Floats, most: int) -> tuple[Floats, Floats, Floats | None]:
    """At most `most` of the points, each a true one: the lowest and the highest of every bucket, and both
    ends.

    Third comes the mean of each point's bucket, which a smoothed curve starts from: halfway between the
    extremes is no mean. None if nothing was left out. The steps must be in order. Buckets are equally wide in
    steps, as pixels are.
    """
    if steps.size <= most:
        return steps, values, None
    buckets = max(1, (most - 2) // 2)
    width = (steps[-1] - steps[0]) / buckets
    if width > 0:
        bucket = np.minimum(((steps - steps[0]) / width).astype(np.int64), buckets - 1)
    else:  # everything under one step
        bucket = np.zeros(steps.size, dtype=np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    by_value = np.lexsort((values, bucket))  # within each bucket from the lowest to the highest
    ends = np.append(starts[1:], steps.size) - 1
    chosen = np.unique(np.concatenate(([0, steps.size - 1], by_value[starts], by_value[ends])))
    means = np.add.reduceat(values, starts) / (ends - starts + 1)
    which = (
        np.cumsum(np.diff(bucket, prepend=-1) != 0) - 1
    )  # buckets may be empty, so they are counted as they come
    return steps[chosen], values[chosen], means[which[chosen]]


def columns(steps: Floats, most: int) -> tuple[Floats, NDArray[np.int64]]:
    """Steps put together into at most `most` columns: the first step of each column, and the column of every
    step.
    """
    distinct, place = np.unique(steps, return_inverse=True)
    per_column = -(-distinct.size // most)
    return distinct[::per_column], place.reshape(-1).astype(np.int64) // max(1, per_column)


def strongest(column: NDArray[np.int64], values: Floats, count: int) -> Floats:
    """Per column the value of the largest magnitude, a value that is not finite before all others; NaN where
    there is none.

    Infinity stands for whatever is not finite, so that an explosion is still seen among a thousand quiet
    steps.
    """
    found = np.full(count, np.nan)
    magnitude = np.where(np.isfinite(values), np.abs(values), np.inf)
    order = np.argsort(magnitude, kind="stable")  # later writes win
    found[column[order]] = np.where(np.isfinite(values), values, np.inf)[order]
    return found
