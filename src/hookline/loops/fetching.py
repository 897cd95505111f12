"""Fetches batches from a loader: the events around it, and the time the loop waits for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from hookline.loops.loader_advice import check_waiting
from hookline.loops.run import Run
from hookline.loops.timer import EVERY, RunTimer
from hookline.plan import noop
from hookline.state import FETCHING


class Fetcher:
    """Fetches the batches of a loader into the state, with the events around it and the time that the loop
    waits.

    A loop over it is `while fetcher.fetch():`. It is no iterator, because a hook may raise StopIteration like
    any other error. The batch goes straight into the state: a reference here would keep it alive after it was
    moved to the device.
    """

    __slots__ = ("_batches", "_due", "_fetching", "_first", "_index", "_outer", "_run", "_spent", "_timer")

    def __init__(
        self, run: Run, batches: Iterator[Any], first: int = 0, timer: RunTimer | None = None
    ) -> None:
        """first: the number of the first batch. timer: counts the waiting, and samples steps; None outside
        training.
        """
        self._run, self._batches, self._timer = run, iter(batches), timer
        self._first, self._index = first, first - 1
        self._spent: dict[str, int] = {"data": 0} if timer is None else timer.spent
        self._due: float = math.inf if timer is None else timer.due
        self._outer = run.state.running
        self._fetching = (FETCHING[0], self._outer)

    def fetch(self, clock: Callable[[], int] = time.perf_counter_ns) -> bool:
        """Fetch the next batch into `state.batch`, and its number; return False if there is none."""
        s = self._run.state
        plan = self._run.plan
        if s.counts.step >= self._due:
            self._due = sample(self._run, self._timer)  # type: ignore[arg-type]  # without a timer it is never due
        self._index = index = self._index + 1
        if plan.on_before_batch_fetch is not noop:
            s.current.batch_idx = index
            plan.on_before_batch_fetch(s)
        s.running = self._fetching
        began = clock()
        try:
            s.current.batch = next(self._batches)
        except StopIteration:
            s.running = self._outer
            self._spent["data"] += clock() - began
            s.current.batch_idx = max(self._first, index - 1)
            return False
        s.current.fetch_ns = waited = clock() - began
        s.running = self._outer
        self._spent["data"] += waited
        if index == self._first and self._timer is not None:
            self._timer.epochs += 1
            self._timer.first_waits += waited
        s.current.batch_idx = index
        if plan.on_after_batch_fetch is not noop:
            plan.on_after_batch_fetch(s)
        return True

    def close(self) -> None:
        """No more batches are fetched: a sample whose window is complete counts."""
        if self._timer is not None:
            leave(self._run, self._timer)


def sample(run: Run, timer: RunTimer) -> float:
    """Between two batches: begin or end a sample, at the edge of an accumulation window. Return the step to
    come back at.
    """
    s, sampler = run.state, timer.sampler
    if run.window.batches:
        return s.counts.step
    if sampler.is_open:
        timer.due = s.counts.step + EVERY - 1 if sampler.end() else s.counts.step
        return timer.due
    check_waiting(run, timer)
    sampler.begin(run.traits.is_manual, run.traits.recomputes)
    timer.due = s.counts.step if sampler.is_open else s.counts.step + EVERY
    return timer.due


def leave(run: Run, timer: RunTimer) -> None:
    """The epoch has no more batches, or is left: a sample whose window is complete counts."""
    if timer.sampler.is_open:
        if run.window.batches:
            timer.sampler.abandon()
        else:
            sample(run, timer)
