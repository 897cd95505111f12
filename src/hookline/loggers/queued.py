"""A slow logger behind a bounded queue: the training hands its records over and goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline.engine.checks import Count, Timeout
from hookline.loggers.base import BadValue, Logger, check_image, number, numbers, picture, pixels
from hookline.loggers.jsonl import jsonable
from hookline.util.errors import OptionError

log = logging.getLogger("hookline")

Record = tuple[str, tuple[Any, ...]]
LARGEST = 256 * 2**20
ASKED = ("client", "position")
"""What is asked of the logger in its own thread, and waited for."""
NO_RECORDS = ("", "open", *ASKED, "resume", "begin_afresh", "close")
"""What also goes through the queue, but is nothing that could be lost."""
QUEUE_TIMEOUT = 1.0
"""Seconds that a run waits for such a logger, all slow calls together."""
QUICK = 0.01
"""Seconds that a call may take without counting as slow."""


class Queued(Logger):
    """Hands every record to `logger` in a thread of its own.

    `size` records wait at most (and 256 MiB of arrays, tensors and text); what comes while it is full is
    dropped and counted. Closing takes at most `timeout` seconds, and what is not written by then is given up.
    A failure is reported once and switches the logger off. Values are copied when they are handed over, so
    the training may change them right away.
    """

    def __init__(self, logger: Logger, size: int = 1000, timeout: float = 30.0) -> None:
        if not isinstance(logger, Logger) or isinstance(logger, Queued):
            raise OptionError(f"Queued(logger={logger!r}) takes one logger.", option="logger", value=logger)
        Count(1)("size", size)
        Timeout(0.001)("timeout", timeout)
        self.logger, self.size, self.timeout = logger, size, timeout
        self.tells_rows_apart = logger.tells_rows_apart
        self.dropped = 0
        """Records of this run that found the queue full."""
        self.off = False
        """Whether it failed or hung, and takes nothing any more."""
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._run_dir: Callable[[], Path] | None = None
        self._records: deque[Record] = deque()
        self._bytes = 0
        self._busy = ""
        self._patience = QUEUE_TIMEOUT
        self._changed = threading.Condition()

    @property
    def label(self) -> str:
        return self.logger.label

    # ---- in the training's thread --------------------------------------------------------------------------

    def open(self, run_dir: Callable[[], Path]) -> None:
        """The thread itself starts with the first record."""
        if self._thread is not None and not self._abandoned:
            self.close()
        self._run_dir = run_dir
        self._begin()

    def _begin(self) -> None:
        """A new run, a new chance; but a thread that hangs in the run before takes nothing."""
        self.dropped, self._patience = 0, QUEUE_TIMEOUT
        if self._abandoned and self._thread is not None and not self._thread.is_alive():
            self._abandoned, self._thread = False, None
        self.off = self._abandoned
        if self.off:
            log.warning("%s still hangs in the run before and stays switched off", self.label)

    def _put(self, method: str, *given: Any, always: bool = False) -> None:
        if self.off:
            return
        if self._thread is None:
            self._start()
        weight = _weight(given)
        with self._changed:
            full = len(self._records) >= self.size or (self._bytes and self._bytes + weight > LARGEST)
            if not full or always:
                self._records.append((method, given))
                self._bytes += weight
                self._changed.notify_all()
                return
            self.dropped += 1
            first = self.dropped == 1
        if first:
            log.warning(
                "%s is slower than the run: its queue of %s records is full, records are dropped",
                self.label,
                self.size,
            )

    def _start(self) -> None:
        self._records, self._bytes, self._busy = deque(), 0, ""
        if self._run_dir is not None:
            here = self._run_dir()  # made by the thread that owns the run
            self._records.append(("open", (lambda: here,)))
        self._thread = threading.Thread(target=self._work, name=f"hookline-{self.label}", daemon=True)
        self._thread.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int, *over: str) -> None:
        self._put("log_metrics", dict(metrics), step, epoch, *over)

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        if (
            type(self.logger).log_event is not Logger.log_event
        ):  # few have a place for it; to the others it is no record
            self._put("log_event", kind, self._kept(data))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._put("log_hyperparams", self._kept(params))

    def _kept(self, data: Mapping[str, Any]) -> Any:
        """What is handed over of data that may change."""
        return jsonable(data)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._put("add_scalar", tag, number(tag, scalar_value), global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        self._put("add_histogram", tag, np.array(numbers(tag, values)), global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._put("add_text", tag, str(text_string), global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        self._put("add_image", tag, pixels(tag, img_tensor).transpose(2, 0, 1).copy(), global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        """Drawn here: matplotlib belongs to one thread, and the figure may be closed right after."""
        if not self.off:
            self._put("add_image", tag, picture(tag, figure), global_step)

    @property
    def client(self) -> Any:
        """The logger's client, waited for if it is not there yet; None if it is switched off or does not come
        in time.
        """
        answer, arrived = self._ask("client")
        arrived.wait(self.timeout)
        return answer[0] if answer else None

    def position(self) -> Any:
        """The logger's own, once it has written what was logged so far; None if it has none, or that takes
        too long.
        """
        if self._patience <= 0 or type(self.logger).position is Logger.position:
            return None
        if self._thread is None:  # after the run; there is nobody to get in the way of
            return self.logger.position()
        answer, arrived = self._ask("position")
        began = time.monotonic()
        arrived.wait(min(self._patience, self.timeout))
        self._spend(time.monotonic() - began)
        return answer[0] if answer else None

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        self._put("resume", position, step, epoch, path, always=True)

    def begin_afresh(self) -> None:
        self._put("begin_afresh", always=True)

    def _ask(self, what: str) -> tuple[list[Any], threading.Event]:
        """Where the answer will be, and what tells that it is there."""
        answer: list[Any] = []
        arrived = threading.Event()
        if self.off:
            arrived.set()
        self._put(what, answer, arrived, always=True)
        return answer, arrived

    def _spend(self, waited: float) -> None:
        if waited > QUICK:
            self._patience -= waited

    def close(self) -> None:
        thread = self._thread
        if thread is None or self._abandoned:
            return
        with self._changed:
            self._records.append(("close", ()))
            self._changed.notify_all()
        thread.join(self.timeout)
        self._settle(thread)
        if self.dropped:
            log.warning("%s could not keep up: %s records were dropped", self.label, self.dropped)

    def _settle(self, thread: threading.Thread) -> None:
        """Either the thread is gone, or it hangs and is left behind."""
        if not thread.is_alive():
            self._thread = None
            return
        with self._changed:
            lost = sum(
                method not in NO_RECORDS for method in (self._busy, *(method for method, _ in self._records))
            )
            self.off = self._abandoned = True
            self._records = deque([("close", ())])  # for the day it comes back
        log.warning("%s did not finish within %s s: %s records are given up", self.label, self.timeout, lost)

    # ---- in its own thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = ""
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._records)
                method, given = self._records.popleft()
                self._bytes -= _weight(given)
                self._busy = method
            if method == "close" and self.off:
                with contextlib.suppress(Exception):
                    self.logger.close()
            elif not self.off:
                self._hand_over(method, given)
            if method in ASKED:
                given[1].set()
            if method == "close":
                with self._changed:
                    self._busy = ""
                    self._changed.notify_all()
                return

    def _hand_over(self, method: str, given: tuple[Any, ...]) -> None:
        try:
            if method == "client":
                given[0].append(self.logger.client)
            elif method == "position":
                given[0].append(self.logger.position())
            else:
                getattr(self.logger, method)(*given)
        except BaseException as error:  # even a client that wants to end the program only ends its own part
            self._fail(method, error)

    def _fail(self, method: str, error: BaseException) -> None:
        self.off = True
        log.warning("%s failed in %s and is switched off for this run", self.label, method, exc_info=error)


def _weight(given: Any) -> int:
    """Bytes of arrays, tensors and text, in containers too; anything else is small."""
    if isinstance(given, torch.Tensor):
        return given.element_size() * given.numel()  # a sparse one has no `nbytes`
    if isinstance(given, np.ndarray):
        return given.nbytes
    if isinstance(given, list | tuple | Mapping):
        return sum(map(_weight, given.values() if isinstance(given, Mapping) else given))
    return len(given) if isinstance(given, str) else 0


# ---- A user's own logger


class Awaited(Queued):
    """Calls `logger` in a thread of its own and waits for it, so that it is as if it were called directly.

    That ends when its slow calls have cost the run `QUEUE_TIMEOUT`: from then on the run does not wait,
    as with `Queued`, until the next run. It gets what was logged, tensors as detached copies.
    """

    def __init__(self, logger: Logger, size: int = 1000, timeout: float = 30.0) -> None:
        super().__init__(logger, size, timeout)
        self._mistake: BadValue | None = None

    def open(self, run_dir: Callable[[], Path]) -> None:
        """At once, unlike behind a plain queue: a logger that is told nothing else is still opened and
        closed.
        """
        self._begin()
        self._put("open", run_dir)

    def _put(self, method: str, *given: Any, always: bool = False) -> None:
        super()._put(method, *given, always=always)
        if self._patience <= 0 or self.off or threading.current_thread() is self._thread:
            return
        self._wait(method)
        mistake, self._mistake = self._mistake, None
        if mistake is not None:
            raise mistake

    def _wait(self, method: str) -> None:
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not self._records and not self._busy, self._patience)
        self._spend(time.monotonic() - began)
        if self._patience <= 0:
            log.warning(
                "%s is slow (the last call was %s); the run goes on without waiting for it",
                self.label,
                method,
            )

    def _fail(self, method: str, error: BaseException) -> None:
        if not isinstance(error, BadValue):
            super()._fail(method, error)
        elif self._patience > 0:
            self._mistake = error  # raised where the value came from
        else:
            log.warning("%s left out what it was given in %s: %s", self.label, method, error)

    # ---- what it is given: the same as if it were called directly, but its own -----------------------------

    def _kept(self, data: Mapping[str, Any]) -> Any:
        return _own(data)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._put("add_scalar", tag, _own(scalar_value), global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        self._put("add_histogram", tag, _own(values), global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._put("add_text", tag, text_string, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        check_image(tag, img_tensor)
        self._put("add_image", tag, _own(img_tensor), global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self._put("add_figure", tag, figure, global_step)


def _own(value: Any) -> Any:
    """A copy that the training does not change: containers, tensors and arrays; anything else is handed over
    as it is.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _own(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_own(each) for each in value)
    return value
