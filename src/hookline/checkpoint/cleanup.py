"""Remove checkpoints, and clean up the temporary directories of killed processes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from pathlib import Path

from hookline.checkpoint.manifest import load_manifest
from hookline.checkpoint.writer import delete, flush, machine_id, writing
from hookline.util.errors import CheckpointError
from hookline.util.urls import MANIFEST, is_checkpoint_file

log = logging.getLogger("hookline")

REPLACE_TIMEOUT = 60.0
"""Seconds. A replacement takes an instant between its two renames; after this time, its process is dead and
another one has its id.
"""
REMOTE_TIMEOUT = 6 * 3600.0
"""Seconds after which a directory of a process on another machine counts as abandoned."""
LEFT_OVER = re.compile(
    r"\.(?P<name>.+)\.(?:(?P<host>[0-9a-f]{8})-(?P<pid>\d+)\.(?P<kind>new|old)|(?P<gone>gone))"
)


def remove_checkpoint_folder(path: Path) -> None:
    """Remove a checkpoint, unless it is gone already, because another process or the user has removed it.

    Rename it first, so that an interrupted removal does not leave half of one.
    """
    gone = path.with_name(f".{path.name}.gone")
    try:
        if not any(
            is_checkpoint_file(each.name) for each in path.iterdir()
        ):  # the path of a whole disk, by mistake
            raise CheckpointError(f"{path} was not removed: it does not contain a file of a checkpoint.")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        delete(gone)
    except FileNotFoundError as error:
        log.warning("The checkpoint %s was to be removed, and is gone already: %s", path, error)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} could not be removed: {error}") from error


def left_overs(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the directories in a folder that a process was, or is, writing, replacing or removing."""
    return (
        [(each, found) for each in folder.iterdir() if (found := LEFT_OVER.fullmatch(each.name))]
        if folder.is_dir()
        else []
    )


def clean_up(folder: Path, alone: bool = False) -> list[Path]:
    """Clean up a folder after processes that have died; return the checkpoints that were restored.

    Restore a checkpoint whose replacement did not finish, and delete the other temporary directories. Leave
    alone the directories of live processes and directories that are not checkpoints. alone: no other process
    writes here, because this one holds the lock of the run.
    """
    restored: list[Path] = []
    # replaced checkpoints come last, the newest first, because another directory may still have their name
    ordered = sorted(left_overs(folder), key=lambda pair: (pair[1]["kind"] == "old", _idle_seconds(pair[0])))
    for left_over, match in ordered:
        is_stuck = match["kind"] == "old" and _idle_seconds(left_over) > REPLACE_TIMEOUT
        pid = os.getpid() if alone else int(match["pid"] or 0)
        host = machine_id() if alone else match["host"]
        if match["pid"] and _is_in_use(left_over, host, pid) and not is_stuck:
            continue
        path = left_over.with_name(match["name"])
        try:
            if match["kind"] == "old" and not path.exists() and (left_over / MANIFEST).is_file():
                os.rename(left_over, path)
                flush(folder)
                restored.append(path)
            elif _was_checkpoint(left_over):
                delete(left_over)
        except OSError:  # another process may clean up as well, or this one lacks permission
            continue
    return restored


def remove_abandoned_files(folder: Path) -> None:
    """Delete the temporary files of processes that died while they wrote a checkpoint of one file."""
    for path, match in left_overs(folder):
        if path.is_file() and match["pid"] and not _is_in_use(path, match["host"], int(match["pid"])):
            with contextlib.suppress(OSError):  # another process may clean up as well
                path.unlink()


def _was_checkpoint(path: Path) -> bool:
    """Return whether it was a checkpoint: it has a valid manifest, or only files that a checkpoint has."""
    if not path.is_dir() or path.is_symlink():
        return False
    with contextlib.suppress(CheckpointError):
        load_manifest(path)
        return True
    return all(is_checkpoint_file(name) for _, _, files in os.walk(path) for name in files)


def _is_in_use(path: Path, host: str, pid: int) -> bool:
    if host != machine_id():
        return _idle_seconds(path) < REMOTE_TIMEOUT
    if pid == os.getpid():  # in a container, a process often has the id of its predecessor
        return os.path.abspath(path) in writing
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _idle_seconds(path: Path) -> float:
    """Return the seconds since it was last renamed or written to."""
    try:
        return time.time() - path.stat().st_ctime
    except OSError:
        return 0.0
