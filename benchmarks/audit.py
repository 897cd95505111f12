"""What the audit of hooks costs: calls per step when it is off, and its share of a GPT's step when it is on.

Both kinds of runs train the GPT of examples/gpt/gpt.py with the same hooks, in turns.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))
from gpt import ALPHABET, BATCH, CONTEXT, GPT

from hookline import Hook, Trainer

STEPS, WARM, HOOKS = 60, 10, 4


class Listens(Hook):
    """Listens to two events of every step, as a monitor does."""

    def on_train_batch_start(self, batch: Any) -> None:
        """Do nothing with the batch."""

    def on_step_end(self, module: Any, step: int) -> None:
        """Do nothing with the module."""


class Clock(Hook):
    """Measures a step, from the end of the one before."""

    order = 1000

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_step_end(self, step: int) -> None:
        """Store the time."""
        self.ends.append(time.perf_counter())


def batches(count: int) -> list[Any]:
    """Return random texts: the audit does not read them."""
    texts = torch.randint(len(ALPHABET), (BATCH, CONTEXT + 1))
    return [(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())] * count


def step_times(audit: bool, steps: int) -> list[float]:
    """Return the seconds of each step of a run."""
    torch.manual_seed(0)
    clock = Clock()
    trainer = Trainer(
        max_steps=steps,
        hooks=[clock, *(Listens(f"hook_{number}") for number in range(HOOKS))],
        audit=audit,
        logger=False,
        enable_progress_bar=False,
        checkpoint=False,
    )
    trainer.fit(GPT(), batches(steps))
    return [end - begin for begin, end in itertools.pairwise(clock.ends)]


def calls_per_step(steps: int, **options: Any) -> int:
    """Return the Python calls of a run."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    trainer = Trainer(
        max_steps=steps,
        hooks=[Listens()],
        logger=False,
        enable_progress_bar=False,
        checkpoint=False,
        **options,
    )
    model, data = torch.nn.Linear(4, 1), [(torch.ones(2, 4), torch.ones(2, 1))] * steps
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sys.setprofile(profile)
    try:
        trainer.fit(model, data, loss=torch.nn.functional.mse_loss, optimizer=sgd)
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    """Measure, and print both figures."""
    for options in ({}, {"audit": False}):
        calls_per_step(20, **options)
    plain, off = (
        (calls_per_step(60, **each) - calls_per_step(20, **each)) / 40 for each in ({}, {"audit": False})
    )
    print(f"audit off: {off - plain:+.0f} calls per step")
    pairs = [(step_times(False, STEPS), step_times(True, STEPS)) for _ in range(3)]
    without, audited = (
        statistics.median(each for pair in pairs for each in pair[kind][WARM:]) for kind in (0, 1)
    )
    calls = 2 * HOOKS + 1
    print(
        f"audit on:  a GPT step takes {without * 1e3:.1f} ms without and {audited * 1e3:.1f} ms with the "
        f"audit, +{(audited - without) / without:.0%}; {calls} hook calls in a step, "
        f"{(audited - without) / calls * 1e6:.0f} µs each"
    )


if __name__ == "__main__":
    main()
