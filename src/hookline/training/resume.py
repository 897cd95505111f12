"""Where a fit begins: at step 0, at a given checkpoint, or at the newest or best checkpoint of the run."""

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

from torch import nn

from hookline.checkpoint.catalog import (
    ALONE,
    EVERY_MONITOR,
    FoundCheckpoint,
    KeptBest,
    abandoned_saves,
    being_replaced,
    best_first,
    clean_up_below,
    find_checkpoints,
    first_whole,
    is_within,
    newest_first,
    own_checkpoints,
    places_below,
    save_number,
    saved_best,
    start_of,
    with_outside,
)
from hookline.checkpoint.cleanup import left_overs
from hookline.checkpoint.files import read_on_all_ranks
from hookline.checkpoint.writer import WRITE_TIMEOUT
from hookline.distributed.comm import Ranks
from hookline.reliability.model_location import kept_best
from hookline.run.directory import RunDirectory
from hookline.run.lock import hold_lock
from hookline.run.record import leaves_directory, limits, module_class, read_record, run_dir_of, unsaved_end
from hookline.run.run import Run
from hookline.run.state import count_noun
from hookline.util.errors import CheckpointError, OptionError, RunLockedError, closest
from hookline.util.terminal import log_notice
from hookline.util.text import printable
from hookline.util.urls import MANIFEST, check_url, is_url, shown

log = logging.getLogger("hookline")
SEARCH_WORDS = ("auto", "best")
LINE_LOADS = "line.load_checkpoint"
"""The `option` of a hand-written loop that continues its run."""
START_OVER = (
    "To train longer, raise its limits (max_epochs, max_steps, max_time). To start over, pass resume=None "
    "(on the command line: hookline fit --fresh), or choose another run_dir."
)
MOST_NAMED = 20
"""Checkpoints that an error lists, each with its reason."""


def choose_start(run: Run, resume: str | os.PathLike[str] | Start | None, directory: RunDirectory) -> None:
    """Choose the checkpoint to resume from and read it: rank zero chooses, each rank reads its part."""
    ranks, identity = run.strategy.ranks, run.identity
    if run.options.fast_dev_run and resume in SEARCH_WORDS:
        resume = None  # a trial run does not continue another run
    run.resume.is_auto = resume == "auto"
    found = (
        find_checkpoint(
            resume,
            directory,
            ranks=ranks,
            kept=KeptBest(folders=kept_best(run.state.hooks.entries()).folders),  # hooks have no state yet
            module=run.module,
        )
        if resume is not None
        else None
    )
    if found is not None:
        run.resume.take(found.contents, found.path)

    def identify() -> list[Any]:
        if found is not None and found.run_dir is not None:
            directory.continue_in(found.run_dir)
            run.resume.finished = _why_finished(run, read_record(found.run_dir))
        identity.id = identity.id or run.resume.contents.get("run", "") or uuid.uuid4().hex
        _continue_numbering(run, directory.existing())
        return [
            identity.id,
            run.resume.finished,
            "" if ranks.alone else directory.chosen(),
            identity.started_at,
            run.saves.count,
            run.saves.abandoned,
        ]

    identity.id, run.resume.finished, run_dir, identity.started_at, run.saves.count, abandoned = ranks.decide(
        identify
    )
    run.saves.abandoned = [(first, last) for first, last in abandoned]
    directory.has_run = True
    if not ranks.alone:
        directory.continue_in(Path(run_dir))
        require_shared(Path(run_dir), ranks)


def _continue_numbering(run: Run, known: Path | None) -> None:
    """Number new checkpoints after the newest of the run, which may be newer than the one to resume from."""
    manifests = [each.manifest for each in find_checkpoints(known)[0]] if known is not None else []
    own = [each for each in manifests if each.get("run") == run.identity.id]
    number = save_number(run.resume.contents)
    run.saves.count = max([number, *map(save_number, own)])
    # the manifests are in order, so the first one knows all rollbacks
    run.saves.abandoned = [
        each for each in abandoned_saves(own[0] if own else {}) if not is_within(number, [each])
    ]
    now = datetime.now(UTC)
    for manifest in manifests:  # the system clock may have been set back since
        with contextlib.suppress(ValueError, TypeError):
            now = max(now, datetime.fromisoformat(start_of(manifest)) + timedelta(microseconds=1))
    run.identity.started_at = now.isoformat(timespec="microseconds")


