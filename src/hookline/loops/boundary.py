"""The boundary between two batches: commands that were sent are carried out there, and a stop
takes effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.errors import Signal
from hookline.loops.errands import do_errands


class Boundary:
    """The boundary of a run in one process."""

    waits_for_signals = True
    """Whether a hook's signal takes effect at the batch that it is returned for."""

    asks = 0
    """How often the ranks of this run have exchanged what is new."""

    def __init__(self, run: Any) -> None:
        self.run = run

    @property
    def is_stopping(self) -> bool:
        """Whether the run is to stop."""
        return bool(self.run.state.should_stop)

    @property
    def signal_filters(self) -> tuple[Callable[[Signal | None], Signal | None], ...]:
        """What becomes of the signal that hooks return before an update."""
        return ()

    def after_batch(self) -> None:
        """Carry out the commands that were sent."""
        if self.run.participants.errands.waiting:
            do_errands(self.run, self.run.participants.errands.left())

    def settle(self) -> None:
        """Do the same between epochs, and at the beginning and the end of training."""
        self.after_batch()

    def stop_by_clock(self) -> None:
        """Stop because the time is over."""
