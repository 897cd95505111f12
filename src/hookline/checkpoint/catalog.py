"""Find checkpoints and order them from newest to oldest or from best to worst, by their manifests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hookline.checkpoint.cleanup import LEFT_OVER
from hookline.checkpoint.files import clean_up, read, read_manifest
from hookline.checkpoint.manifest import has_valid
from hookline.checkpoint.rank_state import read_structure
from hookline.distributed.comm import Ranks
from hookline.metrics.direction import best_first as order_of
from hookline.run.record import FILE_FACTS, RECORD, read_record, run_dir_of
from hookline.util.errors import CheckpointError
from hookline.util.limited_json import is_table, is_text
from hookline.util.snapshot import TRACKER_FOLDERS
from hookline.util.urls import MANIFEST, is_checkpoint_file, is_url, shown, split_query, url_below

ALONE = Ranks()
T = TypeVar("T")
Read = Callable[[Path | str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint with a valid manifest; its other files have not been verified yet."""

    path: Path
    manifest: dict[str, Any]

    @property
    def run(self) -> str:
        """Return the id of the run that saved it."""
        return str(self.manifest.get("run", ""))


def newest_first(given: Iterable[T], manifest_of: Callable[[T], Mapping[str, Any]]) -> list[T]:
    """Return checkpoints from newest to oldest, ordered by the number of the save within a run.

    The step does not decide: after a resume from an older checkpoint, the newer state can have a lower step.
    The clock can be set back. It decides only between runs, and between checkpoints without a number, which
    an older version wrote.
    """
    listed = [(each, manifest_of(each)) for each in given]
    started: dict[str, str] = {}
    for _, manifest in listed:
        run = str(manifest.get("run", ""))
        started[run] = max(started.get(run, ""), start_of(manifest))

    def age(manifest: Mapping[str, Any]) -> tuple[Any, ...]:
        run = str(manifest.get("run", ""))
        return (
            started[run],
            run,
            save_number(manifest),
            str(manifest.get("saved_at", "")),
            _int_or_zero(manifest.get("batches_seen")),
        )

    return [each for each, _ in sorted(listed, key=lambda one: age(one[1]), reverse=True)]


def save_number(manifest: Mapping[str, Any]) -> int:
    """Return the number of a save within its run; 0: an older version wrote it."""
    return _int_or_zero(manifest.get("saves"))


def start_of(manifest: Mapping[str, Any]) -> str:
    """Return when the job that wrote it started, or, from an older version, when it was written."""
    return str(manifest.get("started_at") or manifest.get("saved_at") or "")


def _int_or_zero(value: Any) -> int:
    return value if type(value) is int else 0


def find_checkpoints(folder: Path) -> tuple[list[FoundCheckpoint], dict[Path, str]]:
    """Return all checkpoints below a folder, the newest first, and the invalid ones with the reason."""
    found, broken = [], {}
    for path in (path for path, is_checkpoint in _walk_folders(folder) if is_checkpoint):
        try:
            found.append(FoundCheckpoint(path, read_manifest(path)))
        except CheckpointError as error:
            broken[path] = str(error)
    return newest_first(found, lambda each: each.manifest), broken


def find_with_files(folder: Path, record: Mapping[str, Any]) -> tuple[list[FoundCheckpoint], dict[Path, str]]:
    """Return the same as `find_checkpoints`, with the files of another format that a run has written."""
    found, broken = find_checkpoints(folder)
    return newest_first([*found, *_recorded_files(folder, record)], lambda each: each.manifest), broken


def _recorded_files(folder: Path, record: Mapping[str, Any]) -> list[FoundCheckpoint]:
    """Return the files that a run's record lists and that exist.

    Such a file has no manifest, and reading its facts would load its tensors.
    """
    listed = record.get("files")
    run = {"run": record.get("id", ""), "started_at": record.get("started_at"), "versions": {}}
    found = []
    for entry in listed if isinstance(listed, list) else ():
        if is_table(entry) and is_text(entry.get("path")) and has_valid(entry, FILE_FACTS):
            path = folder / entry["path"]
            with contextlib.suppress(OSError, ValueError):  # ValueError: a path with a null byte
                files = {path.name: {"bytes": path.stat().st_size}}
                found.append(FoundCheckpoint(path, {**entry, **run, "files": files}))
    return found


