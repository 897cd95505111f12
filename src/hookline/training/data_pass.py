"""One pass over data without training: how its loaders are read, and when it ends early."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hookline.data.loaders import Loader
from hookline.engine.binding import Caller
from hookline.engine.plan import Plan, noop
from hookline.reliability.loader_advice import check_waiting
from hookline.run.run import Run, phase
from hookline.run.state import FETCHING, OPENING
from hookline.run.timer import EVERY, RunTimer

# ---- Fetches batches from a loader


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


class GivenUp(Exception):
    """A signal has cut a validation short: the process is to end, and the validation is done again after the
    resume.
    """


class DataPass:
    """A pass of one process."""

    def __init__(self, run: Run, can_be_cut: bool) -> None:
        """can_be_cut: whether a signal gives the pass up."""
        self.run = run
        self.can_be_cut = can_be_cut
        self.was_over = False
        """Whether the pass was told to stop."""

    def open(self, loader: Loader, limit: int | None = None) -> Fetcher:
        """Open a loader. limit: how many of its batches are fetched at most."""
        most = None if limit is None else min(limit, sys.maxsize)
        return Fetcher(self.run, itertools.islice(_open(self.run, loader), most))

    def take(self, loader: Loader, measure: Callable[[], None], step: Callable[[Plan], Caller]) -> None:
        """Measure the batch that was fetched. step: finds the slot of the step that `measure` calls."""
        measure()

    def is_over(self) -> bool:
        """After a batch: return whether the pass was told to stop. A signal gives it up."""
        run = self.run
        return self.end_if(run.signals.number, run.state.should_stop and run.stage != "fit")

    def end_if(self, signal: int, stop: bool) -> bool:
        """Give the pass up on a signal; return whether it is told to stop."""
        if signal and self.can_be_cut:
            self.run.plan.on_validation_abandoned(self.run.state)
            raise GivenUp
        self.was_over = bool(stop)
        return self.was_over


@phase(OPENING)
def _open(run: Run, loader: Loader) -> Iterator[Any]:
    return loader.batches(0)
