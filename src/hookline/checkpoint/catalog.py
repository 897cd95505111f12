"""Which checkpoints there are, and which of them is the newest or the best: by what their manifests say,
never by a link.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hookline.checkpoint.cleanup import LEFT_OVER
from hookline.checkpoint.files import clean_up, read, read_manifest
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError
from hookline.util.urls import MANIFEST, is_ours

ALONE = Ranks()
T = TypeVar("T")
Read = Callable[[Path | str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose manifest is whole; whether its files are is known once they are read."""

    path: Path
    manifest: dict[str, Any]

    @property
    def run(self) -> str:
        """Which run it belongs to."""
        return str(self.manifest.get("run", ""))


def newest_first(given: Iterable[T], manifest_of: Callable[[T], Mapping[str, Any]]) -> list[T]:
    """Order checkpoints by the progress of their run: the number of the save decides, not the clock and not
    the step.

    After a resume from an older checkpoint a lower step can be the newer state, and a clock can be set back.
    The clock decides only which of several runs was started last, and between checkpoints without a number,
    which an older version wrote.
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
            number_of(manifest),
            str(manifest.get("saved_at", "")),
            _whole(manifest.get("batches_seen")),
        )

    return [each for each, _ in sorted(listed, key=lambda one: age(one[1]), reverse=True)]


def number_of(manifest: Mapping[str, Any]) -> int:
    """Return the number of a checkpoint among those of its run; 0: an older version wrote it."""
    return _whole(manifest.get("saves"))


def start_of(manifest: Mapping[str, Any]) -> str:
    """When the job that wrote it was started; an older version did not say so, then when it was written."""
    return str(manifest.get("started_at") or manifest.get("saved_at") or "")


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def find(folder: Path) -> tuple[list[Found], dict[Path, str]]:
    """All checkpoints below a folder, the newest first, and those whose manifest cannot be believed, with the
    reason.
    """
    found, broken = [], {}
    for path in _folders(folder):
        try:
            found.append(Found(path, read_manifest(path)))
        except CheckpointError as error:
            broken[path] = str(error)
    return newest_first(found, lambda each: each.manifest), broken


def clean_up_below(folder: Path, alone: bool = False) -> None:
    """Put in order what killed processes left in a folder and in those below it. alone: see `tidy`."""
    for parent in places_below(folder):
        clean_up(parent, alone)


def places_below(folder: Path) -> list[Path]:
    """The folders in which checkpoints are, or may have been, written."""
    places = []
    for parent, names, files in os.walk(folder):
        places.append(Path(parent))
        names[:] = [] if _is_checkpoint(files) else [name for name in names if not name.startswith(".")]
    return sorted(places)


def _folders(folder: Path) -> list[Path]:
    """Directories that are checkpoints, or look like what is left of one; those being written or removed are
    hidden.
    """
    made = []
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        if _is_checkpoint(files):
            made.append(Path(parent))
            names.clear()  # what others have put into a checkpoint is not searched
    return made


def _is_checkpoint(files: list[str]) -> bool:
    """Whether a directory with these files is one, or was; model.safetensors alone is what other tools call
    their weights.
    """
    return MANIFEST in files or sum(map(is_ours, files)) > 1


def being_replaced(folder: Path) -> list[Path]:
    """Checkpoints below a folder that a process had moved aside to replace them, and has not
    replaced so far.
    """
    aside = [
        path
        for path in folder.rglob(".*.old")
        if LEFT_OVER.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return [path for path in aside if not path.with_name(LEFT_OVER.fullmatch(path.name)["name"]).exists()]  # type: ignore[index]


def best_first(found: list[Found]) -> list[Found]:
    """Those that a monitor has kept, the best first; the newest monitor's, if several were used."""
    scored = [each for each in found if each.manifest["monitor"]]
    if not scored:
        return []
    monitor = scored[0].manifest["monitor"]
    scored = [each for each in scored if each.manifest["monitor"]["name"] == monitor["name"]]
    sign = 1.0 if monitor["mode"] == "min" else -1.0
    return sorted(scored, key=lambda each: sign * float(each.manifest["monitor"]["score"]))


def first_whole(
    found: list[Found], read: Read = read
) -> tuple[Found | None, dict[str, Any], dict[Path, str]]:
    """The first one that can be read, what is in it, and why those before it could not."""
    passed_over: dict[Path, str] = {}
    for each in found:
        try:
            return each, read(each.path), passed_over
        except CheckpointError as error:
            passed_over[each.path] = str(error)
    return None, {}, passed_over
