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
from trials import Kind, Outcome, compare, draw, go_on, last_words, some

from hookline.run import lock

WAYS = ("together", "later", "later", "killed")


class TwoJobs(Kind):
    """Trials of this kind."""

    def trials(self, share: float) -> list[int]:
        """As many as asked for."""
        return some(40, share)

    def try_it(self, number: int, folder: Path) -> Outcome:
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
            for each in jobs:
                each.wait()
        except Hung as hung:
            return Outcome(number, wrong=f"{way}: {hung}; it said: {last_words(jobs[1].said)}")
        outcome = judge(Outcome(number, note=way), jobs, expected)
        if outcome.wrong:
            return outcome
        return go_on(outcome, next(each for each in jobs if each.result is not None), settings, expected)


def start(folder: Path, number: int, settings: Settings, patience: float) -> Child:
    """One of the jobs, with files of its own about it, in the directory that they have in common."""
    own = prepare(folder / f"job-{number}")

    def body() -> None:
        lock.WAITING = patience
        train(own, settings, run_dir=folder / RUN)

    return Child(own, settings, body=body)


def judge(outcome: Outcome, jobs: list[Child], expected: dict[str, str]) -> Outcome:
    """At least one has come to its end as if it had been alone; whoever has not was killed, or was told about
    the other.
    """
    ended = [each for each in jobs if each.result is not None]
    if not ended:
        outcome.wrong = (
            f"neither came to its end; they said: {last_words(jobs[0].said)} / {last_words(jobs[1].said)}"
        )
        return outcome
    for each, other in ((jobs[0], jobs[1]), (jobs[1], jobs[0])):
        if each.result is None and each.code != -signal.SIGKILL and not is_refusal(each, other):
            outcome.wrong = (
                f"it ended with exit code {each.code} and did not name the other job; "
                f"it said: {last_words(each.said)}"
            )
    # the second of two that came to their end found a run that was over, and has counted and measured nothing
    differs = () if len(ended) == 1 else ("counters", "metrics")
    counted = {name: each for name, each in expected.items() if name not in differs}
    for each in ended:
        if not outcome.wrong:
            compare(outcome, each, counted)
    return outcome


def is_refusal(child: Child, other: Child) -> bool:
    """Whether a job has ended by an error that names the other one."""
    return child.code == 1 and "is in use: process" in child.said and f"process {other.pid} on " in child.said
