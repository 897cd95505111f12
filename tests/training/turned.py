"""The watchdog's clock, turned by tests: however long a busy machine takes, time passes only in what is meant to hang."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace

from hookline.reliability import watchdog

TICK = 0.05


class Clock:
    """Stands still, and continues by a tick at every look of the watchdog while something hangs."""

    def __init__(self) -> None:
        self.now = self.end = 0.0

    def monotonic(self) -> float:
        self.now = max(self.now, min(self.now + TICK, self.end))
        return self.now

    @contextlib.contextmanager
    def running(self, seconds: float = math.inf) -> Iterator[None]:
        """Let so much time pass, and no more, until this is left."""
        self.end = self.now + seconds
        try:
            yield
        finally:
            self.end = self.now

    def installed(self) -> SimpleNamespace:
        """Return what takes the place of the module `time` in the watchdog."""
        return SimpleNamespace(**{**vars(time), "monotonic": self.monotonic})


def install() -> Clock:
    """RankBatch the watchdog's clock in this process from now on."""
    clock = Clock()
    watchdog.time = clock.installed()  # type: ignore[attr-defined]
    return clock
