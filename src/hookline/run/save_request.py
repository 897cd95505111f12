"""What hooks ask for, and what a checkpoint holds of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.run.state_parts import Counts
from hookline.util.errors import CheckpointError, OptionError, closest
from hookline.util.urls import check_url, is_url

REASONS = ("interval", "best", "last", "signal", "exception", "manual")
COUNTERS = Counts.SAVED


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that somebody asked for; it is written at the loop's next save point."""

    path: Path | str | None
    """A directory, or an fsspec URL; None: `checkpoints/step-N` in the run's directory."""
    reason: str
    monitor: dict[str, Any] | None = None
    """The metric it is kept for: name, mode and score."""
    is_automatic: bool = False
    """Whether it is the run's own `checkpoints/last`, which no hook has asked for: a write that fails does
    not end the run.
    """


def make_save_request(path: Path | str | None, reason: str, monitor: dict[str, Any] | None) -> SaveRequest:
    """The request for a checkpoint, as somebody has made it; a reason that nobody knows is an error."""
    if reason not in REASONS:
        raise OptionError(f"reason={reason!r}, allowed: {', '.join(REASONS)}.{closest(reason, REASONS)}")
    if monitor is not None and not (isinstance(monitor, dict) and {"name", "mode", "score"} <= set(monitor)):
        raise OptionError(
            f"monitor={monitor!r} must be a table with 'name', 'mode' ('min' or 'max') and 'score'."
        )
    if path is not None and is_url(path):
        check_url(str(path), "path")
    return SaveRequest(path if path is None or is_url(path) else Path(path), reason, monitor)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written, or why it could not be."""

    path: Path | str
    reason: str
    step: int
    error: CheckpointError | None = None
    progress: tuple[Any, ...] = ()
    """How far the run was, as `Run.progress` says it."""
    is_automatic: bool = False
    """As of the request."""