@dataclass(frozen=True, slots=True)
class KeptBest:
    """Where hooks keep their best checkpoints, and what they monitor."""

    paths: tuple[str, ...] = ()
    """Paths and URLs, as each hook knows them."""
    monitors: tuple[tuple[str, str], ...] = ()
    """The metric and the mode of each hook; empty: any checkpoint with a score counts."""
    folders: tuple[str, ...] = ()
    """The URLs below which they write."""

    @property
    def url(self) -> str:
        """The first URL; empty if there is none."""
        return next(filter(is_url, self.paths), "")

    def monitor_of(self, found: FoundCheckpoint) -> tuple[str, str] | None:
        """Return the metric and the mode by which a checkpoint is ranked; None if no hook ranks it.

        A hook whose mode has changed has ranked its checkpoints anew if it has kept all of them.
        """
        saved = found.manifest["monitor"]
        if not saved:
            return None
        monitor = (str(saved["name"]), str(saved["mode"]))
        if not self.monitors or monitor in self.monitors:
            return monitor
        is_kept = any(Path(each).absolute() == found.path.absolute() for each in self.paths)
        return next((each for each in self.monitors if is_kept and each[0] == monitor[0]), None)

    def describe(self, found: FoundCheckpoint) -> str:
        """Return why a checkpoint is not ranked."""
        if not (saved := found.manifest["monitor"]):
            return "no monitor has kept it for a score"
        now = ", ".join(f"{name} with mode={mode!r}" for name, mode in self.monitors)
        return f"it was kept for {saved['name']} with mode={saved['mode']!r}, and the hooks monitor {now}"


EVERY_MONITOR = KeptBest()


def saved_best(path: Path, folders: Iterable[str]) -> KeptBest:
    """Return where the hooks of a run kept their best checkpoints when it saved the one at this path.

    folders: the URLs below which its hooks write now. No other URL is used: a saved one has no secrets, and
    the text of a checkpoint must not choose what a program connects to.
    """
    try:
        states = read_structure(path / "state.json").get("hooks")
    except (OSError, CheckpointError):
        return EVERY_MONITOR
    hooks = [each for each in states.values() if isinstance(each, dict)] if isinstance(states, dict) else []
    tables = [each.get("state", each) for each in hooks]  # the state of an adopted callback is inside
    scored = [each for each in tables if isinstance(each, dict) and each.get("best_model_score") is not None]
    saved = [str(each.get("best_model_path", "")) for each in scored]
    names = [split_query(each)[0].rpartition("/")[2] for each in saved]
    urls = {shown(url): url for name in names for url in (url_below(each, name) for each in folders)}
    return KeptBest(tuple(urls.get(each, each) for each in saved if each in urls or not is_url(each)))


def with_outside(
    found: list[FoundCheckpoint], paths: Iterable[str], folder: Path | None
) -> list[FoundCheckpoint]:
    """Return the checkpoints of a folder and those at paths outside of it, the newest first.

    paths: where hooks keep their best ones. Those that are gone, of another format, or copies of one in the
    folder are left out.
    """
    outside = []
    for path in {Path(each).absolute(): Path(each) for each in paths if not is_url(each)}.values():
        inside = folder is not None and path.resolve().is_relative_to(folder.resolve())
        if not inside and (path / MANIFEST).is_file():
            with contextlib.suppress(CheckpointError):
                outside.append(FoundCheckpoint(path, read_manifest(path)))
    known = [each.manifest for each in found]
    outside = [each for each in outside if each.manifest not in known]
    return newest_first([*found, *outside], lambda each: each.manifest) if outside else found


def clean_up_below(folder: Path, alone: bool = False) -> None:
    """Clean up after killed processes in a folder and in the folders below it. alone: see `clean_up`."""
    for parent in places_below(folder):
        clean_up(parent, alone)


def places_below(folder: Path) -> list[Path]:
    """Return the folders that may contain checkpoints."""
    return sorted(path for path, _ in _walk_folders(folder))


