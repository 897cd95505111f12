"""Says where a run stands when it no longer moves: which hook at which event, since when, with its stack.

The running code publishes itself: every call of a hook or a step, and every phase of the loops, is one write
into `State.running` (with `accounting=False`, too). A thread of its own wakes now and then, reads it, and
compares it with what it read before. The stack of the thread that trains is only shown. What holds the
interpreter lock for ever cannot be seen from here; with several ranks and `abort` the process is then ended
from outside the interpreter.
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
from hookline.reliability.stacks import Line, stack_of, waits_for_ranks
from hookline.run.run import Run
from hookline.run.state import LOADER
from hookline.util.errors import HangError, HookError
from hookline.util.processes import join

EXIT_HUNG = 124
"""The exit code of a process that was told to abort a hang and could not get its thread back; `timeout` has
the same one.
"""
LONGEST_SLEEP = 5.0
"""Seconds between two looks, at most."""
THREAD_TIMEOUT = 1.0
"""Seconds that a report may take: what the run hangs in may be the very log or disk that the report goes to.
"""
IN_A_HOOK, ELSEWHERE = 1.75, 2.5
"""How many times longer something may take that waits for other ranks: a hook's own waiting, and everything
else's.
"""
log = logging.getLogger("hookline")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_on_duty: dict[int, list[Watchdog]] = {}
"""By thread. A run inside a run (a hook that fits something) is watched by its own watchdog alone."""


# ---- what a run does ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StackLocation:
    """What a run is doing, and how far it is."""

    text: str
    call: Any
    """The innermost call that was published: another object for every call. It keeps nothing of the user's
    alive.
    """
    progress: tuple[int, ...]

    def is_same(self, other: StackLocation) -> bool:
        """Whether two looks have seen one and the same call, or one phase in which nothing was counted."""
        return self.call is other.call and self.progress == other.progress and self.text == other.text


def find_location(run: Run, thread: int, stack: list[Line]) -> StackLocation:
    """What the run has published: a hook, a step, the wait for a batch, a logger, a save. Else the line of
    Hookline it is in.
    """
    s = run.state
    running = s.running
    call: Any = running
    text = _text(running, s.dataloader_name) if running is not None else ""
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


def _text(running: tuple[Any, Any], loader: str) -> str:
    """Describe what `State.running` has."""
    what, outer = running
    if isinstance(what, str):
        return what.replace(LOADER, repr(loader))
    if not isinstance(what, Listener):  # the filter of a listener, which called it
        return f"the `when` of {_text(outer, loader)}"
    event = what.event.name
    return (
        f"{f'{what.label} in {event}' if what.receiver == 'H' else f'{event} of {what.name}'} ({what.origin})"
    )


# ---- the watch ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stay:
    """How long the run has been in one place, and what was done about it."""

    place: StackLocation
    since: float
    due: float
    """Seconds after which it is reported, or reported again."""
    reported: bool = False
    interrupted: float | None = None
    tries: int = 0


class Watchdog:
    """Watches the thread it is started in, for the length of one run.

    Reports a stay of `timeout` seconds (None: does nothing at all) as a warning, and again whenever it has
    doubled; also into `hangs.log` of the run's directory if the run has a logger. With `abort` it then raises
    `HangError` where the run hangs, so that on_exception and teardown follow. A main thread can be
    interrupted in Python code, in `time.sleep`, in locks and in reads; any other thread only in Python code.
    What has not come back after `grace` seconds ends the process: the stacks of all threads go to stderr, the
    exit code is 124.
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

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to watch the thread that calls this; what is on its stack by now is not the run's."""
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
        _on_duty.setdefault(self._thread, []).append(self)
        self._wind_up()
        self._watcher = threading.Thread(target=self._watch, name="hookline-watchdog", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """The run is over; afterwards there is no thread and no signal handler left."""
        watcher, self._watcher = self._watcher, None
        if watcher is None or os.getpid() != self._process:  # a forked child has no such thread
            return
        self._over.set()
        join(watcher, 2 * THREAD_TIMEOUT)
        if self._abort and self._run.failure_monitor is not None:
            faulthandler.cancel_dump_traceback_later()
        watching = _on_duty[self._thread]
        watching.remove(self)
        if not watching:
            del _on_duty[self._thread]
        if self._signal is not None:
            signal.signal(self._signal, signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self._look()
            except Exception:
                log.warning("The watchdog failed and is switched off for this run", exc_info=True)
                return

    def _look(self) -> None:
        """Compare with the last look."""
        if _on_duty[self._thread][-1] is not self:
            self._stay = None
            return
        self._wind_up()
        stack = stack_of(self._thread)[: -self._depth]  # the run's part of it
        place, now = find_location(self._run, self._thread, stack), time.monotonic()
        overslept, self._looked = now - self._looked - self._interval, now
        stay = self._stay
        if (
            stay is not None and overslept > LONGEST_SLEEP
        ):  # the whole process was suspended, which is nobody's fault
            stay.since += overslept
        if stay is None or not stay.place.is_same(place):
            self._moved(stay, now)
            assert self._timeout is not None
            self._stay = Stay(place, now, self._timeout)
            return
        seconds, patience = now - stay.since, self._patience(stack, place)
        if seconds >= stay.due * patience:
            stay.reported = True
            while stay.due * patience <= seconds:
                stay.due *= 2
            told = self._describe(place, seconds, waits=patience > 1)
            self._report(f"{told} It may be slow or stuck; this is where it stands:", stack[::-1])
            if self._run.failure_monitor is not None:
                self._run.failure_monitor.post(told, failed=False)
        if self._abort and stay.reported:
            self._end(stay, now)

    def _wind_up(self) -> None:
        """What holds the interpreter's lock stops the watcher too, but not this clock, which every look sets
        anew.
        """
        if self._abort and self._run.failure_monitor is not None and self._timeout is not None:
            faulthandler.dump_traceback_later(
                self._timeout + min(self._grace, self._timeout / 2), exit=True, file=2
            )

    def _patience(self, stack: list[Line], place: StackLocation) -> float:
        """How much longer a rank may take that waits for others: the one that keeps them waiting is to be
        named, and first.
        """
        if self._run.failure_monitor is None or not waits_for_ranks(stack):
            return 1.0
        return IN_A_HOOK if place.text.startswith("hook ") else ELSEWHERE

    def _moved(self, stay: Stay | None, now: float) -> None:
        """The run went on from a place that was reported, by itself or because it was interrupted."""
        if stay is None or not stay.reported:
            return
        s = self._run.state
        if stay.interrupted is not None and s.exception is None and s.status in ("training", "running"):
            s.request_stop(self._error(stay))  # somebody has caught the error and gone on
        log.info("The run has left %s after %.1f s.", stay.place.text, now - stay.since)

    # ---- what is said --------------------------------------------------------------------------------------

    def _describe(self, place: StackLocation, seconds: float, waits: bool) -> str:
        s = self._run.state
        rank = f", rank {s.rank}" if s.world_size > 1 else ""
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        others = ", waiting for other ranks" if waits else ""
        return (
            f"The run has not moved for at least {seconds:.1f} s, since {began} or before: "
            f"{place.text}{others}, at {s.position}{rank}."
        )

    def _report(self, text: str, lines: list[Line]) -> None:
        """Say it from a thread that may hang: where the text goes, or where the source is read, may be what
        the run waits for.
        """

        def say() -> None:
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

        speaker = threading.Thread(target=say, name="hookline-watchdog-report", daemon=True)
        speaker.start()
        speaker.join(THREAD_TIMEOUT)

    def _error(self, stay: Stay) -> str:
        return (
            f"{stay.place.text} did not come back within {self._timeout:g} s, and the run was told to "
            f"end then."
        )

    # ---- abort ---------------------------------------------------------------------------------------------

    def _end(self, stay: Stay, now: float) -> None:
        """Interrupt it, once more after half of the grace period, and end the process when that is over."""
        if stay.interrupted is None:
            stay.interrupted = now
            if self._run.failure_monitor is not None:
                self._run.failure_monitor.post(self._error(stay))  # it may not come back to say so itself
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

        def tell(self: HangError) -> None:
            HookError.__init__(self, message)

        # it is told as a class, and made without arguments in the other thread
        told = type("HangError", (HangError,), {"__init__": tell, "__module__": __name__})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(told))

    def _is_still_there(self, place: StackLocation) -> bool:
        """Whether the run has published nothing new; without anything published the line may differ, and does
        not count.
        """
        now = find_location(self._run, self._thread, [])
        return now.is_same(place if place.call is not None else replace(place, text=now.text))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, on top of whatever hangs there; a call that has just come back is left in
        peace.
        """
        stay = self._stay
        if stay is not None and self._is_still_there(stay.place):
            raise HangError(self._error(stay))


def _unused_signal() -> int | None:
    """A signal that nobody listens to: a handler that raises is the only thing that ends a sleep or a wait
    for a lock.
    """
    if not hasattr(signal, "pthread_kill"):
        return None
    candidates = (
        range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if hasattr(signal, "SIGRTMAX") else (signal.SIGUSR2,)
    )
    return next((number for number in candidates if signal.getsignal(number) is signal.SIG_DFL), None)
