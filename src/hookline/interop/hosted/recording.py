"""The state, the checkpoints and the metric rows of a hosted run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.distributed.comm import Ranks
from hookline.engine.plan import Plan
from hookline.interop.hosted.checkpoints import hosted_state, restore_state, save
from hookline.interop.hosted.rank_sync import BETWEEN_EPOCHS, HostedRankSync
from hookline.interop.hosted.view import HostView
from hookline.metrics.accumulator import Accumulator
from hookline.run.parts import Participants, Progress, Resume
from hookline.run.reduction import WaitingRows
from hookline.run.rows import MetricRows
from hookline.run.state import State
from hookline.run.view import View


class Recording(HostView):
    """The part of a run that is saved and written, the same for every host."""

    is_running: bool
    rank_sync: HostedRankSync | None
    _saved_state: dict[str, Any] | None
    if TYPE_CHECKING:  # the loops need these of a run, hooks do not
        progress: Progress
        participants: Participants
        resume: Resume
        rows: MetricRows

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks and the progress of the run, for a checkpoint."""
        return hosted_state(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned: at once in a run, else when the run begins, after the hooks'
        setup.
        """
        if self.is_running:
            restore_state(self, state)
        else:
            self._saved_state = state

    def save_checkpoint(
        self, path: str | Path | None = None, reason: str = "manual", monitor: dict[str, Any] | None = None
    ) -> None:
        """Request a checkpoint: written at the next save point of the run, or at once outside of a run."""
        super().save_checkpoint(path, reason, monitor)
        if not self.is_running:
            self.save_due()

    def write_row(self, values: dict[str, Any], over: str = "step") -> None:
        """Let hooks edit a row of metrics, then pass it to the loggers. over: 'step', 'epoch' or
        'evaluation'.
        """
        self.rows.write(values, over)

    def update_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Take over the host's metrics. A known value keeps its object, because monitors recognize old values
        by identity.
        """
        newest = self.state.log.newest
        for name, value in metrics.items():
            if name not in newest or newest[name] != float(value):
                newest[name] = value

    def write_pending(self) -> None:
        """Write the values that were logged since the last row."""
        self.rows.write_pending()

    @property
    def should_stop(self) -> bool:
        """Return whether the loop is to end: as requested, or with several ranks as they have agreed."""
        return self.state.should_stop if self.rank_sync is None else self.rank_sync.stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        View.should_stop.fset(self, stop)  # type: ignore[attr-defined]

    def sync_point(self, point: int = BETWEEN_EPOCHS) -> None:
        """Wait for all ranks between batches, then write the checkpoints that any of them requested."""
        if self.rank_sync is not None:
            self.rank_sync.sync_point(point)
        self.save_due()

    def save_due(self, ranks: Ranks | None = None) -> None:
        """Write the checkpoints that were requested, and agreed on by all ranks."""
        source = self.save_requests if self.rank_sync is None else self.rank_sync.agreed
        while source:
            save(self, source.pop(0), ranks or self.ranks)


# ---- Rows of metrics in a hosted run


class HostedRows(MetricRows):
    """The rows of one process of a hosted run."""

    def __init__(self, plan: Plan, state: State, holds: bool) -> None:
        """holds: whether rows wait until the host logs."""
        super().__init__(plan, state)
        self.holds = holds
        self.over_ranks: WaitingRows | None = None
        """Reduces the results of a pass over all ranks, if there are several."""

    def write(
        self, values: dict[str, Any], over: str = "step", step: int | None = None, epoch: int | None = None
    ) -> None:
        """Let listeners edit a row, then send it to the loggers; or keep it for the host's next row."""
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
