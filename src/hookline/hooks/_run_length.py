"""The length of a run in steps or epochs, for schedules that lead to its end."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from hookline.util.errors import OptionError
from hookline.util.terminal import log_notice

log = logging.getLogger("hookline")

Unit = Literal["step", "epoch"]


class RunLength:
    """The steps or epochs of a run. A resumed run with the same settings keeps the length that it had.

    A resumed run with another batch size, accumulation or `max_epochs` has the steps that it has made, and
    those that remain with the new settings.
    """

    def __init__(self, who: str, unit: Unit) -> None:
        self.who, self.unit = who, unit
        self.total: float = math.inf
        self._estimate: float = math.inf
        """What the trainer said at the last start; it differs from `total` if the settings were changed."""
        self._saved: dict[str, Any] = {}

    def forget(self) -> None:
        """Begin as in a new run."""
        self._saved = {}

    def find(self, trainer: Any) -> float:
        """Return the length, and log it if it is another one than in the run that this one continues."""
        by_step = self.unit == "step"
        self._estimate = trainer.estimated_stepping_batches if by_step else trainer.options.max_epochs
        if not 0 < self._estimate < math.inf:
            raise OptionError(f"{self.who}: the number of {self.unit}s of the run is unknown{_why(trainer)}")
        self.total, saved = self._estimate, self._saved
        if saved and saved["estimate"] == self._estimate:
            self.total = saved["total"]
        elif saved and by_step:
            self.total = trainer.global_step + trainer.remaining_steps
        if saved and saved["total"] != self.total and not trainer.state.rank:
            log_notice(
                log,
                "%s: the run has %s %ss now; when it was saved, it had %s. It follows the curve over all %s "
                "from here on; %s(..., total=%s) keeps the earlier curve.",
                self.who,
                self.total,
                self.unit,
                saved["total"],
                self.total,
                self.who,
                saved["total"],
            )
        return self.total

    def state_dict(self) -> dict[str, Any]:
        """Return the length, and what it was derived from; empty if it is not known."""
        return {} if self.total == math.inf else {"total": self.total, "estimate": self._estimate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run that had this length."""
        self._saved = dict(state)


def _why(trainer: Any) -> str:
    """Return why the number of steps is not known, and what to pass."""
    if trainer.options.max_epochs is not None and trainer.options.max_epochs > 0:
        return ", because the training loader has no length; pass total=, or set max_steps."
    return "; pass total=, or set max_steps or max_epochs."