def require_shared(run_dir: Path, ranks: Ranks) -> None:
    """Refuse a run directory that some ranks cannot see: every rank writes into it."""
    token = run_dir / f".seen-by-all-{ranks.decide(lambda: uuid.uuid4().hex)}"
    ranks.decide(lambda: token.write_text("") and None)
    until = time.monotonic() + WRITE_TIMEOUT
    while not (seen := token.exists()) and time.monotonic() < until:
        time.sleep(0.05)  # network file systems show a new file late
    blind = [rank for rank, sees in enumerate(ranks.gather(seen)) if not sees]
    if ranks.rank == 0:
        token.unlink(missing_ok=True)
    if blind:
        raise OptionError(
            f"The run's directory {run_dir} is not the same for all ranks: rank "
            f"{', '.join(map(str, blind))} cannot see what rank 0 writes there. Every rank writes its part "
            "of a checkpoint, so choose one on a disk that all machines share (Trainer(run_dir=...) or "
            "default_root_dir=...)."
        )


def _why_finished(run: Run, record: dict[str, Any]) -> str:
    if record.get("status") not in ("completed", "stopped", "pruned") or record["limits"] != limits(run):
        return ""
    why = f" ({printable(record['reason'])})" if record["reason"] else ""
    missing = unsaved_end(record, run.resume.contents.get("counters", {}))
    ended = (
        f"{missing}{why}: that state is loaded"
        if missing
        else f"{record['status']} at step {record['step']}{why}"
    )
    path = shown(run.resume.path)
    to_continue = (
        f"To continue up to the same limits, pass its checkpoint: resume={path!r} (on the command line: "
        f"--checkpoint {path}). "
        if record["status"] == "stopped" and run.resume.path is not None
        else ""
    )
    return f"this run was {ended}. {to_continue}{START_OVER}"


# ---- the log of earlier runs -------------------------------------------------------------------------------


def begin_log(run: Run) -> None:
    """Mark what earlier runs have logged as superseded, and record the settings of this run.

    In the directory of an earlier run, the log is marked when this run takes the directory.
    """
    s, logger, path, record = run.state, run.state.logger, run.resume.path, run.identity.record
    begin = (
        logger.begin_afresh
        if path is None
        else functools.partial(logger.resume, run.resume.contents.pop("loggers", None), s.step, s.epoch, path)
    )
    if leaves_directory(run):
        _warn_of_replaced(run)
        record.on_taken.append(begin)
    else:
        begin()
    if record is not None:
        record.describe(run)


CONTINUES = "resume='auto' continues it"
KEEPS = "another run_dir keeps it"
REPLACED = {
    "interrupted": ("an interrupted", CONTINUES),
    "preempted": ("a preempted", CONTINUES),
    "training": ("a killed", CONTINUES),  # this job has the lock, so none trains there
    "error": ("a failed", CONTINUES),
    "stopped": ("a stopped", KEEPS),
    "completed": ("a completed", KEEPS),
}
"""By the status of a run: what a warning calls it, and what to do to have it still."""


def _warn_of_replaced(run: Run) -> None:
    """Warn if a new run is about to replace one in its directory that has checkpoints."""
    earlier, folder = run.identity.record.earlier, run.run_dir()
    if earlier["status"] not in REPLACED or run.resume.path is not None:
        return
    kind, advice = REPLACED[earlier["status"]]
    if own := [each for each in find_checkpoints(folder)[0] if each.run == earlier["id"]]:
        log.warning(
            "%s has %s run at step %d, which this new run replaces; %s.",
            folder,
            kind,
            own[0].manifest["step"],
            advice,
        )


# ---- finding a checkpoint ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint that was found and read."""

    path: Path | str
    contents: dict[str, Any]
    run_dir: Path | None = None
    """The directory of the run in which a search found it."""


