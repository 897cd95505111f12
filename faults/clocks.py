"""A clock that goes back: the run is killed and started again while the wall clock jumps, and loses nothing
by it.
"""

from __future__ import annotations

import datetime
import random
import signal
import time
from pathlib import Path
from typing import Any

from kills import AIMS, wait_for
from processes import Child
from training import Settings, train
from trials import Kind, Outcome, compare, draw, trial_numbers

from hookline.checkpoint import manifest
from hookline.training import resume

FARTHEST = 400 * 86400.0
"""Seconds by which a clock is set wrongly."""


class Clocks(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials."""
        return trial_numbers(30, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Kill and restart a run, each time with another wall clock, which also jumps during the run."""
        rng = random.Random(f"clock {self.seed} {number}")
        settings = draw(rng)
        expected = self.references.digest(settings)
        way = rng.choice(("back at every start", "back at every look", "anywhere"))
        kills, shift = rng.choice((1, 2, 3)), 0.0
        while True:
            shift = (
                shift - rng.uniform(60.0, FARTHEST / 10)
                if way == "back at every start"
                else rng.uniform(-FARTHEST, FARTHEST)
            )
            child = start(folder, settings, way, shift, rng.random())
            if kills:
                wait_for(child, rng, rng.choice(AIMS), self.references.seconds(settings))
                child.kill(signal.SIGKILL)
            child.wait()
            if not kills or child.result is not None:
                return compare(Outcome(number, note=way), child, expected)
            kills -= 1


def start(folder: Path, settings: Settings, way: str, shift: float, seed: float) -> Child:
    """Start a job whose wall clock is wrong."""

    def body() -> None:
        set_clock(way, shift, random.Random(seed))
        train(folder, settings)

    return Child(folder, settings, body=body)


def set_clock(way: str, shift: float, rng: random.Random) -> None:
    """Replace the wall clock in a child. The monotonic clock continues, as the system's does."""
    real, shown = time.time, [shift]

    def now() -> float:
        if way == "back at every look":
            shown[0] -= rng.uniform(0.0, 3600.0)
        elif way == "anywhere":
            shown[0] = rng.uniform(-FARTHEST, FARTHEST)
        return real() + shown[0]

    class Clock(datetime.datetime):
        """As `datetime`, by that clock."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(now(), tz)

    time.time = now
    manifest.datetime = resume.datetime = Clock  # type: ignore[misc,attr-defined]
