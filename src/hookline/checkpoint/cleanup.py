"""Checkpoints removed, and what killed processes left behind put in order."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint.writer import delete, flush, machine, writing
from hookline.util.errors import CheckpointError
from hookline.util.urls import is_ours

LONG_AGO = 60.0
"""Seconds. A replacement is between its two renames for an instant: who seems to be so for longer is another
process by now.
"""
HOURS_AGO = 6 * 3600.0
"""Seconds. Whether a process on another machine lives cannot be told; what it left for so long is left for
good.
"""
LEFT_OVER = re.compile(
    r"\.(?P<name>.+)\.(?:(?P<host>[0-9a-f]{8})-(?P<pid>\d+)\.(?P<kind>new|old)|(?P<gone>gone))"
)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that a removal that is interrupted leaves no half of
    one.
    """
    gone = path.with_name(f".{path.name}.gone")
    try:
        if not any(is_ours(each.name) for each in path.iterdir()):  # a whole disk could be named by mistake
            raise CheckpointError(f"{path} is not removed: nothing in it is a file of a checkpoint.")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        delete(gone)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} could not be removed: {error}") from error


def left_overs(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """What was being written, replaced or removed in a folder when its process ended, or is so just now."""
    return (
        [(each, found) for each in folder.iterdir() if (found := LEFT_OVER.fullmatch(each.name))]
        if folder.is_dir()
        else []
    )


def clean_up(folder: Path, alone: bool = False) -> list[Path]:
    """Put in order what processes that are dead by now left in a folder; the checkpoints that got their name
    back.

    A checkpoint that was just being replaced gets its name back if the new one did not get it; everything
    else goes. What a living process writes is left alone, and so is what is no checkpoint. alone: no other
    process writes here, because this one holds the lock of the run.
    """
    back: list[Path] = []
    # those being replaced last, the newest first: the others may stand in their way
    for each, found in sorted(left_overs(folder), key=lambda one: (one[1]["kind"] == "old", _age(one[0]))):
        stuck = found["kind"] == "old" and _age(each) > LONG_AGO
        pid = os.getpid() if alone else int(found["pid"] or 0)
        if found["pid"] and _in_use(each, machine() if alone else found["host"], pid) and not stuck:
            continue
        path = each.with_name(found["name"])
        try:
            if found["kind"] == "old" and not path.exists() and (each / manifests.NAME).is_file():
                os.rename(each, path)
                flush(folder)
                back.append(path)
            elif _is_ours(each):
                delete(each)
        except OSError:  # another process may be tidying as well, or may not be allowed to: no reason to fail
            continue
    return back


def _is_ours(path: Path) -> bool:
    """Whether it was a checkpoint: it has a manifest that we wrote, or nothing but files of ours. A name
    alone proves nothing.
    """
    if not path.is_dir() or path.is_symlink():
        return False
    with contextlib.suppress(CheckpointError):
        manifests.load(path)
        return True
    names = {name for _, _, files in os.walk(path) for name in files}
    return all(map(is_ours, names))


def _in_use(path: Path, host: str, pid: int) -> bool:
    if host != machine():
        return _age(path) < HOURS_AGO
    if pid == os.getpid():  # in a container a process often has the number of its predecessor
        return os.path.abspath(path) in writing
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _age(path: Path) -> float:
    """Seconds since it was last renamed or written to."""
    try:
        return time.time() - path.stat().st_ctime
    except OSError:
        return 0.0
