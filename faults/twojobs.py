"""Two jobs in one directory: one trains and the other is refused, or waits and takes over when the first has
ended or died.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from kills import AIMS, wait_for
from processes import LONGEST, Child, Hung
from training import RUN, Settings, prepare, train
from trials import Kind, Outcome, compare, draw, last_lines, resume_and_compare, trial_numbers

from hookline.run import lock

WAYS = ("together", "later", "later", "killed")


class TwoJobs(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials."""
        return trial_numbers(40, share)

    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Start a job, start a second one in its directory at some moment, and perhaps kill the first; then
        start once more.
        """
        rng = random.Random(f"two-jobs {self.seed} {number}")
        settings, way = draw(rng), rng.choice(WAYS)
        expected = self.references.digest(settings)
        jobs = [start(folder, 0, settings, 0.0)]
        if way != "together":
            wait_for(jobs[0], rng, rng.choice(AIMS), self.references.seconds(settings))
        # one that waits gets the directory when the first has ended, one that does not is refused
        jobs.append(
            start(folder, 1, settings, LONGEST if way == "killed" else rng.choice((0.0, 0.0, LONGEST)))
        )
        if way == "killed":
            time.sleep(rng.uniform(0.0, self.references.seconds(settings)))
            jobs[0].kill(signal.SIGKILL, group=rng.random() < 0.5)
        try:
            for job in jobs:
                job.wait()
        except Hung as hung:
            return Outcome(number, wrong=f"{way}: {hung}; it said: {last_lines(jobs[1].said)}")
        outcome = judge(Outcome(number, note=way), jobs, expected)
        if outcome.wrong:
            return outcome
        return resume_and_compare(
            outcome, next(each for each in jobs if each.result is not None), settings, expected
        )


def start(folder: Path, number: int, settings: Settings, patience: float) -> Child:
    """Start one of the jobs, with its own files, in the run directory that both share."""
    own = prepare(folder / f"job-{number}")

    def body() -> None:
        lock.WAITING = patience
        train(own, settings, run_dir=folder / RUN)

    return Child(own, settings, body=body)


def judge(outcome: Outcome, jobs: list[Child], expected: dict[str, str]) -> Outcome:
    """Check that at least one job ended as if alone, and that the other was killed or named the first one in
    its error.
    """
    ended = [each for each in jobs if each.result is not None]
    if not ended:
        outcome.wrong = (
            f"neither came to its end; they said: {last_lines(jobs[0].said)} / {last_lines(jobs[1].said)}"
        )
        return outcome
    for job, other in ((jobs[0], jobs[1]), (jobs[1], jobs[0])):
        if job.result is None and job.code != -signal.SIGKILL and not is_refusal(job, other):
            outcome.wrong = (
                f"it ended with exit code {job.code} and did not name the other job; "
                f"it said: {last_lines(job.said)}"
            )
    # the second of two that came to their end found a run that was over, and has counted and measured nothing
    differs = () if len(ended) == 1 else ("counters", "metrics")
    counted = {name: each for name, each in expected.items() if name not in differs}
    for job in ended:
        if not outcome.wrong:
            compare(outcome, job, counted)
    return outcome


def is_refusal(child: Child, other: Child) -> bool:
    """Return whether a job has ended by an error that names the other one."""
    return child.code == 1 and "is in use: process" in child.said and f"process {other.pid} on " in child.said
