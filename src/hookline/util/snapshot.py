"""Snapshots of checkpoints for uploads, because old checkpoints are removed while an upload reads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hookline.util.urls import is_checkpoint_file

UPLOADS = ".uploads"
"""The folder in a run's directory that holds snapshots until they are uploaded."""
TRACKER_FOLDERS = ("wandb", "mlflow", "trackio", "comet", "clearml")
"""Folders in a run's directory in which trackers keep copies of its checkpoints and its record. A search for
runs or checkpoints leaves them out.
"""


def take_snapshot(source: Path, target: Path) -> list[str]:
    """Link or copy a file or a directory, so that removing or replacing it does not disturb the upload.

    Files of a checkpoint never change, so a link is enough; other files are copied. Return the paths that
    cannot be copied.
    """
    shutil.rmtree(target, ignore_errors=True)
    if not source.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        return []
    left_out = []
    for parent, folders, files in os.walk(source):
        inside = Path(parent).relative_to(source)
        (target / inside).mkdir(parents=True)
        left_out += [str(inside / name) for name in folders if (source / inside / name).is_symlink()]
        for name in files:
            file, is_own = source / inside / name, inside == Path() and is_checkpoint_file(name)
            if is_own:
                link_or_copy(file, target / name)
            elif file.is_symlink() or not file.is_file() or not _is_copied(file, target / inside / name):
                left_out.append(str(inside / name))
    return sorted(left_out)


def remove_snapshot(target: Path) -> None:
    """Remove a snapshot."""
    if target.is_dir():
        shutil.rmtree(target, ignore_errors=True)
    else:
        target.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    try:
        folder.rmdir()
    except OSError:
        return


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link to a file that never changes, or copy it where links are not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _is_copied(source: Path, target: Path) -> bool:
    try:
        shutil.copy2(source, target)
    except OSError:
        target.unlink(missing_ok=True)  # incomplete
        return False
    return True
