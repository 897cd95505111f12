"""What is kept and written of a hosted run: its state, its checkpoints, its rows of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.hosts.agreeing import BETWEEN, HostedAgreement
from hookline.hosts.keeping import keep, put_back, save
from hookline.hosts.view import HostView
from hookline.loops.parts import Participants, Progress, Resume
from hookline.loops.rows import MetricRows
from hookline.ranks import Ranks
from hookline.view import View


class Recording(HostView):
    """The part of a run that outlives it, the same whoever drives it."""

    is_running: bool
    agreement: HostedAgreement | None
    _kept: dict[str, Any] | None
    if TYPE_CHECKING:  # what the loops need of a run, and hooks do not
        progress: Progress
        participants: Participants
        resume: Resume
        rows: MetricRows

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep of the hooks and of how far the run is."""
        return keep(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned: at once in a run, else when it begins, after the hooks are
        set up.
        """
        if self.is_running:
            put_back(self, state)
        else:
            self._kept = state

    def save_checkpoint(
        self, path: str | Path | None = None, reason: str = "manual", monitor: dict[str, Any] | None = None
    ) -> None:
        """Ask for a checkpoint: written at the next save point of the run, or at once if none is going on."""
        super().save_checkpoint(path, reason, monitor)
        if not self.is_running:
            self.save_due()

    def write_row(self, values: dict[str, Any], over: str = "step") -> None:
        """Let hooks edit a row of metrics, then hand it to the loggers. over: 'step', 'epoch' or
        'evaluation'.
        """
        self.rows.write(values, over)

    def take_new(self, metrics: Mapping[str, Any]) -> None:
        """Metrics of the host's own. Those that are known stay the objects they are: monitors tell old values
        by that.
        """
        newest = self.state.log.newest
        for name, value in metrics.items():
            if name not in newest or newest[name] != float(value):
                newest[name] = value

    def write_pending(self) -> None:
        """Send out what was logged since the last row."""
        self.rows.write_pending()

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to end: as asked for, or with several ranks as they have agreed."""
        return self.state.should_stop if self.agreement is None else self.agreement.stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        View.should_stop.fset(self, stop)  # type: ignore[attr-defined]

    def settle(self, place: int = BETWEEN) -> None:
        """Between batches: the checkpoints that were asked for, by any rank, are written."""
        if self.agreement is not None:
            self.agreement.settle(place)
        self.save_due()

    def save_due(self, ranks: Ranks | None = None) -> None:
        """Write the checkpoints that were asked for, and agreed on."""
        source = self.save_requests if self.agreement is None else self.agreement.agreed
        while source:
            save(self, source.pop(0), ranks or self.ranks)
