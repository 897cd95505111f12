"""The walks of CONTRIBUTING.md: the files and functions on the way of a hook, a checkpoint, a metric and a configuration, from real runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tiny import Net, batches, quiet

import hookline
from hookline import Hook, Trainer
from hookline.cli import main

SOURCE = Path(hookline.__file__).parent
GUIDE = SOURCE.parent.parent / "CONTRIBUTING.md"
MOST_FILES = {
    "a hook": 5,
    "a checkpoint, out": 6,
    "a checkpoint, back": 6,
    "a metric": 6,
    "a configuration": 7,
}
"""How many files each walk may have. They go down, never up."""


def called(scenario: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return the functions of the project that a scenario calls, in the order of their first calls."""
    calls: dict[tuple[str, str], None] = {}

    def profile(frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCE)):
            calls.setdefault((Path(file).relative_to(SOURCE).as_posix(), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        scenario()
    finally:
        sys.setprofile(before)
    return list(calls)


def described(walk: str) -> list[tuple[str, str]]:
    """Return the files and functions that the guide lists for a walk, in its order."""
    section = GUIDE.read_text().partition(f"### The walk of {walk}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*?) \|", section, re.MULTILINE)
    return [(file, name) for file, names in rows for name in re.findall(r"`([\w.]+)`", names)]


class Listens(Hook):
    def on_step_end(self, loss: float) -> None: ...


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mine", 1.0)
        return super().training_step(batch, batch_idx)


CONFIGURATION = """
[module]
class_path = "hookline.testing.TinyModule"
[hooks.timer]
class_path = "timer"
"""


def scenarios(folder: Path) -> dict[str, Callable[[], Any]]:
    trainer = quiet(max_epochs=1, run_dir=folder / "first")
    trainer.fit(Net(), batches(3))
    trainer.save_checkpoint(folder / "saved")
    (folder / "run.toml").write_text(CONFIGURATION)
    logging = Trainer(max_epochs=1, run_dir=folder / "third", log_every_n_steps=1, enable_progress_bar=False)
    return {
        "a hook": lambda: quiet(hooks=[Listens()]).fit(Net(), batches(3)),
        "a checkpoint, out": lambda: trainer.save_checkpoint(folder / "again"),
        "a checkpoint, back": lambda: quiet(max_epochs=2, run_dir=folder / "second").fit(
            Net(), batches(3), resume=folder / "saved"
        ),
        "a metric": lambda: logging.fit(Logs(), batches(3)),
        "a configuration": lambda: main(["explain", str(folder / "run.toml")]),
    }


@pytest.mark.parametrize("walk", MOST_FILES)
def test_a_walk_is_as_the_guide_describes_it(walk: str, tmp_path: Path) -> None:
    listed = described(walk)
    assert listed, f"CONTRIBUTING.md has no walk '{walk}'"
    calls = called(scenarios(tmp_path)[walk])
    assert [each for each in listed if each not in calls] == []
    assert sorted(listed, key=calls.index) == listed, "another order"
    assert len({file for file, _ in listed}) <= MOST_FILES[walk]