def find_checkpoint(
    which: str | os.PathLike[str] | Start,
    directory: RunDirectory,
    within: Path | None = None,
    ranks: Ranks = ALONE,
    option: str = "resume",
    kept: KeptBest = EVERY_MONITOR,
    module: nn.Module | None = None,
) -> Start | None:
    """Return the checkpoint at a path, or the newest ('auto') or best one of the run; None if there is none.

    A `Start` was read already, by an object of another package.

    ranks: all of them call it. Rank zero searches; each rank reads its part. option: the name of the argument
    in messages. With 'resume' the run continues, and its directory is cleaned up; with another it only reads.
    kept: where hooks keep their best checkpoints, which 'best' also considers. With 'resume', the newest
    checkpoint of the run says where that is. module: a search among the runs of other trainers skips those of
    another class of module.
    """
    if isinstance(which, Start):
        return which
    if not isinstance(which, str | os.PathLike):
        raise OptionError(f"{option}={which!r}: pass None, 'auto', 'best' or the path of a checkpoint.")
    if which in SEARCH_WORDS:
        name = "" if module is None else type(module).__name__
        asked = Asked(option, which, kept if which == "best" else EVERY_MONITOR, name, within is None)
        return _search(asked, within or directory.searched, ranks, directory)
    hint = closest(which, SEARCH_WORDS) if isinstance(which, str) and "/" not in which else ""
    if hint and not Path(which).exists():
        raise OptionError(f"{option}={which!r}: pass 'auto', 'best' or the path of a checkpoint.{hint}")
    if isinstance(which, str) and is_url(which):
        return Start(check_url(which, option), read_on_all_ranks(which, ranks))
    path = Path(which).expanduser()
    if ranks.decide(lambda: path.is_dir() and not (path / MANIFEST).exists() and _has_checkpoints(path)):
        # the directory of a run stands for its newest complete checkpoint
        newest = _search(Asked(option, which), path, ranks, directory)
        return Start(newest.path, newest.contents) if newest is not None else None
    return Start(path, read_on_all_ranks(path, ranks))


def _has_checkpoints(folder: Path) -> bool:
    """Return whether there are checkpoints below a folder that is not a checkpoint itself."""
    found, broken = find_checkpoints(folder)
    return bool(found) or any(path != folder for path in broken)


@dataclass(frozen=True, slots=True)
class Asked:
    """The argument that the user has passed: its name and its value."""

    option: str
    which: str | os.PathLike[str]
    kept: KeptBest = EVERY_MONITOR
    """Where the hooks of this trainer keep their best checkpoints."""
    module: str = ""
    """The name of the module's class; empty if it is not known."""
    finds_runs: bool = False
    """Whether the directories to search are those that `RunDirectory.searched_runs` returns."""

    def __str__(self) -> str:
        return self.called_with(repr(shown(os.fspath(self.which))))

    def called_with(self, value: str) -> str:
        """Return how the user passes this text."""
        return f"{self.option}({value})" if self.option == LINE_LOADS else f"{self.option}={value}"

    @property
    def is_best(self) -> bool:
        """Whether the best checkpoint is wanted, not the newest."""
        return self.which == "best"

    @property
    def resumes(self) -> bool:
        """Whether the run continues, not only reads weights."""
        return self.option in ("resume", LINE_LOADS)


def _search(asked: Asked, folder: Path, ranks: Ranks, directory: RunDirectory) -> Start | None:
    looked = ranks.decide(lambda: _look(asked, folder, directory))
    mine = [FoundCheckpoint(Path(path), manifest) for path, manifest in looked["candidates"]]
    chosen, contents, unreadable = first_whole(mine, functools.partial(read_on_all_ranks, ranks=ranks))
    say = log.warning if ranks.rank == 0 else log.debug
    notify = functools.partial(log_notice, log) if ranks.rank == 0 else log.debug
    unusable = {**looked["broken"], **{str(path): reason for path, reason in unreadable.items()}}
    done = "resuming from" if asked.resumes else "the weights are those of"
    run_dir = Path(looked["run_dir"]) if looked["run_dir"] else None
    if chosen is None and looked["url"]:
        notify("%s: %s %s, which a hook has kept.", asked, done, shown(looked["url"]))
        return Start(looked["url"], read_on_all_ranks(looked["url"], ranks), run_dir)
    if chosen is None:
        _refuse_to_begin(asked, folder, {**unusable, **looked["others"]}, looked["searched"])
        so = ", so a new run begins" if asked.resumes else ""
        if looked["earlier"]:
            say(
                "%s: %s not used%s. To resume from one of them, pass its path.",
                asked,
                count_noun(
                    looked["earlier"],
                    f"checkpoint below {folder} belongs to an earlier run and is",
                    f"checkpoints below {folder} belong to an earlier run and are",
                ),
                so,
            )
        else:
            notify(
                "%s: there is no %s%s.%s",
                asked,
                f"checkpoint below {folder}" if looked["exists"] else f"directory {folder} yet",
                so,
                looked["skipped"],
            )
        return None
    for path, reason in unusable.items():
        say("%s skips %s: %s", asked, printable(path), printable(reason))
    if looked["skipped"]:
        say("%s:%s", asked, looked["skipped"])
    notify(
        "%s: %s %s (epoch %d, step %d, saved %s, the %s of %s).",
        asked,
        done,
        chosen.path,
        chosen.manifest["epoch"],
        chosen.manifest["step"],
        chosen.manifest["saved_at"],
        "best" if asked.is_best else "newest",
        count_noun(looked["known"] - len(unreadable), "complete one", "complete ones"),
    )
    if asked.which not in SEARCH_WORDS and len({each.run for each in mine}) > 1:
        runs = sorted({str(run_dir_of(each.path, folder) or each.path.parent) for each in mine})
        say(
            "%s: there are several runs below it, and this is the newest checkpoint of all. To choose a "
            "run, pass its directory: %s.",
            asked,
            ", ".join(runs),
        )
    known = [Path(each) for each in looked["places"] if chosen.path.is_relative_to(each)]
    return Start(chosen.path, contents, _run_dir_among(known, chosen.path) if known else run_dir)


