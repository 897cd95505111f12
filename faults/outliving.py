"""Processes that outlive a run: it ends nevertheless, and the next one can begin at once in the same
directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import random
import signal
import time
from pathlib import Path

from kills import AIMS, wait_for
from processes import LONGEST, Child
from training import Settings, train
from trials import Kind, Outcome, draw, last_lines, resume_and_compare, trial_numbers

from hookline import Hook

OUTLIVING = ("worker", "worker", "fork", "torchdata")
ENDINGS = ("completes", "fails", "killed")


class Outliving(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials."""
        return trial_numbers(30, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """End a run while a process that it started continues; then start the run again at once."""
        rng = random.Random(f"workers {self.seed} {number}")
        who, ending = rng.choice(OUTLIVING), rng.choice(ENDINGS)
        if who == "torchdata" and importlib.util.find_spec("torchdata") is None:
            who = "worker"  # not every run has one
        settings = dataclasses.replace(draw(rng), workers=rng.choice((1, 2)), persistent=True, loader="torch")
        expected = self.references.digest(settings)
        begun = dataclasses.replace(settings, loader=who) if who == "torchdata" else settings
        child = start(folder, begun, who == "fork", rng.randint(1, 12) if ending == "fails" else 0)
        outcome = Outcome(number, note=f"{who}, {ending}")
        if ending == "killed":
            wait_for(child, rng, rng.choice(AIMS), self.references.seconds(settings))
            child.kill(signal.SIGKILL)
        try:
            if hung := wait_alone(child):
                outcome.wrong = hung
            elif (
                who == "torchdata"
            ):  # where it is in the data, it does not know to the bit: what counts is that it ends
                again = Child(folder, begun)
                outcome.wrong = wait_alone(again)
                outcome.resumed = outcome.exact = int(again.result is not None)
                outcome.wrong = outcome.wrong or (
                    "" if outcome.resumed else f"it never ended; it said: {last_lines(again.said)}"
                )
                end_group(again)
            else:
                outcome.note += "" if is_left(child) else ", no process was left"
                resume_and_compare(outcome, child, settings, expected)
        finally:
            end_group(child)
        return outcome


def start(folder: Path, settings: Settings, forks: bool, fails_at: int) -> Child:
    """Start a run with a hook that forks, or fails."""
    return Child(folder, settings, body=lambda: train(folder, settings, hooks=(Fault(forks, fails_at),)))


class Fault(Hook):
    """Starts a process that does not end by itself, and fails at a step."""

    def __init__(self, forks: bool, fails_at: int) -> None:
        self.forks, self.fails_at = forks, fails_at

    def on_train_start(self) -> None:
        """Fork, as a user's own hook may."""
        if self.forks and os.fork() == 0:
            time.sleep(LONGEST)
            os._exit(0)

    def on_step_end(self, step: int) -> None:
        """Fail at the chosen step."""
        if step == self.fails_at:
            raise RuntimeError("a step has failed on purpose")


def wait_alone(child: Child) -> str:
    """Wait for the run itself, not for what it has started; empty, or what hung."""
    until = time.monotonic() + LONGEST
    while not child.is_over():
        if time.monotonic() > until:
            return (
                f"it did not end in {LONGEST:g} s, in phase {child.phase[0]}; it said: "
                f"{last_lines(child.said)}"
            )
        time.sleep(0.002)
    return ""


def is_left(child: Child) -> bool:
    """Return whether a process of the child's group is still running."""
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_group(child: Child) -> None:
    """End the processes that are left, and the run too if it hangs."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
