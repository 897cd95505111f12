"""The watchdog: reports a run that hangs, with the hook, the event, the time and the stack.

Every call of a hook or a step, and every phase of the loops, writes itself into `State.running` (also with
`accounting=False`). The watchdog's thread wakes now and then, reads it, and compares it with the last value.
The stack of the training thread is only shown. The watchdog cannot see code that holds the interpreter lock
for ever; with several ranks and `abort`, a timer outside the interpreter then ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from hookline.engine.listener import Listener
from hookline.reliability.stacks import StackLine, stack_of, waits_for_ranks
from hookline.run.run import Run
from hookline.run.state import LOADER
from hookline.util.errors import HangError, HookError
from hookline.util.processes import join

EXIT_HUNG = 124
"""The exit code of a process whose hang could not be interrupted; `timeout` uses the same code."""
LONGEST_SLEEP = 5.0
"""The longest time between two checks, in seconds."""
REPORT_TIMEOUT = 1.0
"""Seconds that a report may take, because the run may hang in the log or disk that the report goes to."""
IN_A_HOOK, ELSEWHERE = 1.75, 2.5
"""Factors of the timeout for a call that waits for other ranks: in a hook, and anywhere else."""
log = logging.getLogger("hookline")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_active: dict[int, list[Watchdog]] = {}
"""The watchdogs of each thread. Of nested runs (a hook that calls fit) only the innermost is watched."""


# ---- what the run is doing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StackLocation:
    """What a run is doing, and how far it is."""

    text: str
    call: Any
    """The innermost call in `State.running`: a new object for every call. It keeps no user objects alive."""
    progress: tuple[int, ...]

    def is_same(self, other: StackLocation) -> bool:
        """Return whether both are the same call, or the same phase without progress."""
        return self.call is other.call and self.progress == other.progress and self.text == other.text


def find_location(run: Run, thread: int, stack: list[StackLine]) -> StackLocation:
    """Return what `State.running` or the logger names, else the line of Hookline on the stack."""
    s = run.state
    running = s.running
    call: Any = running
    text = _describe_call(running, s.dataloader_name) if running is not None else ""
    if s.logger is not None and (calling := s.logger.calling.get(thread)) is not None:
        call, (logger, method) = calling, calling
        by_hook = running is not None and not isinstance(running[0], str)
        text = f"logger {logger.label} in {method}{f', called by {text}' if by_hook else ''}"
    elif not text:
        own = (
            f"{name} ({file}:{line})"
            for file, line, name in stack
            if file.startswith(_PACKAGE) and file != __file__
        )
        text = next(own, f"{run.stage}, outside every hook and step")
    progress = (
        s.step,
        s.batches_seen,
        s.batches_in_pass,
        s.epochs_seen,
        s.epoch,
        s.batch_idx,
        s.dataloader_idx,
    )
    return StackLocation(text, call, progress)


def _describe_call(running: tuple[Any, Any], loader: str) -> str:
    """Describe the value of `State.running`."""
    what, outer = running
    if isinstance(what, str):
        return what.replace(LOADER, repr(loader))
    if not isinstance(what, Listener):  # the filter of the listener that called it
        return f"the `when` of {_describe_call(outer, loader)}"
    event = what.event.name
    return (
        f"{f'{what.label} in {event}' if what.receiver == 'H' else f'{event} of {what.name}'} ({what.origin})"
    )


# ---- the watchdog ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stay:
    """How long the run has been at one location, and what was done about it."""

    location: StackLocation
    since: float
    due: float
    """Seconds after which it is reported, or reported again."""
    reported: bool = False
    interrupted: float | None = None
    tries: int = 0


class Watchdog:
    """Watches the thread it is started in, for the length of one run.

    It reports a hang of `timeout` seconds (None: it does nothing) as a warning, and again whenever the time
    has doubled; also into `hangs.log` of the run's directory if the run has a logger. With `abort` it then
    raises `HangError` where the run hangs, so that on_exception and teardown follow. A main thread can be
    interrupted in Python code, in `time.sleep`, in locks and in reads; any other thread only in Python code.
    If that has no effect for `grace` seconds, it writes the stacks of all threads to stderr and ends the
    process with exit code 124.
    """

    def __init__(self, run: Run, timeout: float | None, *, abort: bool = False, grace: float = 30.0) -> None:
        self._run = run
        self._timeout = timeout
        self._abort = abort
        self._grace = grace
        self._interval = min(timeout / 4, LONGEST_SLEEP) if timeout is not None else 0.0
        self._stay: Stay | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._signal: int | None = None

    def __enter__(self) -> None:
        """Begin to watch the calling thread. Its stack up to here is not part of the run."""
        if self._timeout is None:
            return
        self._process, self._thread, self._looked = os.getpid(), threading.get_ident(), time.monotonic()
        self._depth = sum(
            1 for file, _, _ in stack_of(self._thread)[1:] if file != __file__
        )  # the first is stack_of
        if self._abort and threading.current_thread() is threading.main_thread():
            self._signal = _unused_signal()
            if self._signal is not None:
                signal.signal(self._signal, self._on_signal)
        _active.setdefault(self._thread, []).append(self)
        self._reset_timer()
        self._watcher = threading.Thread(target=self._watch, name="hookline-watchdog", daemon=True)
        self._watcher.start()

    def __exit__(self, *error: object) -> None:
        """Stop watching, and remove the thread and the signal handler."""
        watcher, self._watcher = self._watcher, None
        if watcher is None or os.getpid() != self._process:  # a forked child has no such thread
            return
        self._over.set()
        join(watcher, 2 * REPORT_TIMEOUT)
        if self._abort and self._run.failure_monitor is not None:
            faulthandler.cancel_dump_traceback_later()
        watching = _active[self._thread]
        watching.remove(self)
        if not watching:
            del _active[self._thread]
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self._check()
            except Exception:
                log.warning("The watchdog failed and is switched off for this run", exc_info=True)
                return

    def _check(self) -> None:
        """Compare the location with that of the last check, and report a hang."""
        if _active[self._thread][-1] is not self:
            self._stay = None
            return
        self._reset_timer()
        stack = stack_of(self._thread)[: -self._depth]  # the run's part of it
        location, now = find_location(self._run, self._thread, stack), time.monotonic()
        overslept, self._looked = now - self._looked - self._interval, now
        stay = self._stay
        if stay is not None and overslept > LONGEST_SLEEP:  # the whole process was suspended: not a hang
            stay.since += overslept
        if stay is None or not stay.location.is_same(location):
            self._moved(stay, now)
            assert self._timeout is not None
            self._stay = Stay(location, now, self._timeout)
            return
        seconds, factor = now - stay.since, self._timeout_factor(stack, location)
        if seconds >= stay.due * factor:
            stay.reported = True
            while stay.due * factor <= seconds:
                stay.due *= 2
            text = self._describe(location, seconds, waits=factor > 1)
            self._report(f"{text} It may be slow or stuck. Its stack:", stack[::-1])
            if self._run.failure_monitor is not None:
                self._run.failure_monitor.post(text, failed=False)
        if self._abort and stay.reported:
            self._end(stay, now)

    def _reset_timer(self) -> None:
        """Restart the timer that ends the process, which also runs while another thread holds the GIL."""
        if self._abort and self._run.failure_monitor is not None and self._timeout is not None:
            faulthandler.dump_traceback_later(
                self._timeout + min(self._grace, self._timeout / 2), exit=True, file=2
            )

    def _timeout_factor(self, stack: list[StackLine], location: StackLocation) -> float:
        """Return how much longer a rank may wait for others, so that the rank that hangs reports first."""
        if self._run.failure_monitor is None or not waits_for_ranks(stack):
            return 1.0
        return IN_A_HOOK if location.text.startswith("hook ") else ELSEWHERE

    def _moved(self, stay: Stay | None, now: float) -> None:
        """Log that the run continues after a reported hang, by itself or after the interrupt."""
        if stay is None or not stay.reported:
            return
        s = self._run.state
        if stay.interrupted is not None and s.exception is None and s.status in ("training", "running"):
            s.request_stop(self._error(stay))  # the program caught the HangError and continued
        log.info("The run has left %s after %.1f s.", stay.location.text, now - stay.since)

    # ---- messages ------------------------------------------------------------------------------------------

    def _describe(self, location: StackLocation, seconds: float, waits: bool) -> str:
        s = self._run.state
        rank = f", rank {s.rank}" if s.world_size > 1 else ""
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        others = ", waiting for other ranks" if waits else ""
        return (
            f"The run has not moved for at least {seconds:.1f} s, since {began} or before: "
            f"{location.text}{others}, at {s.position}{rank}."
        )

    def _report(self, text: str, lines: list[StackLine]) -> None:
        """Log the text and the stack from another thread, because the log or the disk may hang too."""

        def write() -> None:
            stack = traceback.StackSummary.from_list(
                [(*line, None) for line in lines if not line[0].startswith("<frozen")]
            )
            whole = f"{text}\n{''.join(stack.format()).rstrip()}"
            log.warning("%s", whole)
            if self._run.state.logger:
                with (
                    contextlib.suppress(OSError),
                    (self._run.run_dir() / "hangs.log").open("a", encoding="utf-8") as file,
                ):
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {whole}\n\n")

        reporter = threading.Thread(target=write, name="hookline-watchdog-report", daemon=True)
        reporter.start()
        reporter.join(REPORT_TIMEOUT)

    def _error(self, stay: Stay) -> str:
        return (
            f"{stay.location.text} did not return within {self._timeout:g} s, and the action 'abort' of "
            f"hang_after ends the run then."
        )

    # ---- abort ---------------------------------------------------------------------------------------------

    def _end(self, stay: Stay, now: float) -> None:
        """Interrupt the run, again after half of the grace period, and end the process after it."""
        if stay.interrupted is None:
            stay.interrupted = now
            if self._run.failure_monitor is not None:
                self._run.failure_monitor.post(self._error(stay))  # the training thread may never return
        if now - stay.interrupted >= self._grace:
            self._report(
                f"{self._error(stay)} It could not be interrupted for {self._grace:g} s, so the process ends "
                f"with exit code {EXIT_HUNG}.",
                [],
            )
            faulthandler.dump_traceback(file=2, all_threads=True)
            os._exit(EXIT_HUNG)
        if now - stay.interrupted >= stay.tries * self._grace / 2:
            stay.tries += 1
            self._interrupt(stay)

    def _interrupt(self, stay: Stay) -> None:
        if self._over.is_set():
            return
        if self._signal is not None:
            signal.pthread_kill(self._thread, self._signal)
            return
        message = self._error(stay)

        def initialize(self: HangError) -> None:
            HookError.__init__(self, message)

        # the API takes a class, and calls it without arguments in the other thread
        error = type("HangError", (HangError,), {"__init__": initialize, "__module__": __name__})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(error))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise in the main thread, where the run hangs, unless the call has just returned."""
        if (stay := self._stay) is None:
            return
        now, known = find_location(self._run, self._thread, []), stay.location
        # if no call is known, the line may differ
        if now.is_same(known if known.call is not None else replace(known, text=now.text)):
            raise HangError(self._error(stay))


def _unused_signal() -> int | None:
    """Return a signal without a handler. Only a handler that raises can end a sleep or a wait for a lock."""
    if not hasattr(signal, "pthread_kill"):
        return None
    candidates = (
        range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if hasattr(signal, "SIGRTMAX") else (signal.SIGUSR2,)
    )
    return next((number for number in candidates if signal.getsignal(number) is signal.SIG_DFL), None)
