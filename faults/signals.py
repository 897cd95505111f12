"""SIGTERM, SIGUSR1 and SIGINT at random moments: the run saves and ends, and continues exactly when it is
started again.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from kills import wait_for
from processes import Child
from trials import Kind, Outcome, draw, last_lines, resume_and_compare, trial_numbers

CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGINT: 130}
AIMS = ("steps", "steps", "validation", "save", "set-up", "clock")
ENDED = "Unfinished: "
"""How the last line of a run that a signal has ended begins."""
AT_ONCE = 3.0
"""Seconds that a run may take to end after a second signal."""


class Signals(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials."""
        return trial_numbers(120, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Send a signal to a run, or two in a row, or one to its whole group, then start the run again."""
        rng = random.Random(f"signals {self.seed} {number}")
        settings = draw(rng)
        expected = self.references.digest(settings)
        kind, twice, group = rng.choice(sorted(CODES)), rng.random() < 0.2, rng.random() < 0.5
        child = Child(folder, settings)
        wait_for(child, rng, rng.choice(AIMS), self.references.seconds(settings))
        phase, started = child.phase[0], time.monotonic()
        child.kill(kind, group)
        if twice:
            time.sleep(rng.uniform(0.0, 0.003))
            child.kill(kind, group)
        code = child.wait()
        outcome = Outcome(number, note=f"{phase}{', twice' if twice else ''}")
        # the signal ends the process itself before the run begins, and once the run is over
        has_no_handler = phase == "starting" or (twice and ENDED in child.said)
        if (
            code != CODES[kind]
            and not (code == 0 and child.result)
            and not (has_no_handler and code == -kind)
        ):
            outcome.wrong = (
                f"exit code {code} after {kind.name} in phase {phase} (group {group}, twice {twice}, "
                f"{settings}), not {CODES[kind]}; said: {last_lines(child.said)}"
            )
        elif time.monotonic() - started > AT_ONCE:
            outcome.wrong = (
                f"it took {time.monotonic() - started:.1f} s to end after {kind.name} in phase {phase}"
            )
        wrong = outcome.wrong
        resume_and_compare(outcome, child, settings, expected)
        outcome.wrong = "; ".join(filter(None, (wrong, outcome.wrong)))
        return outcome
