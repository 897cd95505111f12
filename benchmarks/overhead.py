"""What a trainer adds to a training step: bare loops, Hookline, Lightning and others side by side. See
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import compiled
import drivers
import peers
import torch
from drivers import Case, Training
from first_fit import SCRIPTS, Process
from lockstep import Runner
from sections import SECTIONS, Section
from startup import startup

import hookline

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench-out"
SHORTEST = 2
"""Rounds that quartiles need."""


class Turns(Protocol):
    """What alternates: a `lockstep.Runner`, or fresh processes."""

    nanoseconds: list[float]

    def turn(self) -> float:
        """Return the nanoseconds per step of one slice."""

    def finish(self) -> None:
        """End it."""


@dataclass
class Series:
    """What was measured of one contender, a number for each round."""

    nanoseconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """To the slices of the bare loop before and after."""


def alternate(
    basis: Turns, runners: list[Turns], rounds: int, untimed: int
) -> tuple[list[float], list[Series]]:
    """Let all take turns in random order, with a slice of the bare loop between any two. Return its numbers
    and theirs.

    The first `untimed` rounds do not count.
    """
    found, order = [Series() for _ in runners], random.Random()
    gc.collect()
    gc.freeze()  # the collector skips what exists by now, whichever training is measured
    before = basis.turn()
    for _ in range(untimed + rounds):
        for index in order.sample(range(len(runners)), len(runners)):
            mine, after = runners[index].turn(), basis.turn()
            found[index].nanoseconds.append(mine)
            found[index].ratios.append(mine / ((before + after) / 2))
            before = after
    for runner in (basis, *runners):
        runner.finish()
    gc.unfreeze()
    counted = [Series(each.nanoseconds[untimed:], each.ratios[untimed:]) for each in found]
    return basis.nanoseconds[untimed * len(runners) + 1 :], counted


def drivers_of(stage: str) -> dict[str, Any]:
    """Return what runs a stage, by name."""
    return {
        "training": drivers.TRAINING | peers.TRAINING,
        "validation": drivers.VALIDATION | peers.VALIDATION,
        "compiled": compiled.COMPILED,
        "startup": SCRIPTS,
    }[stage]


def contenders(section: Section, wanted: list[str]) -> list[tuple[Case, str]]:
    """Return the cases of a section, each with a driver that runs it."""
    named = [(case, driver) for case in (*section.controls, *section.cases) for driver in case.drivers]
    more = [(section.cases[0], driver) for driver in peers.OTHERS] if section.peers else []
    known = drivers_of(section.stage)
    return [(case, driver) for case, driver in named + more if driver in wanted and driver in known]


def start(section: Section, case: Case, driver: str, turns: int) -> Turns:
    """Start a training that waits for its first turn."""
    run = drivers_of(section.stage)[driver]
    if section.stage == "startup":
        return Process(run)
    data = section.source(Runner.steps(section.untimed, section.timed, turns))
    return Runner(
        lambda own: run(Training(section.model, data, case, own.step)),
        section.untimed,
        section.timed,
        turns,
        section.clock,
    )


def measure(section: Section, rounds: int, wanted: list[str], until: float) -> list[dict[str, Any]]:
    """Measure all cases of a section in several set-ups; leave out set-ups that would begin after `until`."""
    measured = contenders(section, wanted)
    bare: list[float] = []
    found = [Series() for _ in measured]
    share = max(round(rounds * section.rounds / section.setups), 1)
    turns = section.untimed_rounds + share
    for _ in range(section.setups):
        if len(found[0].ratios) >= SHORTEST and time.monotonic() > until:
            break
        basis = start(section, Case(), "bare", turns * len(measured) + 1)
        runners = [start(section, case, driver, turns) for case, driver in measured]
        more, series = alternate(basis, runners, share, section.untimed_rounds)
        bare += more
        for mine, its in zip(found, series, strict=True):
            mine.nanoseconds += its.nanoseconds
            mine.ratios += its.ratios
    by_hand = next(
        (series.ratios for (_, driver), series in zip(measured, found, strict=True) if driver == "by hand"),
        [],
    )
    rows = [
        {
            "section": section.name,
            "row": section.title,
            "driver": "bare",
            "microseconds": statistics.median(bare) / 1e3,
        }
    ]
    for (case, driver), series in zip(measured, found, strict=True):
        rows.append(
            {
                "section": section.name,
                "row": section.row(case),
                "case": case.name,
                "driver": driver,
                "aim": case.aim,
                "microseconds": statistics.median(series.nanoseconds) / 1e3,
                **quartiles(series.ratios),
                "minimum": min(series.nanoseconds) / min(bare),
                "stage": section.stage,
                "by_hand": quartiles([mine / its for mine, its in zip(series.ratios, by_hand, strict=True)])
                if by_hand
                else None,
                "ratios": [round(each, 4) for each in series.ratios],
            }
        )
    return rows


def quartiles(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(
        values, n=4, method="inclusive"
    )  # few rounds: nothing beyond what was seen
    return {"low": low, "ratio": middle, "high": high}


def about(rounds: int, others: list[str] | None = None) -> dict[str, Any]:
    """Return where and with what it was measured."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        processor = f"{names[0]}, {len(names)} cores" if names else processor
    return {
        "rounds": rounds,
        "processor": processor,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hookline": hookline.__version__,
        **{name: importlib.metadata.version(peers.PACKAGES.get(name, name)) for name in others or ()},
    }


