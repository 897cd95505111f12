"""Says where a run stands when it no longer moves: which hook at which event, since when, with its stack.

The run itself does nothing for it. A thread of its own wakes now and then, looks at the stack of the thread that trains, and
compares it with what it saw before. What holds the interpreter lock for ever cannot be seen from here; with several ranks and
`abort` the process is then ended from outside the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import faulthandler
import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from hookline.data.loaders import Loader
from hookline.errors import HangError, HookError
from hookline.listener import Listener, plain_function
from hookline.loggers import Loggers
from hookline.loops.evaluate import go_through
from hookline.loops.fit import train_epoch
from hookline.loops.predict import predict
from hookline.loops.run import Run
from hookline.loops.saving import save
from hookline.processes import join

EXIT_HUNG = 124
"""The exit code of a process that was told to abort a hang and could not get its thread back; `timeout` has the same one."""
LONGEST_SLEEP = 5.0
"""Seconds between two looks, at most."""
PATIENCE = 1.0
"""Seconds that a report may take: what the run hangs in may be the very log or disk that the report goes to."""
IN_A_HOOK, ELSEWHERE = 1.75, 2.5
"""How many times longer something may take that waits for other ranks: a hook's own waiting, and everything else's."""
log = logging.getLogger("hookline")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BINDING = "<hookline binding>"
_RANKS = _PACKAGE + "ranks.py"
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WAITING = tuple(_TORCH + os.path.join(*each) + os.sep for each in (("distributed",), ("autograd",), ("nn", "parallel")))
_SAVE = inspect.unwrap(save).__code__
_LOOPS = {each.__code__ for each in (train_epoch, go_through, predict)}
_MARK = "<seen by the watchdog>"
_NEXT = dis.opmap["FOR_ITER"]
_on_duty: dict[int, list[Watchdog]] = {}
"""By thread. A run inside a run (a hook that fits something) is watched by its own watchdog alone."""


# ---- where a thread is ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """What a run is doing. Two looks that find equal keys have seen one and the same call."""

    text: str
    key: tuple[Any, ...]


def find_place(stack: list[FrameType], run: Run) -> Place:
    """The innermost thing on a stack that a user has a name for: a hook, a step, the wait for a batch, a logger, a save."""
    actions = _own_actions(run)
    logger: FrameType | None = None
    inner = ""
    for index, frame in enumerate(stack):
        code = frame.f_code
        if code.co_filename == _BINDING:
            return _called(f"{_logger(logger)}, called by " if logger else "", _listener_text(stack[index:], run), frame, run)
        if code in actions:
            return _called("", f"{actions[code]} of {type(run.module).__name__}", frame, run)
        if code is Loggers._tell.__code__:
            logger = logger or frame
        elif code is _SAVE:
            return _standing("saving a checkpoint", run)
        elif code in _LOOPS:
            if code.co_code[frame.f_lasti] == _NEXT:
                return _standing(f"waiting for the next batch of loader {run.state.dataloader_name!r}", run)
            if any(each.f_code is Loader.open.__code__ for each in stack[:index]):
                return _standing(f"opening loader {run.state.dataloader_name!r}", run)
            break
        if not inner and code.co_filename.startswith(_PACKAGE) and code.co_filename != __file__:
            inner = f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
    if logger is not None:
        return _called("", _logger(logger), logger, run)
    return _standing(inner or f"{run.stage}, outside every hook and step", run)


def _called(before: str, text: str, frame: FrameType, run: Run) -> Place:
    """A place that is one call: it gets a mark that lives and dies with it, which keeps nothing else alive.

    Frames cannot be referred to weakly, their ids are used again at once, and one that is kept would keep the user's tensors.
    """
    mark = frame.f_locals.setdefault(_MARK, object())
    return Place(before + text, (mark, *_progress(run)))


def _standing(text: str, run: Run) -> Place:
    """A place in the loops: it is still the same one if nothing has been counted since."""
    return Place(text, (text, *_progress(run)))


def _progress(run: Run) -> tuple[int, ...]:
    s = run.state
    return s.step, s.batches_seen, s.batches_in_pass, s.epochs_seen, s.epoch, s.batch_idx, s.dataloader_idx


def _own_actions(run: Run) -> dict[CodeType, str]:
    """The actions that Hookline does itself, such as backward: they have no listener."""
    slots = {event.name: getattr(run.plan, event.name) for event in run.plan.table if event.action}
    own = {getattr(slot, "__code__", None): name for name, slot in slots.items() if not run.plan.listeners(name)}
    return {code: name for code, name in own.items() if code is not None and code.co_filename.startswith(_PACKAGE + "loops")}


def _logger(frame: FrameType) -> str:
    told = frame.f_locals
    return f"logger {told['each'].label} in {told['method']}" if "each" in told else "a logger"


def _listener_text(stack: list[FrameType], run: Run) -> str:
    """Who is called by a binding, the first frame of this stack."""
    function = stack[0].f_locals["f"]
    listener = _listener_of(stack, function, run)
    if listener is None:
        return f"{getattr(function, '__qualname__', type(function).__name__)}"
    event = listener.event.name
    text = f"{listener.label} in {event}" if listener.receiver == "H" else f"{event} of {listener.name}"
    if plain_function(function) is not plain_function(listener.function):  # a predicate may hang, too
        text = f"the `when` of {text}"
    return f"{text} ({listener.origin})"


def _listener_of(stack: list[FrameType], function: Callable[..., Any], run: Run) -> Listener | None:
    """Whoever makes the call has the listener in a variable; an action is called directly, and looked up in the plan."""
    for frame in stack[1:]:
        code = frame.f_code
        if code.co_filename == _BINDING or code in _LOOPS:
            break
        if code.co_filename.startswith(_PACKAGE) and "listener" in (*code.co_varnames, *code.co_freevars):
            found = frame.f_locals.get("listener")
            if isinstance(found, Listener):
                return found
    acting = (each for event in run.plan.table if event.action for each in run.plan.listeners(event.name))
    return next((each for each in acting if plain_function(each.function) is plain_function(function)), None)


def _line(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname


def _waits_for_others(stack: list[FrameType]) -> bool:
    """Whether a thread is inside what torch, or Hookline, does with other ranks; a backward averages gradients on its way."""
    for frame in stack:
        file = frame.f_code.co_filename
        if file == _RANKS or file.startswith(_WAITING):
            return True
        if not file.startswith((_TORCH, "<frozen")):
            return False
    return False


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# ---- the watch --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stay:
    """How long the run has been in one place, and what was done about it."""

    place: Place
    since: float
    due: float
    """Seconds after which it is reported, or reported again."""
    reported: bool = False
    interrupted: float | None = None
    tries: int = 0


class Watchdog:
    """Watches the thread it is started in, for the length of one run.

    Reports a stay of `timeout` seconds (None: does nothing at all) as a warning, and again whenever it has doubled; also into
    `hangs.log` of the run's directory if the run has a logger. With `abort` it then raises `HangError` where the run hangs, so
    that on_exception and teardown follow. A main thread can be interrupted in Python code, in `time.sleep`, in locks and in
    reads; any other thread only in Python code. What has not come back after `grace` seconds ends the process: the stacks of
    all threads go to stderr, the exit code is 124.
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
        self._depth = sum(1 for frame in _outward(sys._getframe()) if frame.f_code.co_filename != __file__)
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
        join(watcher, 2 * PATIENCE)
        if self._abort and self._run.peers is not None:
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
        """Compare with the last look. The frames are let go of before the next one."""
        if _on_duty[self._thread][-1] is not self:
            self._stay = None
            return
        self._wind_up()
        stack = self._stack(sys._current_frames().get(self._thread))
        place, now = find_place(stack, self._run), time.monotonic()
        overslept, self._looked = now - self._looked - self._interval, now
        stay = self._stay
        if stay is not None and overslept > LONGEST_SLEEP:  # the whole process was suspended, which is nobody's fault
            stay.since += overslept
        if stay is None or stay.place.key != place.key:
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
            self._report(f"{told} It may be slow or stuck; this is where it stands:", [_line(each) for each in reversed(stack)])
            if self._run.peers is not None:
                self._run.peers.post(told, failed=False)
        if self._abort and stay.reported:
            self._end(stay, now)

    def _wind_up(self) -> None:
        """What holds the interpreter's lock stops the watcher too, but not this clock, which every look sets anew."""
        if self._abort and self._run.peers is not None and self._timeout is not None:
            faulthandler.dump_traceback_later(self._timeout + min(self._grace, self._timeout / 2), exit=True, file=2)

    def _stack(self, frame: FrameType | None) -> list[FrameType]:
        """The run's part of the stack, innermost first."""
        frames = list(_outward(frame))
        return frames[: -self._depth]

    def _patience(self, stack: list[FrameType], place: Place) -> float:
        """How much longer a rank may take that waits for others: the one that keeps them waiting is to be named, and first."""
        if self._run.peers is None or not _waits_for_others(stack):
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

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _describe(self, place: Place, seconds: float, waits: bool) -> str:
        s = self._run.state
        rank = f", rank {s.rank}" if s.world_size > 1 else ""
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        others = ", waiting for other ranks" if waits else ""
        return (f"The run has not moved for at least {seconds:.1f} s, since {began} or before: {place.text}{others}, "
                f"at {s.position}{rank}.")  # fmt: skip

    def _report(self, text: str, lines: list[tuple[str, int, str]]) -> None:
        """Say it from a thread that may hang: where the text goes, or where the source is read, may be what the run waits for."""

        def say() -> None:
            stack = traceback.StackSummary.from_list([(*line, None) for line in lines if not line[0].startswith("<frozen")])
            whole = f"{text}\n{''.join(stack.format()).rstrip()}"
            log.warning("%s", whole)
            if self._run.state.logger:
                with contextlib.suppress(OSError), (self._run.run_dir() / "hangs.log").open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {whole}\n\n")

        speaker = threading.Thread(target=say, name="hookline-watchdog-report", daemon=True)
        speaker.start()
        speaker.join(PATIENCE)

    def _error(self, stay: Stay) -> str:
        return f"{stay.place.text} did not come back within {self._timeout:g} s, and the run was told to end then."

    # ---- abort ------------------------------------------------------------------------------------------------------

    def _end(self, stay: Stay, now: float) -> None:
        """Interrupt it, once more after half of the grace period, and end the process when that is over."""
        if stay.interrupted is None:
            stay.interrupted = now
            if self._run.peers is not None:
                self._run.peers.post(self._error(stay))  # it may not come back to say so itself
        if now - stay.interrupted >= self._grace:
            self._report(f"{self._error(stay)} It could not be interrupted for {self._grace:g} s, so the process ends "
                         f"with exit code {EXIT_HUNG}.", [])  # fmt: skip
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, on top of whatever hangs there; a call that has just come back is left in peace."""
        stay = self._stay
        if stay is not None and find_place(self._stack(frame), self._run).key == stay.place.key:
            raise HangError(self._error(stay))


def _unused_signal() -> int | None:
    """A signal that nobody listens to: a handler that raises is the only thing that ends a sleep or a wait for a lock."""
    if not hasattr(signal, "pthread_kill"):
        return None
    candidates = range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if hasattr(signal, "SIGRTMAX") else (signal.SIGUSR2,)
    return next((number for number in candidates if signal.getsignal(number) is signal.SIG_DFL), None)
