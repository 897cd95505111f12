"""`python3 dev.py faults`: faults of every kind happen to real trainings, and a table says what became of
them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import torch
from clocks import Clocks
from crashes import Crashes
from damage import Damage
from diskfull import DiskFull
from exceptions import Exceptions
from extras import Extras
from kills import CompiledKills, Kills
from manifests import Manifests
from outliving import Outliving
from ranks import Ranks
from restarts import Restarts
from signals import Signals
from trials import Kind, Outcome, References, run_trials, table, warm_up
from twojobs import TwoJobs

USUAL = 10.0
"""Minutes for everything on two cores: 200 kills, every crash point, 500 damaged checkpoints."""
KINDS: dict[str, type[Kind]] = {
    "kills": Kills,
    "compiled": CompiledKills,
    "crashes": Crashes,
    "damage": Damage,
    "disk-full": DiskFull,
    "signals": Signals,
    "exceptions": Exceptions,
    "ranks": Ranks,
    "restarts": Restarts,
    "extras": Extras,
    "manifests": Manifests,
    "two-jobs": TwoJobs,
    "clock": Clocks,
    "workers": Outliving,
}


def main() -> int:
    """Run the kinds that were asked for; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=USUAL, help=f"about how long; fewer mean fewer trials ({USUAL:g})"
    )
    parser.add_argument("--kind", default=",".join(KINDS), help=f"one or several of {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0, help="other random choices")
    parser.add_argument(
        "--trials", type=int, help="so many of each kind, instead of as many as the minutes allow"
    )
    parser.add_argument("--trial", type=int, help="only this trial of the kind, to look at a failure again")
    parser.add_argument("--json", type=Path, help="write the outcomes of all trials to this file too")
    chosen = parser.parse_args()
    names = chosen.kind.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"there is no kind {unknown[0]!r}; there are: {', '.join(KINDS)}")
    warm_up()
    rows: list[tuple[str, list[Outcome], float]] = []
    with tempfile.TemporaryDirectory(prefix="hookline-faults-") as folder:
        for name in names:
            kind = KINDS[name](chosen.seed, References(Path(folder)))
            trials = (
                kind.trials(chosen.minutes / USUAL) if chosen.trials is None else list(range(chosen.trials))
            )
            if chosen.trial is not None:
                trials = [chosen.trial]
            outcomes, seconds = run_trials(kind, trials)
            rows.append((name, outcomes, seconds))
            report(name, outcomes, chosen.seed)
    print(f"\ntorch {torch.__version__}, Python {sys.version.split()[0]}, {sys.platform}\n{table(rows)}")
    if chosen.json:
        written = {name: [dataclasses.asdict(each) for each in outcomes] for name, outcomes, _ in rows}
        chosen.json.write_text(json.dumps(written))
    return int(any(each.wrong for _, outcomes, _ in rows for each in outcomes))


def report(name: str, outcomes: list[Outcome], seed: int) -> None:
    """Print where the faults occurred, and each failure with the command that repeats it."""
    where = collections.Counter(each.note for each in outcomes if each.note)
    print(
        f"{name}: "
        + (", ".join(f"{number} {what}" for what, number in where.most_common()) or f"{len(outcomes)} trials")
    )
    for outcome in outcomes:
        if outcome.wrong:
            print(
                f"  FAILED: {outcome.wrong}\n    python3 dev.py faults --kind {name} --seed {seed} --trial "
                f"{outcome.number}"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
