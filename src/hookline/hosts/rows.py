"""Rows of metrics in a hosted run: they go to the loggers, or wait until the host logs its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.accumulator import Accumulator
from hookline.loops.reducing import Rows
from hookline.loops.rows import MetricRows
from hookline.plan import Plan
from hookline.state import State


class HostedRows(MetricRows):
    """The rows of one process of a hosted run."""

    def __init__(self, plan: Plan, state: State, holds: bool) -> None:
        """holds: whether rows wait until the host logs."""
        super().__init__(plan, state)
        self.holds = holds
        self.over_ranks: Rows | None = None
        """Reduces the results of a pass over all ranks, if there are several."""

    def write(
        self, values: dict[str, Any], over: str = "step", step: int | None = None, epoch: int | None = None
    ) -> None:
        """Let listeners edit a row, then send it to the loggers; or keep it for the row of the host."""
        if self.holds:
            self.state.log.pending.update(values)
        else:
            super().write(values, over, step, epoch)

    def finish(
        self, mode: str, more: Mapping[str, Accumulator], pending: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the results of a pass, over all ranks if there are several."""
        if self.over_ranks is None:
            return super().finish(mode, more, pending)
        return self.over_ranks.finish(mode, more, pending)
