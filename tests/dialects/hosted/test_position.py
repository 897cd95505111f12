"""A loop written by hand that is killed with SIGKILL ends as if it had not been."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from dialects.looped import net_and_sgd, train
from tiny import batches
from torch.nn import functional as F

import hookline
from hookline import Hook, Line
from hookline.hooks import ModelCheckpoint

TESTS = Path(__file__).parents[2]


def run(folder: Path, *given: Any) -> tuple[int, dict[str, Any]]:
    """Run the loop in a process of its own; return its code, and what it has come to."""
    folder.mkdir(exist_ok=True)
    code = f"from dialects.killed_loop import main; main({str(folder)!r}, *{given!r})"
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = preloaded.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=120
    )
    assert done.returncode in (0, -9), done.stderr
    end = folder / "end.json"
    return done.returncode, json.loads(end.read_text()) if end.exists() else {}


@pytest.mark.parametrize(
    ("kind", "window", "steps", "kills"),
    [
        # the checkpoint after each validation holds a complete epoch
        ("in order", 1, None, [((2, "start"), (2, 0)), ((2, "batch 3"), (2, 0)), ((1, "validated"), (1, 0))]),
        # every 4 steps: inside an epoch, and after the last batch but before the validation
        ("shuffled", 1, 4, [((1, "batch 2"), (1, 2)), ((2, "batch 1"), (2, 0)), ((1, "validated"), None)]),
        ("own generator", 1, 4, [((1, "batch 4"), (1, 2)), ((3, "start"), (2, 4))]),
        ("seeded by epoch", 1, None, [((1, "batch 4"), (1, 0))]),
        ("seeded by epoch", 1, 4, [((1, "batch 4"), (1, 2))]),
        # 3 updates of 2 batches an epoch
        ("shuffled", 2, 2, [((0, "batch 5"), (0, 4)), ((1, "trained"), (1, 2))]),
    ],
)
def test_a_killed_loop_ends_as_one_that_was_not(
    kind: str, window: int, steps: int | None, kills: list[Any], tmp_path: Path
) -> None:
    code, whole = run(tmp_path / "whole", kind, window, steps, None)
    assert code == 0 and not whole["resumed"] and whole["end"]["schedule"] == 4
    assert whole["end"]["batches"] == 24 and whole["end"]["counts"]["validations"] == 4
    for number, (kill, first) in enumerate(kills):
        folder = tmp_path / str(number)
        code, nothing = run(folder, kind, window, steps, kill)
        assert code == -9 and not nothing
        code, again = run(folder, kind, window, steps, None)
        assert again["resumed"] and again["end"] == whole["end"], kill
        places = [tuple(each[:2]) for each in again["order"]]
        assert first is None or places[0] == first
        assert again["order"] == whole["order"][-len(places) :]