def _walk_folders(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder and those below it, and whether each is a checkpoint, or the remains of one.

    A directory that is being written or removed is hidden, and is skipped; so are the copies of trackers.
    """
    for parent, names, files in os.walk(folder):
        is_checkpoint = _is_checkpoint(files)
        copies = TRACKER_FOLDERS if RECORD in files else ()
        # folders that users have put into a checkpoint are not searched
        names[:] = [name for name in names if not (is_checkpoint or name.startswith(".") or name in copies)]
        yield Path(parent), is_checkpoint


def _is_checkpoint(files: list[str]) -> bool:
    """Return whether these are the files of a checkpoint, or the remains of one.

    model.safetensors alone is not enough: other tools use this name for their weights.
    """
    return MANIFEST in files or sum(map(is_checkpoint_file, files)) > 1


def being_replaced(folder: Path) -> list[Path]:
    """Return the checkpoints below a folder that were renamed for a replacement that is not there yet."""
    renamed = [
        path
        for path in folder.rglob(".*.old")
        if LEFT_OVER.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return [path for path in renamed if not path.with_name(LEFT_OVER.fullmatch(path.name)["name"]).exists()]  # type: ignore[index]


def without_abandoned(found: list[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Return the checkpoints, the newest first, without those of steps that a rollback has undone.

    The newest checkpoint of a run lists their numbers (`abandoned_saves`).
    """
    abandoned: dict[str, list[SaveRange]] = {}
    for each in found:
        abandoned.setdefault(each.run, abandoned_saves(each.manifest))
    return [each for each in found if not is_within(save_number(each.manifest), abandoned[each.run])]


def own_checkpoints(
    places: list[Path], with_files: bool = False
) -> tuple[list[FoundCheckpoint], list[FoundCheckpoint], dict[Path, str]]:
    """Return all checkpoints below folders, those of the current run of each directory, and damaged ones.

    Checkpoints that a rollback has abandoned are only among all. with_files: also files of another format.
    """
    found: list[FoundCheckpoint] = []
    broken: dict[Path, str] = {}
    records: dict[Path, dict[str, Any]] = {}
    for folder in places:
        here, damaged = find_with_files(folder, read_record(folder) if with_files else {})
        found, broken = [*found, *here], {**broken, **damaged}
        records |= {
            each.path: read_record(run_dir) for each in here if (run_dir := run_dir_of(each.path, folder))
        }
    found = newest_first(found, lambda each: each.manifest)
    mine = [each for each in found if records.get(each.path, {}).get("id", each.run) == each.run]
    return found, without_abandoned(mine), broken


def best_below(folder: Path) -> list[FoundCheckpoint]:
    """Return the checkpoints with a score of the newest run below a folder that has one, the best first."""
    runs: dict[Path | None, list[FoundCheckpoint]] = {}
    for each in own_checkpoints([folder], with_files=True)[1]:
        runs.setdefault(run_dir_of(each.path, folder), []).append(each)
    return next(filter(None, map(best_first, runs.values())), [])


SaveRange = tuple[int, int]
"""The first and the last number of checkpoints that follow each other."""


def abandoned_saves(manifest: Mapping[str, Any]) -> list[SaveRange]:
    """Return the numbers of the checkpoints that rollbacks before this checkpoint have abandoned."""
    listed = manifest.get("abandoned")
    pairs = listed if isinstance(listed, list) else []
    is_pair = [isinstance(each, list) and list(map(type, each)) == [int, int] for each in pairs]
    return [(each[0], each[1]) for each, is_valid in zip(pairs, is_pair, strict=True) if is_valid]


def is_within(number: int, ranges: Iterable[SaveRange]) -> bool:
    """Return whether the number of a save is in one of the ranges."""
    return any(first <= number <= last for first, last in ranges)


def best_first(found: list[FoundCheckpoint], kept: KeptBest = EVERY_MONITOR) -> list[FoundCheckpoint]:
    """Return the checkpoints with a score, the best first; of several monitors, those of the newest one.

    Of equal scores, the oldest comes first. found: in the order of `find_checkpoints`, the newest first.
    Those that a rollback has abandoned are left out. kept: what the hooks monitor now; checkpoints of other
    metrics and modes are left out.
    """
    ranked = [(each, kept.monitor_of(each)) for each in without_abandoned(found)]
    name, mode = next((monitor for _, monitor in ranked if monitor is not None), ("", ""))
    oldest_first = [each for each, monitor in reversed(ranked) if monitor is not None and monitor[0] == name]
    scores = {at: float(each.manifest["monitor"]["score"]) for at, each in enumerate(oldest_first)}
    return [oldest_first[at] for at in order_of(scores, mode)]


def first_whole(
    found: list[FoundCheckpoint], read: Read = read
) -> tuple[FoundCheckpoint | None, dict[str, Any], dict[Path, str]]:
    """Return the first checkpoint that can be read, its contents, and why each one before it was skipped."""
    passed_over: dict[Path, str] = {}
    for checkpoint in found:
        try:
            return checkpoint, read(checkpoint.path), passed_over
        except CheckpointError as error:
            passed_over[checkpoint.path] = str(error)
    return None, {}, passed_over
