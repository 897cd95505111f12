"""Write the golden files of this version: `python tests/golden/make.py`.

They are plain outputs of the trainings in `training.py`, made once by the version whose name their folder has, and never again: every
later version must read them. When a format changes, run this for the new version and commit its folder beside the older ones.

For each case `expected.json` has the state right after the checkpoint was loaded, and the state at the end of a run that was never
interrupted. The only thing edited are absolute paths in the trace, which would name the machine it was made on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from golden.on_two_ranks import checkpoint  # noqa: E402
from golden.training import ONE_PROCESS, TWO_RANKS, by_hand, differences, facts, logged, plain, resolved  # noqa: E402
from ranks.torchrun import torchrun  # noqa: E402

import hookline  # noqa: E402
from hookline.loggers import read_log  # noqa: E402


def main() -> None:
    """Make everything in a temporary directory, compare, and move it into place."""
    place = HERE / ("v" + ".".join(hookline.__version__.split(".")[:2]))
    if place.exists():
        raise SystemExit(
            f"{place} exists: golden files are made once. A version that writes another format needs a new number."
        )
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        for name, train in {**ONE_PROCESS, "by-hand": by_hand}.items():
            expect(made / name, one_process(name, train, made))
        two_ranks(made)
        expect(made / "log", log(made / "log"))
        shutil.copytree(HERE / "configured", made / "config", ignore=shutil.ignore_patterns("__pycache__"))
        expect(made / "config", configured(made / "config", Path(scratch)))
        os.chdir(home)
        shutil.move(made, place)
    size = sum(each.stat().st_size for each in place.rglob("*") if each.is_file())
    print(f"wrote {place}, {size / 1000:.0f} KB")


def one_process(name: str, train: Any, made: Path) -> dict[str, Any]:
    """Cut a training, resume it, and compare its end with that of a run without a cut."""
    beside = enter(made.parent / "beside" / name)
    whole = facts(train("run")[0])
    enter(made / name)
    with contextlib.suppress(RuntimeError):
        train("run", cut=True)
    shutil.copytree("run", beside / "copy" / "run")
    enter(beside / "copy")
    trainer, _, restored = train("run", resume=checkpoint(Path()))
    found = facts(trainer)
    if name == "by-hand":  # a line of version 0.1 did not save random streams
        del whole["random"], restored["random"]
    require(not differences(whole, found), [name, *differences(whole, found)])
    return {"restored": restored, "final": whole}


def two_ranks(made: Path) -> None:
    """The same on two ranks."""
    beside = enter(made.parent / "beside" / "ranks")
    outcome = torchrun("from golden.on_two_ranks import make\nmake()\n", beside, deadline=300)
    require(outcome.code == 0, outcome.output)
    found: dict[str, dict[int, Any]] = {}
    for case, rank, value in map(json.loads, outcome.lines("CASE ")):
        found.setdefault(case, {})[rank] = value
    for name in TWO_RANKS:
        (made / name).mkdir()
        shutil.copytree(beside / name / "run", made / name / "run")
        expect(
            made / name,
            {at: [found[f"{name} {at}"][rank] for rank in range(2)] for at in ("restored", "final")},
        )


def log(folder: Path) -> dict[str, Any]:
    """A run that failed and was resumed: its log, as it is read, and its trace."""
    enter(folder)
    with contextlib.suppress(RuntimeError):
        logged("run", cut=True)
    trainer, record, _ = logged("run", resume="auto")
    trace = Path("run/trace.json")
    trace.write_text(trace.read_text().replace(f"{HERE.parents[1]}{os.sep}", ""))
    seen = [each for each in record.seen if each[0] != "validated"]
    return {
        "records": plain(list(read_log("run"))),
        "all records": plain(list(read_log("run", superseded=True))),
        "record": json.loads(Path("run/run.json").read_text()),
        "final": facts(trainer),
        "seen": seen,
    }


def configured(folder: Path, scratch: Path) -> dict[str, Any]:
    """The settings of the two configurations, which must be the same."""
    shutil.copytree(folder, scratch / "configured")
    os.chdir(scratch / "configured")
    toml = resolved("run.toml")
    shutil.rmtree("out")
    yaml = resolved("run.yaml")
    require(toml == yaml, differences(toml, yaml))
    return toml


def expect(folder: Path, expected: dict[str, Any]) -> None:
    """Keep what a case is to be compared with."""
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def enter(folder: Path) -> Path:
    """Paths in a checkpoint are relative to where its training was started."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    return folder


def require(holds: bool, why: Any) -> None:
    """Golden files that are wrong are not written."""
    if not holds:
        raise SystemExit(f"Not as it must be: {why}")


if __name__ == "__main__":
    main()
