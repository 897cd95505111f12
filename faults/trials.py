"""What a trial is and what became of it, the references that runs are compared with, and the table."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import json
import logging
import multiprocessing
import random
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from processes import Child, lost_steps
from training import WITHOUT_WORKERS, Settings, prepare, train

PRECISIONS, ACCUMULATIONS, SAVES = ("32", "bf16-mixed"), (1, 2, 5), ("sync", "async")


@dataclasses.dataclass
class Outcome:
    """What became of a trial, in numbers of faults. `wrong` says in words what should not have happened."""

    number: int
    resumed: int = 0
    exact: int = 0
    lost: int = 0
    silent: int = 0
    wrong: str = ""
    note: str = ""
    """Something to count in the summary, such as the phase that a kill fell into."""
    counts: int = 1
    """How many faults were tried in it."""


class Kind(abc.ABC):
    """One kind of fault. A trial's number decides everything that is random about it, so that it can be done
    again.
    """

    def __init__(self, seed: int, references: References) -> None:
        self.seed, self.references = seed, references

    @abc.abstractmethod
    def trials(self, share: float) -> list[int]:
        """Return the numbers of the trials; `share` is the part of the usual number that is requested."""

    @abc.abstractmethod
    def run_trial(self, number: int, folder: Path) -> Outcome:
        """Run one trial in an empty folder."""


def trial_numbers(usual: int, share: float) -> list[int]:
    """Return the numbers of this share of the usual trials, at least one."""
    return list(range(max(1, round(usual * share))))


def draw(rng: random.Random) -> Settings:
    """Return random settings for a trial."""
    settings = Settings(
        rng.choice(PRECISIONS),
        rng.choice(ACCUMULATIONS),
        rng.choice((0.5, 1.0)),
        workers=rng.choice((0, 0, 1, 2)),
        save=rng.choice(SAVES),
    )
    return settings if settings.workers else dataclasses.replace(settings, loader=rng.choice(WITHOUT_WORKERS))


class References:
    """Digests of runs that nothing happened to, one for each choice of numbers; made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def digest(self, settings: Settings) -> dict[str, str]:
        """Return the digest of the uninterrupted run."""
        return self._made(settings)[0]

    def seconds(self, settings: Settings) -> float:
        """Return how long it took."""
        return self._made(settings)[1]

    def _made(self, settings: Settings) -> tuple[dict[str, str], float]:
        numbers = settings.numbers
        parts = (
            numbers.precision,
            numbers.accumulate,
            numbers.validate_every,
            numbers.workers,
            numbers.loader,
            numbers.backend or "eager",
        )
        path = self.folder / f"{'-'.join(map(str, parts))}.json"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as aside:
                started = time.monotonic()
                child = Child(Path(aside), numbers)
                code = child.wait()
                if code != 0 or child.result is None:
                    raise RuntimeError(
                        f"the run that nothing happens to ended with exit code {code}:\n{child.said}"
                    )
                done = Path(aside) / "done"
                done.write_text(json.dumps([child.result["digest"], time.monotonic() - started]))
                done.rename(path)
        found: tuple[dict[str, str], float] = json.loads(path.read_text())
        return found


def resume_and_compare(
    outcome: Outcome, before: Child, settings: Settings, expected: dict[str, str], fresh: bool = False
) -> Outcome:
    """Start the run again after what has happened to it, and judge its end. One that was over already must
    train nothing.
    """
    if before.result is not None:
        compare(outcome, before, expected)
        if outcome.wrong:
            return outcome
    if settings.workers:  # another number of them after a resume makes no difference
        settings = dataclasses.replace(settings, workers=3 - settings.workers)
    last = Child(before.folder, settings, fresh=fresh)
    last.wait()
    return compare(outcome, last, expected)


def compare(outcome: Outcome, child: Child, expected: dict[str, str]) -> Outcome:
    """Judge the run that went to its end."""
    result = child.result
    if result is None:
        outcome.wrong = f"it never ended (exit code {child.code}); it said: {last_lines(child.said)}"
        return outcome
    outcome.resumed = 1
    differing = [name for name, value in expected.items() if result["digest"].get(name) != value]
    outcome.exact = int(not differing)
    if differing:
        outcome.silent, outcome.wrong = 1, f"not the same at the end: {', '.join(differing)}"
    lost = lost_steps(child.folder)
    if lost:
        outcome.lost, outcome.wrong = 1, f"{outcome.wrong}; {lost}".removeprefix("; ")
    return outcome


def last_lines(said: str) -> str:
    """Return the end of what a process printed."""
    return " | ".join(line for line in said.strip().splitlines()[-4:] if line.strip()) or "nothing"


def warm_up() -> None:
    """Train once in this process, so that torch has loaded everything before processes are forked."""
    torch.set_num_threads(1)  # a forked process cannot take a pool of threads with it
    silence = logging.NullHandler()
    logging.getLogger("hookline").addHandler(silence)
    with tempfile.TemporaryDirectory(prefix="hookline-faults-") as folder:
        train(prepare(Path(folder)), Settings())
    logging.getLogger("hookline").removeHandler(silence)


def run_trials(kind: Kind, trials: list[int]) -> tuple[list[Outcome], float]:
    """Run all trials of a kind, two at a time, in processes forked from this one; return the outcomes and the
    seconds.
    """
    started = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as lanes:
        outcomes = list(lanes.map(_guarded, [kind] * len(trials), trials))
    return outcomes, time.monotonic() - started


def _guarded(kind: Kind, number: int) -> Outcome:
    """Run a trial; an error of the trial itself is a failed outcome, and the other trials continue."""
    with tempfile.TemporaryDirectory(prefix="hookline-faults-") as folder:
        try:
            return kind.run_trial(number, Path(folder))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Outcome(
                number, wrong=f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            )


def table(rows: Iterable[tuple[str, list[Outcome], float]]) -> str:
    """Return a table: kind, trials, resumed, bit-exact, lost, silent, failed, seconds."""
    lines = [
        f"{'kind':<14}{'trials':>8}{'resumed':>9}{'bit-exact':>11}{'lost':>6}{'silent':>8}{'failed':>8}{'seconds':>9}"
    ]
    for name, outcomes, seconds in rows:
        resumed, exact, lost, silent, trials = (
            sum(getattr(each, column) for each in outcomes)
            for column in ("resumed", "exact", "lost", "silent", "counts")
        )
        failed = sum(bool(each.wrong) for each in outcomes)
        lines.append(
            f"{name:<14}{trials:>8}{resumed:>9}{exact:>11}{lost:>6}{silent:>8}{failed:>8}{seconds:>9.1f}"
        )
    return "\n".join(lines)