def _refuse_to_begin(asked: Asked, folder: Path, unusable: dict[str, str], searched: list[str]) -> None:
    """Raise if there are checkpoints but none can be used, because a new run might replace them."""
    if not unusable:
        return
    lines = [
        printable(reason if path in reason else f"{path}: {reason}") for path, reason in unusable.items()
    ]
    more = [f"... and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
    count = f"there are {len(lines)} checkpoints" if len(lines) > 1 else "there is 1 checkpoint"
    advice = []
    if asked.is_best:
        advice.append(
            f"Searched: {folder}, and where the hooks of the {'run' if asked.resumes else 'trainer'} keep "
            f"their best checkpoints ({', '.join(map(shown, searched)) or 'none of them knows one'})."
        )
        newest, that = asked.called_with("'auto'"), asked.called_with("PATH")
        advice.append(f"{newest} takes the newest one, with or without a score; {that} that one.")
    if asked.resumes:
        afresh = (
            "leave out the call"
            if asked.option == LINE_LOADS
            else "pass resume=None (on the command line: --fresh)"
        )
        advice.append(
            f"Nothing was changed. To begin a new run there anyway, {afresh}; to keep them, choose another "
            "run_dir; or restore a copy of one."
        )
    raise CheckpointError(
        "\n  ".join(
            [f"{asked}: {count} below {folder}, and none of them can be used:", *lines[:MOST_NAMED], *more]
        )
        + "".join(f"\n{each}" for each in advice)
    )


def _look(asked: Asked, folder: Path, directory: RunDirectory) -> dict[str, Any]:
    """Return the checkpoints below a folder in the order to try them, and why others cannot be used."""
    exists = folder.is_dir() and not directory.has_made(folder)
    looked: dict[str, Any] = {
        "exists": exists,
        "candidates": [],
        "broken": {},
        "others": {},
        "known": 0,
        "earlier": 0,
        "skipped": "",
        "places": [],
        "url": asked.kept.url,
        "run_dir": "",
        "searched": [],
    }
    if not exists and not asked.kept.paths:
        return looked
    places, skipped = _places(asked, folder, directory)
    # do not clean up other directories, nor one that is only read
    if asked.resumes and asked.which in SEARCH_WORDS:
        if directory.has_name:
            clean_up_below(folder, alone=directory.is_locked)
        else:
            _claim_newest(asked, places, directory)
    found, mine, broken = own_checkpoints(places)
    run_dir, own, kept = _choose_run(asked, mine, places, folder)
    ordered = best_first(own, kept) if asked.is_best else own
    others = {str(each.path): kept.describe(each) for each in own if each not in ordered}
    if not found:
        others |= {
            str(path): "another process is replacing it, or ended while doing so; try again in a minute"
            for place in places
            for path in being_replaced(place)
        }
    newest = str(_run_dir_among(places, mine[0].path)) if mine else run_dir
    newer = f" The newest run, {newest}, has kept no such checkpoint, so the run {run_dir} is used."
    return {
        **looked,
        "candidates": [(str(each.path), each.manifest) for each in ordered],
        "others": others,
        "broken": {str(path): why for path, why in broken.items()},
        "known": len(own),
        "url": kept.url,
        "run_dir": run_dir,
        "searched": kept.paths,
        "earlier": sum(each not in mine for each in found),
        "skipped": _describe_skipped(asked, skipped, found) + (newer if newest != run_dir else ""),
        "places": list(map(str, places)),
    }


def _choose_run(
    asked: Asked, mine: list[FoundCheckpoint], places: list[Path], folder: Path
) -> tuple[str, list[FoundCheckpoint], KeptBest]:
    """Return the directory of the newest run, all checkpoints, and where hooks keep their best ones.

    For 'best', it is the newest run that has one, as in `load_best`, with the checkpoints of that run only: a
    score of another run must not decide which run continues.
    """
    runs: dict[str, list[FoundCheckpoint]] = {}
    for each in mine:
        runs.setdefault(str(_run_dir_among(places, each.path)), []).append(each)
    if not asked.is_best or not mine:
        return next(iter(runs), ""), with_outside(mine, asked.kept.paths, folder), asked.kept
    chosen: list[tuple[str, list[FoundCheckpoint], KeptBest]] = []
    for run_dir, own in runs.items():
        kept = saved_best(own[0].path, asked.kept.folders) if asked.resumes else asked.kept
        chosen.append((run_dir, with_outside(own, kept.paths, folder), kept))
        if kept.url or best_first(*chosen[-1][1:]):
            return chosen[-1]
    return chosen[0]


def _places(asked: Asked, folder: Path, directory: RunDirectory) -> tuple[list[Path], dict[Path, str]]:
    """Return the directories of runs to search, and why others below the folder are skipped.

    A trainer without a run_dir and without a run of its own searches the runs of other trainers. It must not
    continue one of another experiment: a run of a `run_dir`, or of another class of module.
    """
    if not asked.finds_runs:
        return [folder], {}
    runs = directory.searched_runs()
    if directory.has_name or directory.has_run:
        return runs, {}
    skipped = {
        path: "its program has chosen its run_dir" for path in sorted(folder.iterdir()) if path not in runs
    }
    for path in runs:
        record = read_record(path)
        cls, options = module_class(record), record.get("options")
        if isinstance(options, dict) and options.get("run_dir") is not None:
            skipped[path] = "its program has chosen its run_dir"
        elif cls and asked.module and cls != asked.module:
            skipped[path] = f"its module is {printable(cls)}, not {asked.module}"
    return [each for each in runs if each not in skipped], skipped


def _describe_skipped(asked: Asked, skipped: dict[Path, str], found: list[FoundCheckpoint]) -> str:
    """Return a sentence about the run with the newest checkpoint, if that run is skipped; else empty."""
    others = [(each, path) for path in skipped for each in find_checkpoints(path)[0][:1]]
    ordered = newest_first([*others, *((each, None) for each in found[:1])], lambda pair: pair[0].manifest)
    path = ordered[0][1] if ordered else None
    if path is None:
        return ""
    more = sum(each is not None for _, each in ordered) - 1
    return (
        f" It skips {path} ({skipped[path]}){f' and {more} more' if more else ''}: to use it, pass "
        f"{asked.option}={str(path)!r}{', or the same run_dir' if asked.resumes else ''}."
    )


def _claim_newest(asked: Asked, places: list[Path], directory: RunDirectory) -> None:
    """Lock the run to resume before its checkpoint is chosen: another job may be writing into it."""
    for run_dir in places:
        if any(map(left_overs, places_below(run_dir))):  # of a job that was killed, or is writing now
            with contextlib.suppress(RunLockedError), hold_lock(run_dir) as lock:
                clean_up_below(run_dir, alone=lock.is_held)
    if chosen := _choose_run(asked, own_checkpoints(places)[1], places, directory.searched)[0]:
        directory.continue_in(Path(chosen))


def _run_dir_among(places: list[Path], checkpoint: Path) -> Path:
    """Return the directory of the run of a checkpoint below one of these folders."""
    folder = next(each for each in places if checkpoint.is_relative_to(each))
    return run_dir_of(checkpoint, folder) or folder
