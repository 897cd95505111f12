"""What built-in hooks and a logged metric add to a training step of Hookline. See README.md beside this."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from drivers import Logging, Paced
from lockstep import Runner
from overhead import OUT, about
from rich.console import Console
from rich.table import Table
from work import WORKS, Work

from hookline import JSONLines, Module, Trainer
from hookline.hooks import EarlyStopping, GradientMonitor, LRMonitor, ModelCheckpoint, ProgressBar, Throughput

NEVER = 10**9
FRESH = 5  # times everything is set up anew: two equal runs came out 2 % apart, round after round


@dataclass(frozen=True)
class Case:
    """One thing that is added to a run."""

    name: str
    hooks: Callable[[], list[Any]] = list
    logs: bool = False
    """Whether the module logs a metric in every step."""
    percent: float | None = None
    """What it should cost at most, in percent of a step."""
    microseconds: float | None = None
    """The same in microseconds."""


@dataclass(frozen=True)
class Group:
    """Cases that are compared with the same run without them."""

    title: str
    work: Work
    row_every: int
    """Steps between two rows of metrics, with and without the case."""
    rounds: int
    cases: tuple[Case, ...]
    turns: int = 1
    """Turns that are added up to one measurement: short turns and a long period of reports go together that
    way.
    """


@dataclass(frozen=True)
class Found:
    """What came out for a case, a number for each round."""

    case: Case
    ratios: list[float]
    extra: list[float]
    """Microseconds per step more than without."""

    def aim(self, control: Found) -> str:
        """Return the target, and whether the median reached it."""
        if self.case.percent is not None:
            return (
                f"at most {self.case.percent:g} %: "
                f"{_reached(self.ratios, control.ratios, 1, 1 + self.case.percent / 100)}"
            )
        if self.case.microseconds is not None:
            return (
                f"at most {self.case.microseconds:g} µs: "
                f"{_reached(self.extra, control.extra, 0, self.case.microseconds)}"
            )
        return ""


def _reached(values: list[float], control: list[float], nothing: float, most: float) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    error = 2 * 0.93 * (high - low) / len(values) ** 0.5  # twice the standard error that a median has
    chance = max(error, abs(statistics.median(control) - nothing))
    return "yes" if middle + chance <= most else "no" if middle - chance > most else "too close to tell"


SAME = Case("the same again")


def _early() -> Any:
    return EarlyStopping("train/loss", patience=NEVER)


def _checkpoint() -> Any:
    return ModelCheckpoint(every_n_train_steps=NEVER, save_top_k=0)


def _rates() -> Any:
    return LRMonitor(frequency="step")


FOUR = Case("these four together", lambda: [_early(), _checkpoint(), _rates(), Throughput()])

# Where hooks report now and then, a measurement is as long as that period, so that each gets its share of
# reports.
LINEAR, SMALL_GPT = WORKS[0], replace(WORKS[2], untimed=0, timed=20)

GROUPS = (
    Group(
        "no rows written",
        LINEAR,
        NEVER,
        500,
        (
            SAME,
            Case("one metric logged in every step", logs=True, microseconds=3),
            Case(
                "ProgressBar off a terminal, between two lines",
                lambda: [ProgressBar(plain_every=NEVER)],
                microseconds=1,
            ),
        ),
    ),
    Group(
        "a row every 50 steps",
        replace(LINEAR, untimed=50, timed=50),
        50,
        150,
        (
            SAME,
            Case("EarlyStopping", lambda: [_early()]),
            Case("ModelCheckpoint(every_n_train_steps=10**9)", lambda: [_checkpoint()]),
            Case("LRMonitor(frequency='step')", lambda: [_rates()]),
            Case("Throughput(every=50)", lambda: [Throughput()]),
            FOUR,
        ),
    ),
    Group(
        "a row every 50 steps",
        SMALL_GPT,
        50,
        30,
        (
            SAME,
            Case(
                "GradientMonitor(log_frequency=100)", lambda: [GradientMonitor(log_frequency=100)], percent=2
            ),
            replace(FOUR, name="EarlyStopping, ModelCheckpoint, LRMonitor, Throughput"),
        ),
        turns=5,
    ),
)


# ---- measuring ---------------------------------------------------------------------------------------------


def train(case: Case, group: Group, batches: list[Any], runner: Runner) -> None:
    """Train one epoch with Hookline and the case's hooks."""
    parts = (Logging, Paced, group.work.model, Module) if case.logs else (Paced, group.work.model, Module)
    module: Any = type(group.work.model.__name__, parts, {})()
    module.pace = runner.step
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            hooks=case.hooks(),
            logger=JSONLines(),
            log_every_n_steps=group.row_every,
            max_epochs=1,
            device="cpu",
            enable_progress_bar=False,
            run_dir=folder,
        )
        trainer.fit(module, batches)


