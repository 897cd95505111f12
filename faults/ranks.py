"""SIGKILL to one of two ranks at random moments; then both are started again, until the run
gets to its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import tempfile
import time
from pathlib import Path

from kills import AIMS, wait_for
from processes import Child, Hung, lost_steps
from training import RUN, Settings, prepare, train
from trials import ACCUMULATIONS, SAVES, Kind, Outcome, References, last_lines, trial_numbers

RANKS = 2
STRATEGIES = ("ddp", "fsdp")
DOWN_WITHIN = 20.0
"""Seconds in which a rank that is left alone must end by itself."""


class Ranks(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return few trials: each is four processes that communicate."""
        return trial_numbers(20, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Kill one of two ranks, once or twice."""
        rng = random.Random(f"ranks {self.seed} {number}")
        settings = Settings(
            "32",
            rng.choice(ACCUMULATIONS),
            rng.choice((0.5, 1.0)),
            save=rng.choice(SAVES),
            strategy=rng.choice(STRATEGIES),
        )
        expected, seconds = reference(self.references, settings)
        outcome = Outcome(number)
        for _ in range(rng.choice((1, 1, 2))):
            job = Job(folder, settings)
            victim = rng.randrange(RANKS)
            wait_for(job.ranks[victim], rng, rng.choice(AIMS), seconds)
            outcome.note = outcome.note or f"rank {victim} in {job.ranks[victim].phase[0]}"
            job.ranks[victim].kill(signal.SIGKILL)
            outcome.wrong = job.wait(DOWN_WITHIN)
            if outcome.wrong or job.digests() is not None:
                break
        return outcome if outcome.wrong else judge(outcome, Job(folder, settings), expected)


class Job:
    """All ranks of one training, as a launcher would start them."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = [self._start(rank, port, settings) for rank in range(RANKS)]

    def _start(self, rank: int, port: int, settings: Settings) -> Child:
        own = prepare(self.folder / f"rank-{rank}")
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": RANKS,
            "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_PORT": port,
        }

        def body() -> None:
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
            train(own, settings, run_dir=self.folder / RUN)

        return Child(own, settings, body=body)

    def wait(self, seconds: float) -> str:
        """Wait for all; empty, or what hung after the first one had ended."""
        while not any(each.is_over() for each in self.ranks):
            time.sleep(0.01)
        hung = ""
        for rank, process in enumerate(self.ranks):
            if (
                process.phase[0] == "starting"
            ):  # it has not found the others yet, so only a launcher can tell it
                process.kill(signal.SIGTERM)
            try:
                process.wait(seconds)
            except Hung as error:
                hung = f"rank {rank} was left alone and hung: {error}; it said: {last_lines(process.said)}"
        return hung

    def digests(self) -> list[dict[str, str]] | None:
        """Return the result of every rank, if all reached their end."""
        results = [each.result for each in self.ranks]
        return [each["digest"] for each in results if each is not None] if all(results) else None


def reference(references: References, settings: Settings) -> tuple[list[dict[str, str]], float]:
    """Return the result of an undisturbed run on every rank, and its seconds."""
    numbers = dataclasses.replace(settings.numbers, strategy=settings.strategy)
    path = references.folder / f"ranks-{numbers.strategy}-{numbers.accumulate}-{numbers.validate_every}.json"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=references.folder) as aside:
            started = time.monotonic()
            job = Job(Path(aside), numbers)
            job.wait(DOWN_WITHIN)
            found = job.digests()
            if found is None:
                raise RuntimeError(
                    f"the run that nothing happens to did not end: {last_lines(job.ranks[0].said)}"
                )
            done = Path(aside) / "done"
            done.write_text(json.dumps([found, time.monotonic() - started]))
            with contextlib.suppress(FileExistsError):
                done.rename(path)
    expected, seconds = json.loads(path.read_text())
    return expected, seconds


def judge(outcome: Outcome, last: Job, expected: list[dict[str, str]]) -> Outcome:
    """Check that the last start of the run reaches its end, on every rank with the result of an undisturbed
    run.
    """
    hung = last.wait(60.0)
    found = last.digests()
    if hung or found is None:
        outcome.wrong = hung or f"it never ended; it said: {last_lines(last.ranks[0].said)}"
        return outcome
    outcome.resumed = 1
    differing = [
        f"{name} of rank {rank}"
        for rank, digest in enumerate(expected)
        for name in digest
        if found[rank].get(name) != digest[name]
    ]
    outcome.exact = int(not differing)
    if differing:
        outcome.silent, outcome.wrong = 1, f"not the same at the end: {', '.join(differing)}"
    lost = lost_steps(last.ranks[0].folder)
    if lost:
        outcome.lost, outcome.wrong = 1, f"{outcome.wrong}; {lost}".removeprefix("; ")
    return outcome
