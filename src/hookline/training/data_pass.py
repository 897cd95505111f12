"""Fetching batches, and one pass over data without training: how it reads loaders and ends early."""

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
from hookline.reliability.loader_advice import check_waiting, warn_of_waiting
from hookline.run.run import Run, phase
from hookline.run.state import FETCHING, OPENING, State
from hookline.run.timer import SAMPLE_EVERY, RunTimer


class Fetcher:
    """Fetch the batches of a loader into the state, emit the events around it and measure the waiting time.

    Use it as `while fetcher.fetch():`. It is not an iterator, because a hook may raise StopIteration like any
    other error. The batch goes straight into the state: a reference here would keep it alive after it was
    moved to the device.
    """

    __slots__ = ("_batches", "_due", "_fetching", "_first", "_index", "_outer", "_run", "_spent", "_timer")

    def __init__(
        self, run: Run, batches: Iterator[Any], first: int = 0, timer: RunTimer | None = None
    ) -> None:
        """Take the number of the first batch. timer: sums waiting times, samples steps; None: no training."""
        self._run, self._batches, self._timer = run, iter(batches), timer
        self._first, self._index = first, first - 1
        self._spent: dict[str, int] = {"data": 0} if timer is None else timer.spent
        self._due: float = math.inf if timer is None else timer.next_due
        self._outer = run.state.running
        self._fetching = (FETCHING[0], self._outer)

    def fetch(self, clock: Callable[[], int] = time.perf_counter_ns) -> bool:
        """Fetch the next batch and its number into the state; return False if there is none."""
        s = self._run.state
        plan = self._run.plan
        if s.counts.step >= self._due:
            self._due = take_sample(self._run, self._timer)  # type: ignore[arg-type]  # without a timer it is never due
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
        except BaseException:  # the error is of this batch, not of the one before
            s.current.batch, s.current.batch_idx = None, index
            raise
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
        """End what is open after the last batch; drop the timer's sample if its window is not complete."""
        if self._timer is not None:
            if self._run.window.batches:
                self._timer.sampler.abandon()
            end_samples(self._run, self._timer)


def read_batches(
    s: State, loader: Any, batches: Iterator[Any], clock: Callable[[], int] = time.perf_counter_ns
) -> Iterator[Any]:
    """Yield the batches of a hand-written loop. The wait for each is the fact `fetch_seconds`; long waits are
    a warning.
    """
    current, timer, is_first = s.current, s.timer, True
    began = clock()
    for batch in batches:
        current.fetch_ns = waited = clock() - began
        timer.spent["data"] += waited
        if is_first:
            timer.epochs, timer.first_waits, is_first = timer.epochs + 1, timer.first_waits + waited, False
        elif s.counts.batches_seen % SAMPLE_EVERY == 0:
            warn_of_waiting(s, loader)
        yield batch
        began = clock()
    timer.spent["data"] += clock() - began
    warn_of_waiting(s, loader)


def take_sample(run: Run, timer: RunTimer) -> float:
    """Between two accumulation windows, end what observes the last one, and begin to observe the next one.

    The timer and each observer do so one at a time, recorders at the steps that they are due at. Return the
    step of the next call.
    """
    step, sampler = run.state.counts.step, timer.sampler
    if run.window.batches:
        return step
    was_sampled = end_samples(run, timer)
    for recorder in timer.recorders:
        if step >= recorder.due:
            recorder.begin()
    if not was_sampled and step >= timer.due:
        check_waiting(run, timer)
        sampler.begin(run.traits.is_manual, run.traits.recomputes)
        timer.due = step if sampler.is_open else step + SAMPLE_EVERY
    for observer in () if sampler.is_open else timer.observers:
        if step >= observer.due:
            observer.begin()
            return step
    return timer.next_due


def end_samples(run: Run, timer: RunTimer) -> bool:
    """End the sample of the timer and what the observers have begun; return whether there was a sample."""
    for observer in timer.observers:
        if observer.is_open:
            observer.end()
    step, was_sampled = run.state.counts.step, timer.sampler.is_open
    if was_sampled:
        timer.due = step + SAMPLE_EVERY - 1 if timer.sampler.end() else step
    for recorder in timer.recorders:
        if recorder.is_open and not run.window.batches:  # a window that is open is closed after the epoch
            recorder.end()
    return was_sampled


class ValidationAbandoned(Exception):
    """Raised when a signal ends the process during a validation. A resumed run validates again."""


class DataPass:
    """A pass of one process."""

    def __init__(self, run: Run, can_be_cut: bool) -> None:
        """Take can_be_cut: whether a signal abandons the pass."""
        self.run = run
        self.can_be_cut = can_be_cut
        self.is_stopped = False
        """Whether a stop was requested during the pass."""

    def open(self, loader: Loader, limit: int | None = None) -> Fetcher:
        """Open a loader. limit: the largest number of batches to fetch."""
        most = None if limit is None else min(limit, sys.maxsize)
        return Fetcher(self.run, itertools.islice(_open_loader(self.run, loader), most))

    def take(self, loader: Loader, measure: Callable[[], None], step: Callable[[Plan], Caller]) -> None:
        """Measure the batch that was fetched. step: returns the slot of the step that `measure` calls."""
        measure()

    def is_over(self) -> bool:
        """Return whether a stop was requested; call it after each batch. A signal abandons the pass."""
        run = self.run
        return self.end_if(run.signals.number, run.state.should_stop and run.stage != "fit")

    def end_if(self, signal: int, stop: bool) -> bool:
        """Abandon the pass on a signal; return whether it stops."""
        if signal and self.can_be_cut:
            self.run.plan.on_validation_abandoned(self.run.state)
            raise ValidationAbandoned
        self.is_stopped = bool(stop)
        return self.is_stopped


@phase(OPENING)
def _open_loader(run: Run, loader: Loader) -> Iterator[Any]:
    loader.sampler_epoch = run.state.epochs_seen
    loader.keeps_indices = "sample_ids" in run.plan.wanted
    run.state.current.indices_of = loader.sample_ids
    return loader.batches(0)
