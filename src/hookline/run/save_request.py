"""Requests for a checkpoint, their results, and requests to go back to a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hookline.engine.checks import Count, check_choice
from hookline.util.errors import CheckpointError, OptionError, closest
from hookline.util.urls import check_url, is_url

SAVED_WEIGHTS = ("all", "trainable")
"""Allowed values of `weights=`: every weight, or only those that the base model does not have."""
SAVE_REASONS = ("interval", "best", "last", "signal", "exception", "manual")


class CheckpointFormat(Protocol):
    """A format of checkpoints other than Hookline's directory, such as a file that another trainer reads."""

    def prepare(self, contents: dict[str, Any]) -> None:
        """Complete the contents, before listeners of on_save_checkpoint edit them."""

    def write(self, contents: dict[str, Any], path: Path | str) -> None:
        """Write the edited contents. All ranks call it, if there are several."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A request for a checkpoint, which is written at the loop's next save point."""

    path: Path | str | None
    """A directory, or an fsspec URL; None: `checkpoints/step-N` in the run's directory."""
    reason: str
    monitor: dict[str, Any] | None = None
    """The metric it is kept for: name, mode and score."""
    is_automatic: bool = False
    """Whether it is the run's own `checkpoints/last`, whose failure does not end the run."""
    format: CheckpointFormat | None = None
    """None: Hookline's directory."""
    weights: str | None = None
    """One of `SAVED_WEIGHTS`; None: as `Trainer(checkpoint={"weights": ...})` says."""


def make_save_request(
    path: Path | str | None, reason: str, monitor: dict[str, Any] | None, weights: str | None = None
) -> SaveRequest:
    """Check the arguments and return the request for a checkpoint."""
    if reason not in SAVE_REASONS:
        raise OptionError(
            f"reason={reason!r}, allowed: {', '.join(SAVE_REASONS)}.{closest(reason, SAVE_REASONS)}"
        )
    if weights is not None:
        check_choice("weights", weights, SAVED_WEIGHTS, "None takes the trainer's setting.")
    if monitor is not None and not (isinstance(monitor, dict) and {"name", "mode", "score"} <= set(monitor)):
        raise OptionError(
            f"monitor={monitor!r} must be a table with 'name', 'mode' ('min' or 'max') and 'score'."
        )
    if path is not None and is_url(path):
        check_url(str(path), "path")
    return SaveRequest(path if path is None or is_url(path) else Path(path), reason, monitor, weights=weights)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written, or the error."""

    path: Path | str
    reason: str
    step: int
    error: CheckpointError | None = None
    progress: tuple[Any, ...] = ()
    """`Run.stamp` at the save."""
    is_automatic: bool = False
    """The same as in the request."""
    facts: dict[str, Any] | None = None
    """The facts of a file in another format for the run record, because the file has no manifest."""


# ---- going back to a checkpoint


@dataclass(frozen=True, slots=True)
class RollbackRequest:
    """A request to go back to a checkpoint inside a running fit, at the next boundary of all ranks."""

    to: str | None
    """The path or URL of a checkpoint, or 'best'; None: the newest checkpoint of the run."""
    before: int | None
    """The latest step that the checkpoint may have; None: any."""
    reason: str
    on_missing: str
    """One of `ON_MISSING`: what to do if there is no such checkpoint."""


ON_MISSING = ("raise", "continue")


def make_rollback_request(
    to: Path | str | None, before: int | None, reason: str, on_missing: str
) -> RollbackRequest:
    """Check the arguments and return the request."""
    if to is not None and not isinstance(to, str | Path):
        raise OptionError(f"roll_back(to={to!r}): pass None, 'best' or the path of a checkpoint.")
    if before is not None:
        if to is not None:
            raise OptionError("roll_back(): before= chooses among the checkpoints of the run; leave out to=.")
        Count(0)("before", before)
    if not isinstance(reason, str):
        raise OptionError(f"roll_back(reason={reason!r}): the reason is text, for the log.")
    check_choice("on_missing", on_missing, ON_MISSING)
    if isinstance(to, str) and is_url(to):
        check_url(to, "to")
    return RollbackRequest(None if to is None else str(to), before, reason, on_missing)
