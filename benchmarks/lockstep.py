"""Trainings that take turns: a few steps of one, a few of the next, so that what the machine does hits all alike.

Each training runs in a thread of its own, but only one at a time: its data hands out a slice of batches, then waits for
the next turn. A slice begins with some steps that are not timed, so that caches are warm again.

The clock is the CPU time of the thread. Everything measured here computes in one thread and waits for nothing, so on a
quiet machine that is the time on the wall, and on a busy one other programs do not count.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Runner:
    """One training. It is also the data that the training iterates over."""

    def __init__(self, train: Callable[[Runner], None], batches: list[Any], untimed: int, turns: int) -> None:
        self.nanoseconds: list[float] = []
        """Per step, one number for each turn."""
        self.turns = turns
        self._untimed, self._timed = batches[:untimed], batches[untimed:]
        self._go, self._waiting = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()
        self._wait()

    def __len__(self) -> int:
        return self.turns * (len(self._untimed) + len(self._timed))

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._slices())

    def turn(self) -> float:
        """Let it train one slice; nanoseconds per step."""
        self._go.release()
        self._wait()
        return self.nanoseconds[-1]

    def finish(self) -> None:
        """Let it end, after its last turn."""
        self._go.release()
        self._thread.join()
        if self._error is not None:
            raise self._error

    # ---- in the thread of the training --------------------------------------------------------------------------

    def _slices(self) -> Iterator[list[Any]]:
        for _ in range(self.turns):
            self._pause()
            yield self._untimed
            start = time.thread_time_ns()
            yield self._timed
            self.nanoseconds.append((time.thread_time_ns() - start) / len(self._timed))
        self._pause()

    def _pause(self) -> None:
        self._waiting.release()
        self._go.acquire()

    def _run(self, train: Callable[[Runner], None]) -> None:
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
