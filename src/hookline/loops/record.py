"""`run.json`, the record of a run: which run this is and how it ended, from its first checkpoint on."""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.contents import is_whole
from hookline.checkpoint.limits import RECORD_BYTES, parse_json, read_within
from hookline.errors import CheckpointError
from hookline.loops.run import Run
from hookline.urls import is_url

log = logging.getLogger("hookline")
RECORD = "run.json"
WHOLE: dict[str, type] = {"id": str, "status": str, "step": int, "reason": str, "limits": dict}


def limits(run: Run) -> dict[str, Any]:
    """What has to change for a finished run to go on."""
    options = run.options
    return {"max_epochs": options.max_epochs, "max_steps": options.max_steps, "max_time": options.max_seconds}


def note(run: Run, run_dir: Path, status: str, reason: str = "") -> None:
    """Write the record, whole or not at all."""
    s = run.state
    record = {
        "id": run.run_id, "status": status, "reason": reason, "step": s.step, "epochs": s.epochs_seen, "limits": limits(run),
        "noted_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    aside = run_dir / f".{RECORD}.{os.getpid()}"
    try:
        aside.write_text(json.dumps(record, indent=1))
        aside.replace(run_dir / RECORD)
    except OSError as error:
        raise CheckpointError(f"{run_dir / RECORD} could not be written: {error}") from error


def note_training(run: Run, saved: Path | str) -> None:
    """The first checkpoint of a run makes its directory a place to resume from."""
    if run.is_noted or run.stage != "fit" or is_url(saved) or run.state.rank:
        return
    run_dir = run.directory.existing()
    if run_dir is not None and Path(saved).resolve().is_relative_to(run_dir.resolve()):
        note(run, run_dir, "training")
        run.is_noted = True


def note_end(run: Run) -> None:
    """How it ended; only for a run that can be resumed at all."""
    known = run.directory.existing()
    if run.state.rank or run.finished_before or known is None or read_record(known).get("id") != run.run_id:
        return
    try:
        note(run, run.run_dir(), run.state.status, run.state.stop_reason)
    except CheckpointError as error:
        if run.options.saving.on_error == "raise":
            raise
        log.warning("%s", error)


def restore_ending(run: Run) -> None:
    """Set status and reason of a run that was over before: it ends as it had ended."""
    known = run.directory.existing()
    record = read_record(known) if known is not None else {}
    if record:
        run.state.status, run.state.stop_reason = record["status"], record["reason"]


def unsaved_end(record: dict[str, Any], counters: Mapping[str, Any]) -> str:
    """Return what is missing if a run's newest checkpoint, which has these counters, is not its last state; else nothing.

    Such as: 'completed at step 8, but its newest checkpoint is of step 5'.
    """
    if not record or record["status"] == "training":
        return ""
    step, epochs = counters.get("step"), counters.get("epochs_seen")
    if (step, epochs) == (record["step"], record.get("epochs", epochs)):
        return ""
    before = " before the end of its epoch" if step == record["step"] else ""
    return f"{record['status']} at step {record['step']}, but its newest checkpoint is of step {step}{before}"


def run_dir_of(checkpoint: Path, folder: Path) -> Path | None:
    """Return the directory of the run that a checkpoint belongs to, not above `folder`: the nearest one with a record."""
    for parent in checkpoint.parents:
        if (parent / RECORD).is_file():
            return parent
        if parent == folder:
            break
    return None


def read_record(run_dir: Path) -> dict[str, Any]:
    """The record, or nothing if it is damaged: then what the checkpoints say is believed."""
    try:
        path = run_dir / RECORD
        record = parse_json(read_within(path, RECORD_BYTES)) if path.is_file() else {}  # reading a pipe would wait for ever
    except (OSError, ValueError):
        return {}
    fits = isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in WHOLE.items())
    return record if fits and is_whole(record["step"]) else {}
