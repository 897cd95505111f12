"""What measuring the time costs a training step: by itself, and in alternating slices of one and the same
run.

Two runs differ by more than the clocks cost, whatever the machine does meanwhile; two slices of one run do
less so. A busy machine disturbs the slices too; what fetching and sampling take by themselves, at best, can
be told on any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import hookline.training.fit
from hookline import Module, Trainer
from hookline.engine.events import EVENTS
from hookline.engine.hook_list import HookList
from hookline.engine.plan import Plan
from hookline.run.state import State
from hookline.run.timer import SAMPLE_EVERY, RunTimer
from hookline.training.data_pass import Fetcher

BATCHES, TRIES = 500, 400
STEPS, SLICE = 80_000, 4 * SAMPLE_EVERY  # a slice has four sampled steps
AIM = 1.0
"""Microseconds per batch."""
EVENTS_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_train_batch_end",
)
KINDS = ("with", "without")
TIMES: dict[str, list[float]] = {kind: [] for kind in KINDS}


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


class Alternating(Fetcher):
    """Fetches slice by slice, one with and one without clocks, events and samples; what lies around them is
    the same.
    """

    __slots__ = ("_began", "_fetched")

    def fetch(self) -> bool:  # type: ignore[override]
        """Fetch the next batch."""
        fetched = self._fetched = getattr(self, "_fetched", -1) + 1
        slices, first = divmod(fetched, SLICE)
        if not first:
            now = time.thread_time_ns()
            if slices:
                TIMES[KINDS[(slices - 1) % 2]].append((now - self._began) / SLICE / 1e3)
            self._began = now
        return super().fetch() if slices % 2 == 0 else self._untimed()

    def _untimed(self) -> bool:
        current = self._run.state.current
        self._index += 1
        for current.batch in self._batches:
            current.batch_idx = self._index
            return True
        return False


def best(measured: Callable[[], object]) -> float:
    """Return the microseconds of the least disturbed of many tries."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter_ns()
        measured()
        times.append(time.perf_counter_ns() - began)
    return min(times) / 1e3


def by_itself() -> tuple[float, float]:
    """Return the microseconds a batch that fetching costs more than a plain loop, and those of sampling one
    step in EVERY.
    """
    plan, data = Plan(EVENTS), [None] * BATCHES
    s = State(hooks=HookList(plan, EVENTS))
    timer = RunTimer(plan, s, torch.device("cpu"))
    timer.due = BATCHES
    run: Any = SimpleNamespace(plan=plan, state=s)
    s.setup.timer = timer

    def sample() -> None:
        timer.sampler.begin(is_manual=False, recomputes=False)
        for event in EVENTS_OF_A_STEP:
            getattr(plan, event)(s)
        timer.sampler.end()

    def plain() -> None:
        for event in EVENTS_OF_A_STEP:
            getattr(plan, event)(s)

    def fetch() -> None:
        fetcher = Fetcher(run, iter(data), 0, timer)
        while fetcher.fetch():
            pass

    fetching = best(fetch)
    current = s.current
    without = best(lambda: [None for current.batch_idx, current.batch in enumerate(data)])
    return (fetching - without) / BATCHES, (best(sample) - best(plain)) / SAMPLE_EVERY


def main() -> None:
    """Measure, and print the difference at several quantiles: low ones are disturbed least."""
    torch.set_num_threads(1)
    fetching, sampling = by_itself()
    print(
        f"By itself: fetching {fetching:.2f} µs a batch, one sampled step in {SAMPLE_EVERY} {sampling:.2f} "
        f"µs a step; aim: at most {AIM:.0f} µs together.\n"
        f"In a run, in slices of {SLICE} batches:"
    )
    hookline.training.fit.Fetcher = Alternating  # type: ignore[misc]
    batches = [(torch.randn(8, 32), torch.randn(8, 2))] * STEPS
    Trainer(max_epochs=1, enable_progress_bar=False, logger=False).fit(Small(), batches)
    print("quantile   with, µs   without, µs   difference, µs")
    for quantile in (0.1, 0.25, 0.5):
        measured, without = (
            sorted(TIMES[kind])[int(len(TIMES[kind]) * quantile)] for kind in ("with", "without")
        )
        print(f"{quantile:8.2f} {measured:10.2f} {without:13.2f} {measured - without:16.2f}")


if __name__ == "__main__":
    main()
