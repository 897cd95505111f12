"""Fetches batches from a loader: the events around it, and the time the loop waits for it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

from hookline.loops.loader_advice import check_waiting
from hookline.loops.run import Run
from hookline.loops.timer import EVERY, RunTimer
from hookline.plan import nobody
from hookline.state import FETCHING


def fetched(run: Run, batches: Iterator[Any], first: int = 0, timer: RunTimer | None = None) -> Iterator[int]:
    """Yield the number of each batch once `s.batch` holds it. With a timer, count the waiting, and sample steps.

    The batch goes straight into the state: a reference here would keep it alive after it was moved to the device.
    """
    plan, s, clock, batches = run.plan, run.state, time.perf_counter_ns, iter(batches)
    spent: dict[str, int] = {"data": 0} if timer is None else timer.spent
    due: float = math.inf if timer is None else timer.due
    outer = s.running
    fetching = (FETCHING[0], outer)
    try:
        for index in itertools.count(first):
            if s.step >= due:
                due = sample(run, timer)  # type: ignore[arg-type]  # without a timer it is never due
            if plan.on_before_batch_fetch is not nobody:
                s.batch_idx = index
                plan.on_before_batch_fetch(s)
            s.running = fetching
            began = clock()
            try:
                s.batch = next(batches)
            except StopIteration:
                s.running = outer
                spent["data"] += clock() - began
                s.batch_idx = max(first, index - 1)
                return
            s.fetch_ns = waited = clock() - began
            s.running = outer
            spent["data"] += waited
            if index == first and timer is not None:
                timer.epochs += 1
                timer.first_waits += waited
            if plan.on_after_batch_fetch is not nobody:
                s.batch_idx = index
                plan.on_after_batch_fetch(s)
            yield index
    finally:
        if timer is not None:
            leave(run, timer)


def sample(run: Run, timer: RunTimer) -> float:
    """Between two batches: begin or end a sample, at the edge of an accumulation window. Return the step to come back at."""
    s, sampler = run.state, timer.sampler
    if run.window.batches:
        return s.step
    if sampler.is_open:
        timer.due = s.step + EVERY - 1 if sampler.end() else s.step
        return timer.due
    check_waiting(run, timer)
    sampler.begin(run.traits.is_manual, run.traits.recomputes)
    timer.due = s.step if sampler.is_open else s.step + EVERY
    return timer.due


def leave(run: Run, timer: RunTimer) -> None:
    """The epoch has no more batches, or is left: a sample whose window is complete counts."""
    if timer.sampler.is_open:
        if run.window.batches:
            timer.sampler.abandon()
        else:
            sample(run, timer)