def measure(group: Group, rounds: int, tell: Callable[[int], None]) -> tuple[float, list[Found]]:
    """Return the microseconds of a step without any case, and what each case adds; a slice without hooks runs
    between any two.
    """
    work, turns, cases = group.work, (rounds + 1) * group.turns, group.cases

    def runner(case: Case, turns: int) -> Runner:
        batches = work.batches(Runner.steps(work.untimed, work.timed, turns))
        return Runner(functools.partial(train, case, group, batches), work.untimed, work.timed, turns)

    basis, runners = runner(Case("without"), turns * len(cases) + 1), [runner(case, turns) for case in cases]
    beside: list[list[float]] = [[] for _ in cases]
    gc.collect()
    gc.freeze()  # what exists by now is no work for the collector, whoever is measured
    before = basis.turn()
    for turn in range(turns):
        for index in random.sample(range(len(cases)), len(cases)):
            runners[index].turn()
            after = basis.turn()
            beside[index].append((before + after) / 2)
            before = after
        tell(turn // group.turns)
    numbers = [each.nanoseconds for each in runners]
    step = statistics.median(basis.nanoseconds) / 1000
    for runner in (basis, *runners):
        runner.finish()
    gc.unfreeze()
    found = []
    for case, ran, without in zip(cases, numbers, beside, strict=True):
        pairs = list(zip(_means(ran, group.turns), _means(without, group.turns), strict=True))[
            1:
        ]  # [0] warms up
        found.append(
            Found(
                case,
                [mine / other for mine, other in pairs],
                [(mine - other) / 1000 for mine, other in pairs],
            )
        )
    return step, found


def pooled(group: Group, rounds: int, tell: Callable[[int], None]) -> tuple[float, list[Found]]:
    """Measure in several parts, each with trainings of its own."""
    share = rounds // FRESH
    parts = [
        measure(group, share, lambda turn, part=part: tell(part * share + turn)) for part in range(FRESH)
    ]
    found = [
        Found(
            each[0].case,
            [ratio for one in each for ratio in one.ratios],
            [extra for one in each for extra in one.extra],
        )
        for each in zip(*(found for _, found in parts), strict=True)
    ]
    return statistics.median(step for step, _ in parts), found


def _means(numbers: list[float], size: int) -> list[float]:
    return [statistics.fmean(numbers[start : start + size]) for start in range(0, len(numbers), size)]


# ---- telling -----------------------------------------------------------------------------------------------


def heading(group: Group, rounds: int, step: float) -> str:
    """Return what the numbers below are relative to."""
    return f"{group.work.title}, {group.title}: {step:.1f} µs per step without, {rounds} rounds"


def cells(each: Found, control: Found) -> tuple[str, ...]:
    """Return one row."""
    (low, middle, high), (least, half, most) = (
        statistics.quantiles(values, n=4) for values in (each.ratios, each.extra)
    )
    ratio, extra = (
        (f"{middle:.3f}", f"{low:.3f} to {high:.3f}"),
        (f"{half:+.2f}", f"{least:+.2f} to {most:+.2f}"),
    )
    return each.case.name, *ratio, *extra, each.aim(control)


def show(console: Console, title: str, found: list[Found]) -> None:
    """Print it."""
    table = Table(title=title, title_justify="left")
    table.add_column("added to the run", no_wrap=True)
    for name, style in (
        ("times", "bold"),
        ("quartiles", "dim"),
        ("µs more", "bold"),
        ("quartiles", "dim"),
        ("aim", ""),
    ):
        table.add_column(name, style=style, justify="left" if name == "aim" else "right", no_wrap=True)
    for case in found:
        table.add_row(*cells(case, found[0]))
    console.print(table)


def markdown(title: str, found: list[Found]) -> list[str]:
    """Return the same for a document."""
    text = [f"## {title}", "", "| added to the run | times | µs per step more | aim |", "|---|---:|---:|---|"]
    for case in found:
        name, ratio, spread, extra, around, aim = cells(case, found[0])
        text.append(f"| {name} | **{ratio}** ({spread}) | **{extra}** ({around}) | {aim} |")
    return [*text, ""]


def _progress(group: Group, rounds: int) -> Callable[[int], None]:
    terminal = sys.stderr  # as it is now: while measuring it leads nowhere

    def tell(turn: int) -> None:
        if terminal.isatty():
            end = "\n" if turn == rounds else ""
            print(
                f"\r{group.work.title}, {group.title}: round {turn} of {rounds}",
                end=end,
                file=terminal,
                flush=True,
            )

    return tell


def main() -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds: a first impression")
    parser.add_argument(
        "--rounds", type=int, help="how often every case is measured (from 30 with the GPT to 500)"
    )
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 2 * FRESH:
        parser.error(f"--rounds must be at least {2 * FRESH}")
    torch.set_num_threads(1)
    console = Console()
    console.width = max(console.width, 152)
    here = about(0)
    text = [
        "# What built-in hooks add to a training step",
        "",
        "Against the same run without them: median, quartiles in brackets. "
        f"{here['processor']}; Python {here['python']}, torch {here['torch']}, Hookline {here['hookline']}; "
        f"one thread.",
        "",
    ]
    for group in GROUPS:
        rounds = max(arguments.rounds or group.rounds // (5 if arguments.quick else 1), 2 * FRESH)
        tell = _progress(group, rounds)
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stderr(nowhere),
        ):  # no terminal for the progress bar
            step, found = pooled(group, rounds, tell)
        title = heading(group, len(found[0].ratios), step)
        show(console, title, found)
        text += markdown(title, found)
    OUT.mkdir(exist_ok=True)
    (OUT / "hooks.md").write_text("\n".join(text))
    print(f"Written to {OUT.name}: hooks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
