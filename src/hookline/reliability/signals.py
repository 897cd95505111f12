"""SIGTERM, SIGUSR1 and Ctrl-C during a fit: the first one ends the run in good order, the
second one at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from typing import Any

from hookline.distributed.comm import Ranks
from hookline.run.run import Run
from hookline.run.save_request import SaveRequest
from hookline.util.errors import Preempted
from hookline.util.processes import join

HEARD = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]
ECHOES = 5.0
"""Seconds in which the same signal, to one of several ranks, is the same wish: torchrun passes on what it
gets to all of them.
"""
LAST_SECONDS = 10.0
"""How long a run that was told to stop at once may take before the process is ended under it."""
ENDING = 5.0
"""Seconds in which the thread of the grace period ends: it may be writing to a terminal that takes nothing.
"""


class Signals:
    """Listens for the length of a run; whoever listened before gets the signals back afterwards.

    A handler that the user has installed stays: it is theirs. Outside the main thread Python delivers no
    signals.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._clock: threading.Thread | None = None
        self._first = 0
        self._echoes_until = 0.0
        self._no_more_grace = False
        self._outer = False
        """Whether this run is inside another one, which then ends as well, and the process with it."""
        self._news: queue.SimpleQueue[int | None] = (
            queue.SimpleQueue()
        )  # a put cannot deadlock, not even in a signal handler

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in HEARD:
            current = signal.getsignal(number)
            self._outer = self._outer or isinstance(getattr(current, "__self__", None), Signals)
            if self._outer or current in (signal.SIG_DFL, signal.default_int_handler):
                self.before[number] = signal.signal(number, self._heard)
        if self.before and self.run.options.grace_seconds is not None:
            self._clock = threading.Thread(
                target=self._watch_the_clock, name="hookline grace period", daemon=True
            )
            self._clock.start()

    def __exit__(self, kind: object, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self._news.put(None)
        if self._clock is not None and os.getpid() == self._pid:
            join(self._clock, ENDING)
        # what has ended the run ends the process as well, unless that is caught
        number = self.run.signals.number or self.run.signals.received
        if number and kind is None and not self._outer:
            Ranks.preempted = signal.Signals(number).name
            raise KeyboardInterrupt if number == signal.SIGINT else Preempted(number)

    def _heard(self, number: int, frame: Any) -> None:
        run = self.run
        if os.getpid() != self._pid:  # a process that was forked off: it is none of its business
            signal.signal(number, self.before[number])
            os.kill(os.getpid(), number)
            return
        if run.failure_monitor is not None:
            # the launcher ends what is left of a job that has failed: there is nobody to save with
            run.failure_monitor.raise_failure()
        is_alone = run.strategy.ranks.alone
        if self._first:
            if (
                number == self._first
                and not is_alone
                and not self._no_more_grace
                and time.monotonic() < self._echoes_until
            ):
                return  # the launcher passes on what this process has heard itself
            raise _at_once(number)
        self._first, self._echoes_until = number, time.monotonic() + ECHOES
        name = signal.Signals(number).name
        second = "a second signal" if is_alone else f"the same again after {ECHOES:g} s, or another signal,"
        _say(f"\n{name}: finishing this batch and saving, then the run ends; {second} ends it at once.\n")
        run.signals.received = number
        if is_alone:
            stop_for_signal(run, number)
        self._news.put(number)
        if self._outer:
            self.before[number](number, frame)

    def _watch_the_clock(self) -> None:
        """Ends what takes longer than the grace period: first as a second signal would, then for good."""
        number = self._news.get()
        if number is None or self._is_over(self.run.options.grace_seconds):
            return
        self._no_more_grace = True
        _say(f"The grace period of {self.run.options.grace_seconds:g} s is over.\n")
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        if not self._is_over(LAST_SECONDS):
            _say(
                "The run does not end; the process is ended. Checkpoints that were saved before are whole.\n"
            )
            os._exit(128 + number)

    def _is_over(self, seconds: float | None) -> bool:
        try:
            return self._news.get(timeout=seconds) is None
        except queue.Empty:
            return False


def _at_once(number: int) -> BaseException:
    """Make the error that breaks off what runs, marked so that its traceback is kept: it says
    where that was.
    """
    error: Any = KeyboardInterrupt() if number == signal.SIGINT else Preempted(number)
    error.__hookline_at_once__ = True
    return error  # type: ignore[no-any-return]


def stop_for_signal(run: Run, number: int) -> None:
    """The run ends at the next boundary, with a checkpoint. With several ranks: once all of them know."""
    run.signals.number = number
    run.state.request_stop(signal.Signals(number).name)
    run.saves.requests.append(SaveRequest(None, "signal"))


def _say(text: str) -> None:
    """Written without Python's buffers, which the interrupted code may be in the middle of using."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
