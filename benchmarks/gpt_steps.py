"""Steps of the GPT of examples/gpt/gpt.py with a clock, and the Python calls of a small run: for benchmarks
of what is recorded about a run.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))
from gpt import ALPHABET, BATCH, CONTEXT, GPT

from hookline import Hook, Trainer

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "checkpoint": False}


class Clock(Hook):
    """Measures a step, from the end of the one before."""

    order = 1000

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.ends: list[float] = []

    def on_step_end(self, step: int) -> None:
        """Store the time."""
        self.ends.append(self.clock())


def gpt_step_times(
    steps: int, hooks: Iterable[Hook] = (), clock: Callable[[], float] = time.perf_counter, **options: Any
) -> list[float]:
    """Return the seconds of each step of a GPT that trains on random texts, except the first."""
    torch.manual_seed(0)
    measured = Clock(clock)
    texts = torch.randint(len(ALPHABET), (BATCH, CONTEXT + 1))
    data = [(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())] * steps
    Trainer(max_steps=steps, hooks=[measured, *hooks], **QUIET, **options).fit(GPT(), data)
    return [end - begin for begin, end in itertools.pairwise(measured.ends)]


def count_calls(steps: int, hooks: Iterable[Hook] = (), **options: Any) -> int:
    """Return the Python calls of a run of a small model."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    trainer = Trainer(max_steps=steps, hooks=[*hooks], **QUIET, **options)
    model, data = torch.nn.Linear(4, 1), [(torch.ones(2, 4), torch.ones(2, 1))] * steps
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sys.setprofile(profile)
    try:
        trainer.fit(model, data, loss=torch.nn.functional.mse_loss, optimizer=sgd)
    finally:
        sys.setprofile(None)
    return count


def calls_per_step(hooks: Callable[[], Iterable[Hook]] = tuple, **options: Any) -> float:
    """Return the calls that one further step makes. The first run loads modules, and does not count."""
    count_calls(20, hooks(), **options)
    return (count_calls(60, hooks(), **options) - count_calls(20, hooks(), **options)) / 40
