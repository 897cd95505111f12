"""SIGKILL at random moments; then the run is started again, until it gets to its end."""

from __future__ import annotations

import dataclasses
import random
import shutil
import signal
import time
from pathlib import Path

from processes import Child
from training import Settings
from trials import Kind, Outcome, draw, resume_and_compare, trial_numbers

AIMS = ("clock", "clock", "set-up", "steps", "validation", "save")


class Kills(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials."""
        return trial_numbers(200, share)

    def settings(self, rng: random.Random) -> Settings:
        """Draw the settings of a trial."""
        return draw(rng)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Kill one run once or several times."""
        rng = random.Random(f"kills {self.seed} {number}")
        settings = self.settings(rng)
        expected = self.references.digest(settings)
        fresh = number % 25 == 24
        kills, killed = rng.choice((1, 1, 1, 2, 3)), ""
        while True:
            child = Child(folder, settings, fresh=fresh)
            wait_for(child, rng, rng.choice(AIMS), self.references.seconds(settings), fresh)
            killed = killed or child.phase[0]  # the first one is counted
            child.kill(signal.SIGKILL, group=rng.random() < 0.5)
            kills -= 1
            if child.wait() == 0 or kills == 0:
                break
        return resume_and_compare(Outcome(number, note=killed), child, settings, expected, fresh)


class CompiledKills(Kills):
    """The same, of runs whose training step is compiled."""

    def trials(self, share: float) -> list[int]:
        """Return fewer numbers, because every start compiles."""
        return trial_numbers(20, share)

    def settings(self, rng: random.Random) -> Settings:
        """Draw the settings of a trial; without a C++ compiler, torch.compile only traces."""
        backends = ("inductor", "aot_eager") if shutil.which("g++") else ("aot_eager",)
        return dataclasses.replace(draw(rng), backend=rng.choice(backends))


def wait_for(child: Child, rng: random.Random, aim: str, seconds: float, fresh: bool = False) -> None:
    """Wait until a random moment: by the clock, or shortly after the n-th start of a phase."""
    if aim == "clock" and fresh:
        while child.phase[0] == "starting" and not child.is_over():
            time.sleep(0.01)
    if aim == "clock":
        time.sleep(rng.uniform(0.0, seconds))
        return
    times, until = rng.randint(1, 1 if aim == "set-up" else 6), time.monotonic() + 20.0
    before = ("", -1)
    while times and not child.is_over() and time.monotonic() < until:
        phase, count = child.phase
        times -= phase == aim and (phase, count) != before
        before = (phase, count)
        time.sleep(0.0002)  # no phase is that short, and the training needs the core
    time.sleep(rng.uniform(0.0, 0.004))
