"""Where a fit begins: afresh, at a checkpoint that was named, or at the newest whole one of the run."""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.checkpoint.files import read
from hookline.checkpoint.finding import Found, best_first, find, first_whole, tidy_below
from hookline.errors import OptionError, closest
from hookline.loops.record import RECORD, limits, note, read_record
from hookline.loops.run import Run
from hookline.rundir import RunDirectory

log = logging.getLogger("hookline")
WORDS = ("auto", "best")


def choose_start(run: Run, resume: str | os.PathLike[str] | None, directory: RunDirectory) -> None:
    """Settle what the run resumes from, and read it."""
    if resume is None:
        _begin_afresh(run, directory)
    else:
        found = look_up(resume, directory)
        if found is not None:
            run.resume_from, run.restored = found.path, found.contents
            if found.run_dir is not None:
                directory.continue_in(found.run_dir)
                run.finished_before = _why_finished(run, read_record(found.run_dir))
    run.run_id = run.run_id or run.restored.get("run", "") or uuid.uuid4().hex
    known = directory.existing()
    record = read_record(known) if known is not None else {}
    run.is_noted = record.get("id") == run.run_id and record["status"] == "training"


def _begin_afresh(run: Run, directory: RunDirectory) -> None:
    """Checkpoints of an earlier run in the same directory are no longer this run's."""
    known = directory.existing()
    if known is not None and (known / RECORD).exists():
        run.run_id = uuid.uuid4().hex
        note(run, known, "training")


def _why_finished(run: Run, record: dict[str, Any]) -> str:
    if record.get("status") not in ("completed", "stopped") or record["limits"] != limits(run):
        return ""
    why = f" ({record['reason']})" if record["reason"] else ""
    return (f"this run was {record['status']} at step {record['step']}{why}. To go on, raise its limits (max_epochs, "
            "max_steps, max_time) or resume from a checkpoint by its path; to train anew, give it another run_dir or resume from "
            "nothing.")  # fmt: skip


# ---- finding a checkpoint ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint that was read."""

    path: Path | str
    contents: dict[str, Any]
    run_dir: Path | None = None
    """The run it was found in, if it was searched for."""


def look_up(which: str | os.PathLike[str], directory: RunDirectory, within: Path | None = None) -> Start | None:
    """A checkpoint by its path, or the newest ('auto') or best one of the run; None if there is none to be found."""
    if not isinstance(which, str | os.PathLike):
        raise OptionError(f"resume={which!r}: pass None, 'auto', 'best' or the path of a checkpoint.")
    if which in WORDS:
        return _search(str(which), within or directory.searched)
    if isinstance(which, str) and "/" not in which and not Path(which).exists() and closest(which, WORDS):
        raise OptionError(f"resume={which!r}: pass 'auto', 'best' or the path of a checkpoint.{closest(which, WORDS)}")
    if isinstance(which, str) and "://" in which:
        return Start(which, read(which))
    path = Path(which)
    if path.is_dir() and not (path / "manifest.json").exists() and find(path)[0]:
        newest = _search("auto", path)  # the directory of a run stands for its newest whole one
        return Start(newest.path, newest.contents) if newest is not None else None
    return Start(path, read(path))


def _search(which: str, folder: Path) -> Start | None:
    if not folder.is_dir():
        log.warning("resume=%r: there is no %s yet, so the run begins afresh.", which, folder)
        return None
    tidy_below(folder)
    found, broken = find(folder)
    records = {each.path: read_record(run_dir) for each in found if (run_dir := _run_dir(each, folder))}
    mine = [each for each in found if records.get(each.path, {}).get("id", each.run) == each.run]
    chosen, contents, unreadable = first_whole(best_first(mine) if which == "best" else mine)
    for path, reason in {**broken, **unreadable}.items():
        log.warning("resume=%r passes over %s: %s", which, path, reason)
    if chosen is None:
        log.warning("resume=%r: there is no whole checkpoint%s below %s, so the run begins afresh.", which,
                    " that a monitor has kept" if which == "best" else "", folder)  # fmt: skip
        return None
    log.warning("resume=%r: going on from %s (epoch %d, step %d, saved %s, the %s of %d whole ones).", which, chosen.path,
                chosen.manifest["epoch"], chosen.manifest["step"], chosen.manifest["saved_at"],
                "best" if which == "best" else "newest", len(mine) - len(unreadable))  # fmt: skip
    return Start(chosen.path, contents, _run_dir(chosen, folder) or folder)


def _run_dir(found: Found, folder: Path) -> Path | None:
    """The directory of the run that a checkpoint belongs to: the nearest one with a record."""
    for parent in found.path.parents:
        if (parent / RECORD).is_file():
            return parent
        if parent == folder:
            break
    return None
