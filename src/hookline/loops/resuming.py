"""Where a fit begins: afresh, at a checkpoint that was named, or at the newest whole one of the run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hookline.checkpoint.files import read_together
from hookline.checkpoint.finding import ALONE, Found, best_first, find, first_whole, number_of, places_below, start_of, tidy_below
from hookline.checkpoint.tidying import left_overs, tidy
from hookline.checkpoint.together import PATIENCE
from hookline.errors import OptionError, RunLockedError, closest
from hookline.loops.record import RECORD, limits, note, read_record
from hookline.loops.run import Run
from hookline.ranks import Ranks
from hookline.rundir import RunDirectory
from hookline.runlock import held
from hookline.urls import MANIFEST

log = logging.getLogger("hookline")
WORDS = ("auto", "best")


def choose_start(run: Run, resume: str | os.PathLike[str] | None, directory: RunDirectory) -> None:
    """Settle what the run resumes from, and read it: rank zero chooses, and all ranks read what they need of it."""
    ranks = run.strategy.ranks
    found = look_up(resume, directory, ranks=ranks) if resume is not None else None
    if found is not None:
        run.resume_from, run.restored = found.path, found.contents

    def settle() -> list[Any]:
        if resume is None:
            _begin_afresh(run, directory)
        elif found is not None and found.run_dir is not None:
            directory.continue_in(found.run_dir)
            run.finished_before = _why_finished(run, read_record(found.run_dir))
        run.run_id = run.run_id or run.restored.get("run", "") or uuid.uuid4().hex
        _count_on(run, directory.existing())
        return [run.run_id, run.finished_before, "" if ranks.alone else directory.chosen(), run.saves, run.started_at]

    run.run_id, run.finished_before, run_dir, run.saves, run.started_at = ranks.decide(settle)
    if not ranks.alone:
        directory.continue_in(Path(run_dir))
        require_shared(Path(run_dir), ranks)
    known = directory.existing()
    record = read_record(known) if known is not None else {}
    run.is_noted = record.get("id") == run.run_id and record["status"] == "training"


def _count_on(run: Run, known: Path | None) -> None:
    """Number the run's checkpoints on from the newest that it has, which need not be the one that it goes on from."""
    there = [each.manifest for each in find(known)[0]] if known is not None and (known / RECORD).exists() else []
    own = [number_of(each) for each in there if each.get("run") == run.run_id]
    run.saves = max([number_of(run.restored), *own])
    now = datetime.now(UTC)
    for each in there:  # the clock may have been set back since
        with contextlib.suppress(ValueError, TypeError):
            now = max(now, datetime.fromisoformat(start_of(each)) + timedelta(microseconds=1))
    run.started_at = now.isoformat(timespec="microseconds")


def require_shared(run_dir: Path, ranks: Ranks) -> None:
    """Every rank must see the run's directory: all of them write into it."""
    token = run_dir / f".seen-by-all-{ranks.decide(lambda: uuid.uuid4().hex)}"
    ranks.decide(lambda: token.write_text("") and None)
    until = time.monotonic() + PATIENCE
    while not (seen := token.exists()) and time.monotonic() < until:  # network file systems tell of a new file late
        time.sleep(0.05)
    blind = [rank for rank, sees in enumerate(ranks.gather(seen)) if not sees]
    if ranks.rank == 0:
        token.unlink(missing_ok=True)
    if blind:
        raise OptionError(f"The run's directory {run_dir} is not the same for all ranks: rank {', '.join(map(str, blind))} "
                          "cannot see what rank 0 writes there. Every rank writes its part of a checkpoint, so choose one on "
                          "a disk that all machines share (Trainer(run_dir=...) or default_root_dir=...).")  # fmt: skip


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


