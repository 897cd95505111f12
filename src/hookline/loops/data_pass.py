"""One pass over data without training: how its loaders are read, and when it ends early."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hookline.binding import Caller
from hookline.data.loaders import Loader
from hookline.loops.fetching import Fetcher
from hookline.loops.run import Run, phase
from hookline.plan import Plan
from hookline.state import OPENING


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
