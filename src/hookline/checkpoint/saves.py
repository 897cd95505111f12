"""What hooks ask for, and what a checkpoint holds of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REASONS = ("interval", "best", "last", "signal", "exception", "manual")
COUNTERS = ("epoch", "epochs_seen", "step", "batches_seen", "samples_seen", "tokens_seen")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that somebody asked for; it is written at the loop's next save point."""

    path: Path | None
    reason: str