def compare(arguments: argparse.Namespace) -> None:
    """Measure, show, write."""
    from report import Report

    warnings.filterwarnings("ignore")  # of other trainers, about this not being a real training
    began, rounds = time.monotonic(), arguments.rounds or (8 if arguments.quick else 60)
    others = [] if arguments.hookline_only else peers.installed(peers.OTHERS if arguments.peers else ())
    wanted = ["bare", "by hand", "hookline", *others]
    results: dict[str, Any] = {"about": about(rounds, others), "rows": []}
    chosen = (
        [each for each in SECTIONS if each.name in arguments.sections]
        if arguments.sections
        else list(SECTIONS)
    )
    chosen = [each for each in chosen if not left_out(each, arguments.quick and not arguments.sections)]
    weights = [each.weight * len(contenders(each, wanted)) for each in chosen]
    seconds = 60 * (arguments.minutes or (1 if arguments.quick else 5.5))
    for index, section in enumerate(chosen):
        now = time.monotonic()
        # a slow machine gets fewer set-ups, not a longer run
        share = max(began + seconds - now, 0) * weights[index] / sum(weights[index:])
        results["rows"] += measure(section, rounds, wanted, now + 0.9 * share)
        print(f"[{time.monotonic() - began:4.0f} s] {section.title}: measured", file=sys.stderr, flush=True)
    report = Report(results)
    out: Path = arguments.out
    out.mkdir(exist_ok=True)
    (out / "overhead.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "overhead.md").write_text(
        f"# Time per training step, relative to a bare loop\n\n{report.markdown()}"
    )
    report.picture(out / "overhead.png")
    report.show()
    print(f"Written to {out.name}: overhead.md, overhead.json, overhead.png")
    if arguments.page:
        report.write_page(ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images" / "benchmarks.png")


def left_out(section: Section, quick: bool) -> bool:
    """Return whether a section cannot or need not be measured, and print why."""
    if section.stage != "compiled":
        return False
    reason = "compiling takes too long for --quick." if quick else compiled.missing()
    if reason:
        print(f"{section.title}: left out, because {reason}", flush=True)
    return bool(reason)


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a first impression")
    parser.add_argument("--rounds", type=int, help="how often every case is measured (60; with --quick 8)")
    parser.add_argument(
        "--sections", nargs="+", choices=[each.name for each in SECTIONS], help="measure these only"
    )
    parser.add_argument(
        "--minutes", type=float, help="a slow machine measures less after this time (5.5; with --quick 1)"
    )
    parser.add_argument("--hookline-only", action="store_true", help="leave Lightning out")
    parser.add_argument(
        "--peers", action="store_true", help="add Fabric, Accelerate, Ignite and transformers where installed"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the folder for the results (bench-out)")
    parser.add_argument("--page", action="store_true", help="also put the results into docs/benchmarks.md")
    parser.add_argument("--leak", action="store_true", help="instead: does memory grow over many steps?")
    parser.add_argument("--steps", type=int, default=100_000, help="how many steps --leak takes (100000)")
    parser.add_argument(
        "--calls", action="store_true", help="instead: what accounting and a trace add to one hook call"
    )
    parser.add_argument(
        "--import", dest="imports", action="store_true", help="instead: what `import hookline` costs"
    )
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < SHORTEST:
        parser.error(f"--rounds must be at least {SHORTEST}")
    if arguments.steps < 20:
        parser.error("--steps must be at least 20")
    torch.set_num_threads(1)
    if arguments.leak:
        from leak import leak

        return leak(arguments.steps)
    if arguments.calls:
        from calls import calls

        return calls(arguments.rounds or (20 if arguments.quick else 100))
    if arguments.imports:
        return startup(5 if arguments.quick else 15)
    compare(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
