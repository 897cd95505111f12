"""Which checkpoints there are, and which of them is the newest or the best: by what their manifests say, never by a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.checkpoint.files import read, read_manifest, tidy
from hookline.checkpoint.tidying import LEFT_OVER
from hookline.errors import CheckpointError
from hookline.ranks import Ranks
from hookline.urls import MANIFEST, is_ours

ALONE = Ranks()
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

    @property
    def age(self) -> tuple[str, int]:
        """Larger is newer. Time comes first: after a resume from an older one, a lower step can be the newer state."""
        return self.manifest["saved_at"], self.manifest["batches_seen"]


def find(folder: Path) -> tuple[list[Found], dict[Path, str]]:
    """All checkpoints below a folder, the newest first, and those whose manifest cannot be believed, with the reason."""
    found, broken = [], {}
    for path in _folders(folder):
        try:
            found.append(Found(path, read_manifest(path)))
        except CheckpointError as error:
            broken[path] = str(error)
    return sorted(found, key=lambda each: each.age, reverse=True), broken


def tidy_below(folder: Path) -> None:
    """Put in order what killed processes left in a folder and in those below it."""
    for parent, names, files in os.walk(folder):
        tidy(Path(parent))
        names[:] = [] if _is_checkpoint(files) else [name for name in names if not name.startswith(".")]


def _folders(folder: Path) -> list[Path]:
    """Directories that are checkpoints, or look like what is left of one; those being written or removed are hidden."""
    made = []
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        if _is_checkpoint(files):
            made.append(Path(parent))
            names.clear()  # what others have put into a checkpoint is not searched
    return made


def _is_checkpoint(files: list[str]) -> bool:
    """Whether a directory with these files is one, or was; model.safetensors alone is what other tools call their weights."""
    return MANIFEST in files or sum(map(is_ours, files)) > 1


def being_replaced(folder: Path) -> list[Path]:
    """Checkpoints below a folder that a process had moved aside to replace them, and has not replaced so far."""
    aside = [path for path in folder.rglob(".*.old") if LEFT_OVER.fullmatch(path.name) and (path / MANIFEST).is_file()]
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


def first_whole(found: list[Found], read: Read = read) -> tuple[Found | None, dict[str, Any], dict[Path, str]]:
    """The first one that can be read, what is in it, and why those before it could not."""
    passed_over: dict[Path, str] = {}
    for each in found:
        try:
            return each, read(each.path), passed_over
        except CheckpointError as error:
            passed_over[each.path] = str(error)
    return None, {}, passed_over
