"""Trainings that alternate: a slice of steps of one, then a slice of the next. Other load on the machine
affects all alike.

Each training runs in its own thread, and one thread runs at a time. A training calls `Runner.step` once in
each of its steps, from the model's own step. At the end of a slice that call waits for the next turn. So a
training reads its own list or DataLoader, and nothing is put between the trainer and its data. The first
steps of a slice are not timed, so that caches are warm again.

The usual clock is the CPU time of the thread: what is measured computes in one thread and waits for nothing,
and other programs do not count. Where a training waits for worker processes, the clock is the wall's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import torch

Clock = Callable[[], int]


class Runner:
    """One training, which advances by a slice of steps at a time."""

    def __init__(
        self,
        train: Callable[[Runner], object],
        untimed: int,
        timed: int,
        turns: int,
        clock: Clock = time.thread_time_ns,
    ) -> None:
        """`train` runs a training that calls `step` in each of at least `Runner.steps(...)` steps."""
        self.nanoseconds: list[float] = []
        """Per step, one number for each turn."""
        self._untimed, self._timed, self._turns, self._clock = untimed, timed, turns, clock
        self._left: float = 1
        self._slices = self._alternate()
        self._go, self._waiting = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()
        self._wait()

    @staticmethod
    def steps(untimed: int, timed: int, turns: int) -> int:
        """Return how many steps these turns take: the last turn ends in the step after it."""
        return (untimed + timed) * turns + 1

    def turn(self) -> float:
        """Let it train one slice; return the nanoseconds per step."""
        self._go.release()
        self._wait()
        return self.nanoseconds[-1]

    def finish(self) -> None:
        """Let it end, after its last turn."""
        self._go.release()
        self._thread.join()
        if self._error is not None:
            raise self._error

    # ---- in the thread of the training ---------------------------------------------------------------------

    def step(self) -> None:
        """Count a step, and wait for the next turn if it is the last one of a slice."""
        self._left -= 1
        if not self._left:
            next(self._slices)

    def _alternate(self) -> Iterator[None]:
        for _ in range(self._turns):
            self._pause()
            if self._untimed:
                self._left = self._untimed
                yield
            began = self._clock()
            self._left = self._timed
            yield
            self.nanoseconds.append((self._clock() - began) / self._timed)
        self._pause()
        self._left = math.inf
        yield

    def _pause(self) -> None:
        self._waiting.release()
        self._go.acquire()

    def _run(self, train: Callable[[Runner], object]) -> None:
        torch.set_num_threads(1)
        try:
            train(self)
            if len(self.nanoseconds) < self._turns:
                raise RuntimeError(
                    f"Too few batches: the training ended after {len(self.nanoseconds)} of {self._turns} "
                    f"turns."
                )
        except BaseException as error:
            self._error = error
        finally:
            self._waiting.release()

    def _wait(self) -> None:
        self._waiting.acquire()
        if self._error is not None:
            raise self._error