def look_up(
    which: str | os.PathLike[str],
    directory: RunDirectory,
    within: Path | None = None,
    ranks: Ranks = ALONE,
    option: str = "resume",
) -> Start | None:
    """A checkpoint by its path, or the newest ('auto') or best one of the run; None if there is none to be found.

    ranks: those who look together. Rank zero looks, and says what there is; each reads what it needs. option: where `which` was
    given: 'resume', for a run that goes on and may put its directory in order, or another, for one that only wants to read.
    """
    if not isinstance(which, str | os.PathLike):
        raise OptionError(f"{option}={which!r}: pass None, 'auto', 'best' or the path of a checkpoint.")
    if which in WORDS:
        return _search(Asked(option, which), within or directory.searched, ranks, directory)
    if isinstance(which, str) and "/" not in which and not Path(which).exists() and closest(which, WORDS):
        raise OptionError(f"{option}={which!r}: pass 'auto', 'best' or the path of a checkpoint.{closest(which, WORDS)}")
    if isinstance(which, str) and "://" in which:
        return Start(which, read_together(which, ranks))
    path = Path(which)
    if ranks.decide(lambda: path.is_dir() and not (path / MANIFEST).exists() and bool(find(path)[0])):
        newest = _search(Asked(option, which), path, ranks, directory)  # the directory of a run stands for its newest whole one
        return Start(newest.path, newest.contents) if newest is not None else None
    return Start(path, read_together(path, ranks))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user has passed, and as what."""

    option: str
    which: str | os.PathLike[str]

    def __str__(self) -> str:
        return f"{self.option}={os.fspath(self.which)!r}"

    @property
    def is_best(self) -> bool:
        """Not the newest."""
        return self.which == "best"

    @property
    def goes_on(self) -> bool:
        """Whether a run is to go on, not only to be looked at."""
        return self.option == "resume"


def _search(asked: Asked, folder: Path, ranks: Ranks, directory: RunDirectory) -> Start | None:
    candidates, broken, known = ranks.decide(lambda: _candidates(asked, folder, directory))
    mine = [Found(Path(path), manifest) for path, manifest in candidates]
    chosen, contents, unreadable = first_whole(mine, functools.partial(read_together, ranks=ranks))
    say = log.warning if ranks.rank == 0 else log.debug
    for path, reason in {**broken, **{str(path): reason for path, reason in unreadable.items()}}.items():
        say("%s passes over %s: %s", asked, path, reason)
    if chosen is None:
        so = ", so the run begins afresh" if asked.goes_on else ""
        if known is None:
            say("%s: there is no %s yet%s.", asked, folder, so)
        else:
            say("%s: there is no whole checkpoint%s below %s%s.", asked, " that a monitor has kept" if asked.is_best else "",
                folder, so)  # fmt: skip
        return None
    say("%s: %s %s (epoch %d, step %d, saved %s, the %s of %d whole ones).", asked,
        "going on from" if asked.goes_on else "the weights are those of", chosen.path,
        chosen.manifest["epoch"], chosen.manifest["step"], chosen.manifest["saved_at"],
        "best" if asked.is_best else "newest", known - len(unreadable))  # fmt: skip
    if asked.which not in WORDS and len({each.run for each in mine}) > 1:
        runs = sorted({str(_run_dir(each, folder) or each.path.parent) for each in mine})
        say("%s: there are several runs below it, and this is the newest of them all. To choose one, name its directory: %s.",
            asked, ", ".join(runs))  # fmt: skip
    return Start(chosen.path, contents, _run_dir(chosen, folder) or folder)


def _candidates(
    asked: Asked, folder: Path, directory: RunDirectory
) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, str], Any]:
    """The run's checkpoints in the order to try them in, why others are out of the question, and how many there are in all.

    None, if there is no folder to look at.
    """
    if not folder.is_dir() or directory.has_made(folder):
        return [], {}, None
    if asked.goes_on and asked.which in WORDS:  # nobody else's directory, nor one that is only read
        if directory.has_name:
            tidy_below(folder, alone=directory.is_locked)
        else:
            _claim_newest(asked, folder, directory)
    mine, broken = _own(folder)
    ordered = best_first(mine) if asked.is_best else mine
    return [(str(each.path), each.manifest) for each in ordered], {str(path): why for path, why in broken.items()}, len(mine)


def _own(folder: Path) -> tuple[list[Found], dict[Path, str]]:
    """The checkpoints of the runs that are in their directories now, not of earlier ones there; and those that are damaged."""
    found, broken = find(folder)
    records = {each.path: read_record(run_dir) for each in found if (run_dir := _run_dir(each, folder))}
    return [each for each in found if records.get(each.path, {}).get("id", each.run) == each.run], broken


def _claim_newest(asked: Asked, folder: Path, directory: RunDirectory) -> None:
    """Lock the run that is to go on, one of many, before it is chosen for good: until then another job may be writing into it."""
    for place in places_below(folder):
        if left_overs(place):  # of a job that was killed, unless one is at work there
            inside = place.relative_to(folder).parts
            with contextlib.suppress(RunLockedError), held(_nearest(place, folder) or folder.joinpath(*inside[:1])) as lock:
                tidy(place, alone=lock.is_held)
    mine, _ = _own(folder)
    if newest := (best_first(mine) if asked.is_best else mine):
        directory.continue_in(_run_dir(newest[0], folder) or folder)


def _run_dir(found: Found, folder: Path) -> Path | None:
    """The directory of the run that a checkpoint belongs to: the nearest one with a record."""
    return _nearest(found.path.parent, folder)


def _nearest(place: Path, folder: Path) -> Path | None:
    for parent in (place, *place.parents):
        if (parent / RECORD).is_file():
            return parent
        if parent == folder:
            break
    return None
