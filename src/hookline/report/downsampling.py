"""Downsampling: reduce a million values to as many as a screen can show, without losing a spike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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


def columns(steps: Floats, most: int) -> tuple[Floats, NDArray[np.int64]]:
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
