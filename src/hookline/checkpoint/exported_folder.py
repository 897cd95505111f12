"""Directories for other programs, made of the weights of a checkpoint, and replaced as a whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.cleanup import left_overs
from hookline.checkpoint.export_formats import put_in_place
from hookline.checkpoint.files import read_manifest
from hookline.checkpoint.weights import find_weights
from hookline.util.errors import CheckpointError
from hookline.util.limited_json import RECORD_BYTES, parse_json, read_within
from hookline.util.urls import is_url, shown

RECORD = "hookline.json"
"""The file in the directory that names its checkpoint."""

Write = Callable[[Mapping[str, Any], Path], None]
"""Writes weights, by their names in the module, to files in a directory."""


def export_folder(checkpoint: Path | str, target: Path, write: Write) -> bool:
    """Write the weights of a checkpoint, those that evaluations used; return whether that was necessary.

    The files are written to a temporary directory, flushed and renamed. Only one process may write here: the
    directories that a killed one has left are removed.
    """
    manifest = read_manifest(checkpoint)
    _clean_up(target)
    if target.exists():
        record = _read_record(target)
        if record.get("checkpoint_sha256") == manifest["sha256"]:
            return False
    found = find_weights(checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    with put_in_place(target, is_file=False) as temporary:
        write(found.weights, temporary)
        about = {
            "checkpoint": _path_from(checkpoint, target),
            "checkpoint_sha256": manifest["sha256"],
            "run": manifest.get("run", ""),
            "step": manifest["step"],
            "weights": found.kind,
        }
        (temporary / RECORD).write_text(json.dumps(about, indent=2) + "\n")
    return True


def _path_from(checkpoint: Path | str, target: Path) -> str:
    """Return the path of the checkpoint as seen from the export, because a run's directory may be moved."""
    if isinstance(checkpoint, str) and is_url(checkpoint):
        return shown(checkpoint)
    return Path(os.path.relpath(checkpoint, target)).as_posix()


def _read_record(folder: Path) -> Mapping[str, Any]:
    """Return the record of an export. Raise if the directory is something else, which would be lost."""
    try:
        record = parse_json(read_within(folder / RECORD, RECORD_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} exists and is not an export of Hookline (it has no readable {RECORD}), so it is not "
            "replaced. Move it away, or choose another directory."
        ) from error
    return record if isinstance(record, Mapping) else {}


def _clean_up(target: Path) -> None:
    """Restore an export whose replacement did not finish, and remove what a killed process has left."""
    for path, match in left_overs(target.parent):
        if match["name"] != target.name:
            continue
        if match["kind"] == "old" and not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)
