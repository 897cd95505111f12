"""What measuring the time costs a training step: measured and not measured in alternating slices of one and the same run.

Two runs differ by more than the clocks cost, whatever the machine does meanwhile; two slices of one run hardly do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import hookline.loops.fit
from hookline import Module, Trainer
from hookline.loops.fetching import fetched
from hookline.loops.timer import EVERY

STEPS, SLICE = 60_000, EVERY  # a slice has one sampled step
AIM = 1.0
"""Microseconds per batch."""
TIMES: dict[str, list[float]] = {"with": [], "without": []}


class Small(Module):
    """Nearly everything in its step is overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the loss."""
        return mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the simplest there is."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def untimed(run: Any, batches: list[Any], first: int) -> Iterator[int]:
    """Fetch without clocks, events and samples."""
    s = run.state
    for index, s.batch in enumerate(batches, first):
        yield index


def alternating(run: Any, batches: Iterator[Any], first: int, timer: Any) -> Iterator[int]:
    """Fetch slice by slice, one with and one without; what lies around them is the same."""
    for number in itertools.count():
        kind = ("with", "without")[number % 2]
        part = list(itertools.islice(batches, SLICE))
        if not part:
            return
        numbers = fetched(run, iter(part), first, timer) if kind == "with" else untimed(run, part, first)
        began = time.thread_time_ns()
        yield from numbers
        TIMES[kind].append((time.thread_time_ns() - began) / len(part) / 1e3)
        first += len(part)


def main() -> None:
    """Measure, and print the difference at several quantiles: low ones are disturbed least."""
    torch.set_num_threads(1)
    hookline.loops.fit.fetched = alternating  # type: ignore[assignment]
    batches = [(torch.randn(8, 32), torch.randn(8, 2))] * STEPS
    Trainer(max_epochs=1, enable_progress_bar=False, logger=False).fit(Small(), batches)
    print(f"quantile   with, µs   without, µs   difference, µs   (a batch, in slices of {SLICE}; aim: at most {AIM:.0f})")
    for quantile in (0.1, 0.25, 0.5):
        measured, without = (sorted(TIMES[kind])[int(len(TIMES[kind]) * quantile)] for kind in ("with", "without"))
        print(f"{quantile:8.2f} {measured:10.2f} {without:13.2f} {measured - without:16.2f}")


if __name__ == "__main__":
    main()
