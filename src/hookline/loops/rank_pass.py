"""One pass of one rank among several over data without training."""

from __future__ import annotations

from collections.abc import Callable

from hookline.binding import Caller
from hookline.data.loaders import Loader
from hookline.loops.data_pass import DataPass
from hookline.loops.ghosts import run_along
from hookline.loops.run import Run
from hookline.plan import Plan
from hookline.ranks import Answer


class RankPass(DataPass):
    """A pass of one rank among several: they end it after the same batch, and one that is out of data runs
    padding batches.
    """

    def __init__(self, run: Run, can_be_cut: bool) -> None:
        super().__init__(run, can_be_cut)
        self._asked: Answer | None = None

    def take(self, loader: Loader, measure: Callable[[], None], step: Callable[[Plan], Caller]) -> None:
        """Measure the batch. A padding batch only runs its step, and only where the other ranks' forward
        needs this rank.
        """
        if not loader.share.turn.is_ghost:
            measure()
        elif self.run.strategy.forward_communicates:
            run_along(self.run, step(self.run.plan))

    def is_over(self) -> bool:
        """Return what all ranks have said one batch before."""
        run = self.run
        said = (run.signals.received, run.state.should_stop and run.stage != "fit")
        before, self._asked = self._asked, run.strategy.ranks.largest(said)
        signal, stop = (0, False) if before is None else before.read()
        return self.end_if(signal, bool(stop))
