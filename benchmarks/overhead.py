"""What a trainer adds to a training step: a bare loop, Hookline and Lightning side by side. See README.md beside this."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from work import WORKS, Work

OUT = Path(__file__).resolve().parent.parent / "bench-out"


def measure(work: Work, rounds: int, wanted: set[str], tell: Callable[[int], None]) -> list[dict[str, Any]]:
    """All cases of one model, taking turns; between any two of them a slice of the bare loop, to compare with."""
    from drivers import CASES, CONTROLS, DRIVERS, bare
    from lockstep import Runner

    contenders = [(case, driver) for case in (*CONTROLS, *CASES) for driver in case.drivers if driver in wanted]
    batches, turns = work.batches(), rounds + 1
    basis = Runner(lambda data: bare(work, data), batches, work.untimed, turns * len(contenders) + 1)
    runners = [
        Runner(lambda data, case=case, driver=driver: DRIVERS[driver](work, data, case), batches, work.untimed, turns)
        for case, driver in contenders
    ]
    ratios: list[list[float]] = [[] for _ in contenders]
    gc.collect()
    gc.freeze()  # what exists by now is no work for the collector, whoever is measured
    before = basis.turn()
    for turn in range(turns):
        for index in random.sample(range(len(contenders)), len(contenders)):
            mine, after = runners[index].turn(), basis.turn()
            ratios[index].append(mine / ((before + after) / 2))
            before = after
        tell(turn)
    for runner in (basis, *runners):
        runner.finish()
    gc.unfreeze()
    rows = [{"model": work.name, "driver": "bare", "case": "", "microseconds": _microseconds(basis.nanoseconds)}]
    for (case, driver), runner, found in zip(contenders, runners, ratios, strict=True):
        low, middle, high = statistics.quantiles(found[1:], n=4)  # the first turn warms up
        rows.append({
            "model": work.name, "driver": driver, "case": case.name, "ratio": middle, "low": low, "high": high,
            "microseconds": _microseconds(runner.nanoseconds), "ratios": [round(each, 4) for each in found[1:]],
        })  # fmt: skip
    return rows


def _microseconds(nanoseconds: list[float]) -> float:
    return statistics.median(nanoseconds[1:]) / 1000


def about(rounds: int) -> dict[str, Any]:
    """Where and with what it was measured."""
    import lightning

    import hookline

    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = f"{names[0]}, {len(names)} cores" if names else processor
    return {
        "rounds": rounds, "processor": processor, "python": platform.python_version(), "torch": torch.__version__,
        "hookline": hookline.__version__, "lightning": lightning.__version__,
    }  # fmt: skip


def compare(arguments: argparse.Namespace) -> None:
    """Measure, show, write."""
    from report import markdown, picture, show

    rounds = arguments.rounds or (10 if arguments.quick else 50)
    wanted = {"bare", "bare by hand", "hookline"} | (set() if arguments.hookline_only else {"lightning"})
    results: dict[str, Any] = {"about": about(rounds), "rows": []}
    for work in WORKS:
        if work.name in arguments.models:
            results["rows"] += measure(work, rounds, wanted, _progress(work.title, rounds))
    OUT.mkdir(exist_ok=True)
    (OUT / "overhead.json").write_text(json.dumps(results, indent=1) + "\n")
    (OUT / "overhead.md").write_text(markdown(results))
    picture(results, OUT / "overhead.png")
    show(results)
    print(f"Written to {OUT.name}: overhead.md, overhead.json, overhead.png")


def _progress(title: str, rounds: int) -> Callable[[int], None]:
    def tell(turn: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{title}: round {turn} of {rounds}", end="\n" if turn == rounds else "", file=sys.stderr, flush=True)

    return tell


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a first impression")
    parser.add_argument("--rounds", type=int, help="how often every case is measured (50; with --quick 10)")
    parser.add_argument("--models", nargs="+", choices=[work.name for work in WORKS], default=[work.name for work in WORKS])
    parser.add_argument("--hookline-only", action="store_true", help="leave Lightning out")
    parser.add_argument("--leak", action="store_true", help="instead: does memory grow over many steps?")
    parser.add_argument("--steps", type=int, default=100_000, help="how many steps --leak takes (100000)")
    parser.add_argument("--calls", action="store_true", help="instead: what accounting and a trace add to one hook call")
    parser.add_argument("--import", dest="imports", action="store_true", help="instead: what `import hookline` costs")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 2:
        parser.error("--rounds must be at least 2")
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
        from startup import startup

        return startup(5 if arguments.quick else 15)
    compare(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
