"""SIGTERM, SIGUSR1 and Ctrl-C during a fit: the first saves and ends the run, a second ends it at once."""

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
from hookline.util.terminal import in_notebook

HANDLED = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]
ECHOES = 5.0
"""Seconds in which a repeated signal counts once, because torchrun forwards its signals to all ranks."""
LAST_SECONDS = 10.0
"""Seconds that a run may take to stop at once before the process is ended."""
CLOCK_TIMEOUT = 5.0
"""Seconds to wait for the grace-period thread, which may block on writing to a terminal."""
STDOUT, STDERR = 1, 2


class Signals:
    """Handles signals for the length of a run, then restores the handlers from before.

    A handler that the user has installed stays. Outside the main thread Python delivers no signals.
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
        """Whether this run is inside another run, which then ends too."""
        # SimpleQueue.put cannot deadlock in a signal handler
        self._received: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in HANDLED:
            current = signal.getsignal(number)
            self._outer = self._outer or isinstance(getattr(current, "__self__", None), Signals)
            if self._outer or current in (signal.SIG_DFL, signal.default_int_handler):
                self.before[number] = signal.signal(number, self._handle)
        if self.before and self.run.options.grace_seconds is not None:
            self._clock = threading.Thread(
                target=self._watch_the_clock, name="hookline grace period", daemon=True
            )
            self._clock.start()

    def __exit__(self, kind: object, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self._received.put(None)
        if self._clock is not None and os.getpid() == self._pid:
            join(self._clock, CLOCK_TIMEOUT)
        # the signal that ended the run ends the process too, unless the exception is caught
        number = self.run.signals.number or self.run.signals.received
        if number and kind is None and not self._outer:
            Ranks.preempted = signal.Signals(number).name
            raise KeyboardInterrupt if number == signal.SIGINT else Preempted(number)

    def _handle(self, number: int, frame: Any) -> None:
        run = self.run
        if os.getpid() != self._pid:  # a forked process: it gets the handler from before
            signal.signal(number, self.before[number])
            os.kill(os.getpid(), number)
            return
        if run.failure_monitor is not None:
            # the launcher ends the other ranks of a job that has failed, so no save is possible
            run.failure_monitor.raise_failure()
        rank, is_alone = run.strategy.rank, run.strategy.ranks.alone
        if self._first:
            if (
                number == self._first
                and not is_alone
                and not self._no_more_grace
                and time.monotonic() < self._echoes_until
            ):
                return  # the launcher forwards a signal that this process has received itself
            if run.signals.is_handled and number != signal.SIGINT:
                return  # SLURM sends SIGTERM to a job that is requeued: it ends already, and is not a failure
            at_once: Any = KeyboardInterrupt() if number == signal.SIGINT else Preempted(number)
            at_once.__hookline_at_once__ = True  # its traceback is shown
            raise at_once
        self._first, self._echoes_until = number, time.monotonic() + ECHOES
        name = signal.Signals(number).name
        by = "" if is_alone else f"[rank {rank}] "
        second = "a second signal" if is_alone else f"the same again after {ECHOES:g} s, or another signal,"
        does = "finishing this batch and saving" if not run.state.sanity_checking else "finishing this batch"
        ends = f"{does}, then the run ends; {second} ends it at once."
        if rank == 0:  # once is enough; if only others have received it, `stop_for_signal` says so
            # what is on stderr, a notebook marks as an error
            _write(f"\n{by}{name}: {ends}\n", STDOUT if in_notebook() else STDERR)
        run.signals.received = number
        if is_alone:
            stop_for_signal(run, number)
        self._received.put(number)
        if self._outer:
            self.before[number](number, frame)

    def _watch_the_clock(self) -> None:
        """End a run that exceeds the grace period: first as a second signal would, then the process."""
        number = self._received.get()
        if number is None or self._is_over(self.run.options.grace_seconds):
            return
        self._no_more_grace = True
        _write(f"The grace period of {self.run.options.grace_seconds:g} s is over.\n")
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        if not self._is_over(LAST_SECONDS):
            _write(
                "The run does not end, so the process is ended. Checkpoints that were saved before are "
                "complete.\n"
            )
            os._exit(128 + number)

    def _is_over(self, seconds: float | None) -> bool:
        try:
            return self._received.get(timeout=seconds) is None
        except queue.Empty:
            return False


def stop_for_signal(run: Run, number: int) -> None:
    """Request a stop and a checkpoint at the next boundary. Called on every rank at the same step."""
    if run.strategy.rank == 0 and not run.signals.received:
        name = signal.Signals(number).name
        _write(f"\n[rank 0] {name} of another rank: saving, then the run ends.\n")
    run.signals.number = number
    run.state.request_stop(signal.Signals(number).name)
    run.saves.requests.append(SaveRequest(None, "signal"))


def _write(text: str, descriptor: int = STDERR) -> None:
    """Write without Python's buffers, which the interrupted code may be using."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())
