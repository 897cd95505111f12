"""The path of a batch, from `Trainer.fit` to on_step_end: taken from a real run, and as CONTRIBUTING.md describes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tiny import Net, batches, quiet

import hookline

SOURCE = Path(hookline.__file__).parent
GUIDE = SOURCE.parent.parent / "CONTRIBUTING.md"
MOST_FILES = 12


class BatchPath:
    """The functions that are called for the third batch: those on the stack when its step begins, and those that it calls."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self._batch = 0
        self._is_inside = False

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and name == "Fetcher.fetch":
            self._batch += 1
        if self._batch != 3:  # the first ones also compose the slots of the plan
            return
        if event == "call" and name == "TrainStep.__call__":
            self._is_inside, stack = True, [frame]
            while stack[-1].f_code.co_qualname != "Trainer.fit" and stack[-1].f_back is not None:
                stack.append(stack[-1].f_back)
            for each in reversed(stack):
                self.note(each)
        elif event == "return" and name == "TrainStep.__call__":
            self._is_inside = False
        elif event == "call" and (self._is_inside or name == "Fetcher.fetch"):
            self.note(frame)

    def note(self, frame: FrameType) -> None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE):  # neither generated code nor the user's own
            self.calls.setdefault(
                (file.relative_to(SOURCE).as_posix(), re.sub(r"\.<.*", "", frame.f_code.co_qualname))
            )


def path_of_a_batch() -> list[tuple[str, str]]:
    path = BatchPath()
    trainer: Any = quiet(logger=False)
    before = sys.getprofile()
    sys.setprofile(path.profile)
    try:
        trainer.fit(Net(), batches(4))
    finally:
        sys.setprofile(before)
    return list(path.calls)


def described() -> dict[str, set[str]]:
    section = GUIDE.read_text().partition("## The path of a batch")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*?) \|", section, re.MULTILINE)
    return {file: set(re.findall(r"`([\w.]+)`", names)) for file, names in rows}


def test_a_batch_passes_through_few_files() -> None:
    files = {file for file, _ in path_of_a_batch()}
    assert {"training/trainer.py", "training/fit.py", "training/step.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)


def test_the_guide_describes_the_path_as_it_is() -> None:
    taken: dict[str, set[str]] = {}
    for file, function in path_of_a_batch():
        taken.setdefault(file, set()).add(function)
    assert described() == taken
