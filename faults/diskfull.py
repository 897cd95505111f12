"""A full disk: the error says where and why, older checkpoints stay whole, and with room again the run goes
on exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from damage import newest_first
from processes import Child
from training import RUN, train
from trials import Kind, Outcome, compare, draw, last_lines, trial_numbers

from hookline import Hook
from hookline.checkpoint.files import verify

SIZE = 4 * 2**20
CAUSES = ("No space left on device", "File too large")


class DiskFull(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials."""
        return trial_numbers(20, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Fill the disk from some step on: the run must stop, or continue without checkpoints, as its option
        says.
        """
        rng = random.Random(f"disk full {self.seed} {number}")
        continues = number % 2 == 1
        settings = dataclasses.replace(
            draw(rng), logger=False, workers=0, on_save_error="warn" if continues else "raise"
        )
        expected = self.references.digest(settings)
        with small_disk(folder / "disk") as disk:
            full = (FillUp if disk else LimitFiles)(rng, folder / "disk")
            first = Child(
                folder, settings, body=lambda: train(folder, settings, (full,), run_dir=folder / "disk" / RUN)
            )
            code = first.wait()
            outcome = Outcome(
                number,
                note=("a small disk" if disk else "limited files") + (", continues" if continues else ""),
            )
            outcome.wrong = self.judge(first, code, continues, folder / "disk" / RUN)
            (folder / "disk" / "ballast").unlink(missing_ok=True)
            if outcome.wrong:
                return outcome
            if continues:
                del expected["kept checkpoints"]  # fewer than with room for all of them
                return compare(outcome, first, expected)
            last = Child(
                folder, settings, body=lambda: train(folder, settings, run_dir=folder / "disk" / RUN)
            )
            last.wait()
            return compare(outcome, last, expected)

    def judge(self, child: Child, code: int, continues: bool, run_dir: Path) -> str:
        """Return an empty string if the process ended as its option says, named path and cause, and left only
        complete checkpoints.
        """
        if (code == 0) != continues:
            return f"exit code {code}; said: {last_lines(child.said)}"
        if not any(cause in child.said for cause in CAUSES) or str(run_dir) not in child.said:
            return f"neither path nor cause was named; said: {last_lines(child.said)}"
        for path in newest_first(run_dir):
            verify(path)
        return "" if newest_first(run_dir) else "no checkpoint is left"


class FillUp(Hook):
    """Leaves only so much room, from a step on."""

    def __init__(self, rng: random.Random, disk: Path) -> None:
        self.disk, self.at, self.room = disk, rng.randint(5, 8), rng.randrange(12_000)

    def on_step_end(self, step: int) -> None:
        """Take the room away before the save of that step."""
        if step == self.at:
            free = os.statvfs(self.disk)
            with (
                contextlib.suppress(OSError),
                (self.disk / "ballast").open("wb") as file,
            ):  # a save may go on at the same time
                file.write(bytes(max(0, free.f_bavail * free.f_frsize - self.room)))


class LimitFiles(Hook):
    """Where nothing may be mounted: files that grow beyond a size cannot be written."""

    def __init__(self, rng: random.Random, disk: Path) -> None:
        self.at, self.room = rng.randint(5, 8), rng.randrange(3_000)
        disk.mkdir(exist_ok=True)

    def on_step_end(self, step: int) -> None:
        """Take the room away before the save of that step."""
        if step == self.at:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a small file system there; return False if this machine does not allow it."""
    place.mkdir()
    mount: Any = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)
