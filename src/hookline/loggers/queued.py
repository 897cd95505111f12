"""Call a logger in a thread behind a bounded queue, so that the training does not wait for it."""

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
"""Requests to the logger that return a value, for which the caller waits."""
NO_RECORDS = ("", "open", *ASKED, "resume", "begin_afresh", "close")
"""Calls in the queue that are not records."""
QUEUE_TIMEOUT = 1.0
"""Seconds that a run waits for a logger, over all slow calls."""
QUICK = 0.01
"""Seconds up to which a call does not count as slow."""


class Queued(Logger):
    """Passes every record to `logger` in a thread.

    The queue holds `size` records, and 256 MiB of arrays, tensors and text; records that exceed it are
    dropped and counted. Closing takes at most `timeout` seconds; records that are not written by then are
    lost. A failure is reported once and disables the logger. Values are copied into the queue, so the
    training may change them.
    """

    def __init__(self, logger: Logger, size: int = 1000, timeout: float = 30.0) -> None:
        if not isinstance(logger, Logger) or isinstance(logger, Queued):
            raise OptionError(f"Queued(logger={logger!r}) takes one logger.", option="logger", value=logger)
        Count(1)("size", size)
        Timeout(0.001)("timeout", timeout)
        self.logger, self.size, self.timeout = logger, size, timeout
        self.tells_rows_apart = logger.tells_rows_apart
        self.dropped = 0
        """Records of this run that were dropped because the queue was full."""
        self.off = False
        """Whether it failed or hung, and is disabled."""
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
        """Start a run. The first record starts the thread."""
        if self._thread is not None and not self._abandoned:
            self.close()
        self._run_dir = run_dir
        self._begin()

    def _begin(self) -> None:
        """Enable the logger for a new run, unless its thread still hangs in an earlier one."""
        self.dropped, self._patience = 0, QUEUE_TIMEOUT
        if self._abandoned and self._thread is not None and not self._thread.is_alive():
            self._abandoned, self._thread = False, None
        self.off = self._abandoned
        if self.off:
            log.warning("%s still hangs in an earlier run and stays switched off", self.label)

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
        if type(self.logger).log_event is not Logger.log_event:  # few loggers support it
            self._put("log_event", kind, self._snapshot(data))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._put("log_hyperparams", self._snapshot(params))

    def _snapshot(self, data: Mapping[str, Any]) -> Any:
        """Return a copy of data that may change."""
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
        """Draw the figure here, because matplotlib is not thread-safe and the caller may close it."""
        if not self.off:
            self._put("add_image", tag, picture(tag, figure), global_step)

    @property
    def client(self) -> Any:
        """Wait for the logger's client and return it, or None if the logger is off or too slow."""
        answer, arrived = self._ask("client")
        arrived.wait(self.timeout)
        return answer[0] if answer else None

    def position(self) -> Any:
        """Return the logger's position after the queued records, or None if it has none or is too slow."""
        if self._patience <= 0 or type(self.logger).position is Logger.position:
            return None
        if self._thread is None:  # after the run, no thread uses the logger
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
        """Return a list for the answer, and the event that is set when it is there."""
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
        self._join_or_abandon(thread)
        if self.dropped:
            log.warning("%s could not keep up: %s records were dropped", self.label, self.dropped)

    def _join_or_abandon(self, thread: threading.Thread) -> None:
        """Forget a thread that has ended, or abandon one that hangs."""
        if not thread.is_alive():
            self._thread = None
            return
        with self._changed:
            lost = sum(
                method not in NO_RECORDS for method in (self._busy, *(method for method, _ in self._records))
            )
            self.off = self._abandoned = True
            self._records = deque([("close", ())])  # for when the call returns
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
        except BaseException as error:  # also SystemExit, so that a client cannot end the program
            self._fail(method, error)

    def _fail(self, method: str, error: BaseException) -> None:
        self.off = True
        log.warning("%s failed in %s and is switched off for this run", self.label, method, exc_info=error)


def _weight(given: Any) -> int:
    """Return the bytes of arrays, tensors and text, also in containers, without other values."""
    if isinstance(given, torch.Tensor):
        return given.element_size() * given.numel()  # a sparse one has no `nbytes`
    if isinstance(given, np.ndarray):
        return given.nbytes
    if isinstance(given, list | tuple | Mapping):
        return sum(map(_weight, given.values() if isinstance(given, Mapping) else given))
    return len(given) if isinstance(given, str) else 0


class Awaited(Queued):
    """Calls `logger` in a thread and waits for each call, as if it were called directly.

    When its slow calls have taken `QUEUE_TIMEOUT` seconds, it stops waiting until the next run, as `Queued`.
    It passes the logged values unconverted, tensors as detached copies.
    """

    def __init__(self, logger: Logger, size: int = 1000, timeout: float = 30.0) -> None:
        super().__init__(logger, size, timeout)
        self._bad_value: BadValue | None = None

    def open(self, run_dir: Callable[[], Path]) -> None:
        """Open the logger now, so that it is opened and closed even without a record."""
        self._begin()
        self._put("open", run_dir)

    def _put(self, method: str, *given: Any, always: bool = False) -> None:
        super()._put(method, *given, always=always)
        if self._patience <= 0 or self.off or threading.current_thread() is self._thread:
            return
        self._wait(method)
        bad_value, self._bad_value = self._bad_value, None
        if bad_value is not None:
            raise bad_value

    def _wait(self, method: str) -> None:
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not self._records and not self._busy, self._patience)
        self._spend(time.monotonic() - began)
        if self._patience <= 0:
            log.warning(
                "%s is slow (the last call was %s); the run continues without waiting for it",
                self.label,
                method,
            )

    def _fail(self, method: str, error: BaseException) -> None:
        if not isinstance(error, BadValue):
            super()._fail(method, error)
        elif self._patience > 0:
            self._bad_value = error  # raised in the caller's thread
        else:
            log.warning("%s skipped a value in %s: %s", self.label, method, error)

    # ---- values: unconverted copies ------------------------------------------------------------------------

    def _snapshot(self, data: Mapping[str, Any]) -> Any:
        return _copied(data)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._put("add_scalar", tag, _copied(scalar_value), global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        self._put("add_histogram", tag, _copied(values), global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._put("add_text", tag, text_string, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        check_image(tag, img_tensor)
        self._put("add_image", tag, _copied(img_tensor), global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self._put("add_figure", tag, figure, global_step)


def _copied(value: Any) -> Any:
    """Return a copy of containers, tensors and arrays, and any other value itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value
