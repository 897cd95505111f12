"""What torch.compile saves of a training step: eager and compiled, by hand and by Hookline, in alternating
slices of CPU time.

Every contender trains the same model with AdamW on the same list of batches. Slices take turns in one
process, as in `lockstep.py`: a contender waits at the first batch of each epoch until it is its turn.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from work import WORKS, Work

from hookline import Hook, Module, Trainer

logging.getLogger("hookline").setLevel(logging.ERROR)
RATE = 1e-3


class Paced:
    """A training in a thread of its own, of which one slice runs at a time."""

    def __init__(self, train: Callable[[Paced], None], untimed: int, timed: int) -> None:
        self.microseconds: list[float] = []
        """Per step, one number for each slice."""
        self._first, self._last, self._timed = untimed, untimed + timed - 1, timed
        self._start = 0
        self._go, self._waiting = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()
        self._wait()

    def turn(self) -> float:
        """Let it train one slice; microseconds per step."""
        self._go.release()
        self._wait()
        return self.microseconds[-1]

    def finish(self) -> None:
        """Let it end, after its last slice."""
        self._go.release()
        self._thread.join()

    def begin_batch(self, index: int) -> None:
        """Start the clock at the first timed batch; at the beginning of an epoch, wait for the next slice."""
        if index == self._first:
            self._start = time.thread_time_ns()
        elif index == 0:
            self._waiting.release()
            self._go.acquire()

    def end_batch(self, index: int) -> None:
        """Stop the clock after the last timed batch."""
        if index == self._last:
            self.microseconds.append((time.thread_time_ns() - self._start) / self._timed / 1000)

    def _run(self, train: Callable[[Paced], None]) -> None:
        torch.set_num_threads(1)
        try:
            train(self)
        except BaseException as error:
            self._error = error
        finally:
            self._waiting.release()

    def _wait(self) -> None:
        self._waiting.acquire()
        if self._error is not None:
            raise self._error


# ---- the contenders: each trains `epochs` epochs -----------------------------------------------------------


def bare(work: Work, data: list[Any], epochs: int, pace: Paced, **options: Any) -> None:
    """Train without a trainer, as people write it."""
    model = work.model()
    optimizer = AdamW(model.parameters(), lr=RATE, **options)
    for _ in range(epochs):
        for index, batch in enumerate(data):
            pace.begin_batch(index)
            optimizer.zero_grad()
            loss = model.training_step(batch, index)
            loss.backward()
            optimizer.step()
            loss.item()
            pace.end_batch(index)


def by_hand(work: Work, data: list[Any], epochs: int, pace: Paced) -> None:
    """Compile the pieces of `compile="step"` by hand: forward, loss and backward; the optimizer without
    torch's wrappers.
    """
    torch._dynamo.config.trace_autograd_ops = True  # of this thread
    model = work.model()
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=torch.tensor(RATE, dtype=torch.float64))
    unwrapped: Any = AdamW.step
    while hasattr(unwrapped, "__wrapped__"):
        unwrapped = unwrapped.__wrapped__

    def differentiate(batch: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = model.training_step(batch, 0)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    def update() -> None:
        with torch.no_grad():
            unwrapped(optimizer)

    arguments: dict[str, Any] = {"fullgraph": True, "dynamic": False, "options": {"fallback_random": True}}
    first, second = torch.compile(differentiate, **arguments), torch.compile(update, **arguments)
    for _ in range(epochs):
        for index, batch in enumerate(data):
            pace.begin_batch(index)
            loss, gradients = first(batch)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            second()
            loss.item()
            pace.end_batch(index)


class PaceHook(Hook):
    """Gives the pace to a training of Hookline's."""

    def __init__(self, pace: Paced) -> None:
        self.pace = pace

    def on_train_batch_start(self, batch_idx: int) -> None:
        """Wait for the turn."""
        self.pace.begin_batch(batch_idx)

    def on_train_batch_end(self, batch_idx: int) -> None:
        """Stop the clock."""
        self.pace.end_batch(batch_idx)


def hooked(work: Work, data: list[Any], epochs: int, pace: Paced, compile: Any) -> None:
    """Let Hookline train it."""
    model: Any = work.model

    class Trained(model, Module):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=RATE)

    trainer = Trainer(
        max_epochs=epochs,
        compile=compile,
        hooks=[PaceHook(pace)],
        logger=False,
        enable_progress_bar=False,
        checkpoint=False,
        control=False,
        num_sanity_val_steps=0,
        hang_after=None,
    )
    trainer.fit(Trained(), data)


CONTENDERS: dict[str, Callable[..., None]] = {
    "the same loop again": bare,
    "eager loop, AdamW(fused=True)": lambda *given: bare(*given, fused=True),
    "Hookline, eager": lambda *given: hooked(*given, False),
    "Hookline, compile=True": lambda *given: hooked(*given, True),
    "the pieces compiled by hand": by_hand,
    'Hookline, compile="step"': lambda *given: hooked(*given, "step"),
}


def measure(work: Work, rounds: int) -> dict[str, list[float]]:
    """Measure all contenders, taking turns; between any two of them a slice of the bare loop, to compare
    with.
    """
    data, untimed = work.batches(), work.untimed
    timed = len(data) - untimed

    def paced(train: Callable[..., None], turns: int) -> Paced:
        return Paced(lambda pace: train(work, data, turns, pace), untimed, timed)

    basis = paced(bare, (rounds + 1) * len(CONTENDERS) + 1)
    runners = {name: paced(train, rounds + 1) for name, train in CONTENDERS.items()}
    ratios: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    gc.collect()
    gc.freeze()
    before = basis.turn()
    for turn in range(rounds + 1):  # the first compiles
        for name in random.sample(list(runners), len(runners)):
            mine, after = runners[name].turn(), basis.turn()
            if turn:
                ratios[name].append(mine / ((before + after) / 2))
            before = after
    for runner in (basis, *runners.values()):
        runner.finish()
    gc.unfreeze()
    print(f"\n{work.name}: bare eager loop {statistics.median(basis.microseconds):,.0f} µs per step")
    return ratios


def main() -> None:
    """Print the ratios to the bare eager loop: median and quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=[each.name for each in WORKS], action="append")
    chosen = parser.parse_args()
    for work in WORKS:
        if chosen.model and work.name not in chosen.model:
            continue
        ratios = measure(work, chosen.rounds)
        for name, found in ratios.items():
            low, middle, high = statistics.quantiles(found, n=4)
            print(f"  {name:40} {middle:.2f} x  ({low:.2f} to {high:.2f})")
        ours, theirs = ratios['Hookline, compile="step"'], ratios["the pieces compiled by hand"]
        print(
            f'  compile="step" against the pieces by hand: '
            f"{statistics.median(ours) / statistics.median(theirs):.2f} x"
        )


if __name__ == "__main__":
    main()
