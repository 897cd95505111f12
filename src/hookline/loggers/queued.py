"""Call a logger in a thread behind a bounded queue, so that the training does not wait for a slow one."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline.engine.checks import Count, Timeout
from hookline.loggers.base import (
    BadValue,
    ClientLogger,
    Logger,
    check_image,
    copy_values,
    figure_png,
    number,
    numbers,
    pixels,
    png_pixels,
)
from hookline.loggers.jsonl import jsonable
from hookline.util.errors import OptionError
from hookline.util.snapshot import UPLOADS, remove_if_empty, remove_snapshot, take_snapshot
from hookline.util.text import list_some, printable

log = logging.getLogger("hookline")

QueuedCall = tuple[str, tuple[Any, ...]]
QUEUE_BYTES = 256 * 2**20
ASKED = ("client", "position")
"""Requests to the logger that return a value, for which the caller waits."""
NO_RECORDS = ("", "open", *ASKED, "resume", "begin_afresh", "close")
"""Calls in the queue that are not records."""
QUEUE_TIMEOUT = 1.0
"""Seconds that a run waits for a logger, over all slow calls."""
QUICK = 0.01
"""Seconds up to which a call does not count as slow."""
UPLOAD_TIMEOUT = 600.0
"""Seconds that the end of a run waits for a logger to which it has passed checkpoints."""
MOST_WAITING = 5
"""Checkpoints that wait for their upload. One more replaces the oldest, so that they do not fill the disk."""
UPLOAD_PATIENCE = 100
"""The factor of the size of the queue while an artifact is uploaded, which may take minutes."""


class Queued(Logger):
    """Passes every record to a logger in a thread.

    Records that exceed the queue are dropped and counted. A failure is reported once and disables the logger.
    Values are copied into the queue, so the training may change them.

    logger: the logger. size: records that the queue holds, besides 256 MiB of arrays, tensors and text.
    timeout: seconds that closing takes at most; records that are not written by then are lost. waits: wait
    for each call, as if the logger were called directly, and pass the logged values unconverted. When its
    slow calls have taken `QUEUE_TIMEOUT` seconds, it stops waiting until the next run.
    """

    def __init__(
        self, logger: Logger, size: int = 1000, timeout: float = 30.0, *, waits: bool = False
    ) -> None:
        if not isinstance(logger, Logger) or isinstance(logger, Queued):
            raise OptionError(f"Queued(logger={logger!r}) takes one logger.", option="logger", value=logger)
        Count(1)("size", size)
        Timeout(0.001)("timeout", timeout)
        self.logger, self.size, self.timeout, self.waits = logger, size, timeout, waits
        self.tells_rows_apart, self.artifacts = logger.tells_rows_apart, logger.artifacts
        self.dropped = 0
        """Records of this run that were dropped because the queue was full."""
        self.off = False
        """Whether it failed or hung, and is disabled."""
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._run_dir: Callable[[], Path] | None = None
        self._records: deque[QueuedCall] = deque()
        self._bytes = 0
        self._busy = ""
        self._patience = QUEUE_TIMEOUT
        self._bad_value: BadValue | None = None
        self._changed = threading.Condition()
        self._here: Callable[[], Path] | None = None
        """Makes the directory of the run, in which snapshots of artifacts are held."""
        self._uploads: Path | None = None
        self._serial = 0
        self._has_checkpoints = False

    @property
    def label(self) -> str:
        return self.logger.label

    # ---- in the training's thread --------------------------------------------------------------------------

    def open(self, run_dir: Callable[[], Path]) -> None:
        """Start a run. The first record starts the thread, unless the logger is waited for.

        A logger whose thread still hangs in an earlier run stays off.
        """
        if self._thread is not None and not self._abandoned:
            self.close()
        self.dropped, self._patience = 0, QUEUE_TIMEOUT
        self._here, self._uploads, self._has_checkpoints = run_dir, None, False
        if self._abandoned and self._thread is not None and not self._thread.is_alive():
            self._abandoned, self._thread = False, None
        self.off = self._abandoned
        if self.off:
            log.warning("%s still hangs in an earlier run and stays switched off", self.label)
        if self.waits:
            self._put("open", run_dir)  # now, so that it is opened and closed even without a record
        else:
            self._run_dir = run_dir

    def _put(self, method: str, *given: Any, always: bool = False) -> None:
        if self.off:
            return
        if self._thread is None:
            self._start()
        self._enqueue(method, given, always)
        if self.waits and self._patience > 0 and threading.current_thread() is not self._thread:
            self._await_calls(method)

    def _enqueue(self, method: str, given: tuple[Any, ...], always: bool) -> None:
        weight = _byte_count(given)
        with self._changed:
            size = self.size * (UPLOAD_PATIENCE if self._busy == "log_artifact" else 1)
            full = len(self._records) >= size or (self._bytes and self._bytes + weight > QUEUE_BYTES)
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

    def _await_calls(self, method: str) -> None:
        """Wait until all calls are done, or for as long as slow calls may take; raise for a refused value."""
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
        bad_value, self._bad_value = self._bad_value, None
        if bad_value is not None:
            raise bad_value

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
        return copy_values(data) if self.waits else jsonable(data)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._put(
            "add_scalar",
            tag,
            copy_values(scalar_value) if self.waits else number(tag, scalar_value),
            global_step,
        )

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        copied = copy_values(values) if self.waits else np.array(numbers(tag, values))
        self._put("add_histogram", tag, copied, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._put("add_text", tag, text_string if self.waits else str(text_string), global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        check_image(tag, img_tensor)
        image = copy_values(img_tensor) if self.waits else pixels(tag, img_tensor).transpose(2, 0, 1).copy()
        self._put("add_image", tag, image, global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        """Draw the figure here unless the call is waited for: matplotlib is not thread-safe, and the caller
        may close the figure.
        """
        if self.waits:
            self._put("add_figure", tag, figure, global_step)
        elif isinstance(self.logger, ClientLogger) and not self.off:
            self._put("add_drawn_figure", tag, figure_png(tag, figure), global_step)
        elif not self.off:
            self._put("add_image", tag, png_pixels(figure_png(tag, figure)), global_step)

    def log_artifact(
        self,
        path: Path | str,
        name: str,
        kind: str = "file",
        metadata: Mapping[str, Any] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """Hold a snapshot until the logger has it, because checkpoints are removed and files change."""
        if self.off or type(self.logger).log_artifact is Logger.log_artifact or self._here is None:
            return
        try:
            held = self._hold(Path(path))
        except OSError as error:
            log.warning("%s does not get %s: %s", self.label, printable(path), error)
            return
        self._has_checkpoints |= kind == "checkpoint"
        self._put("log_artifact", held, name, kind, dict(metadata or {}), tuple(aliases), always=True)
        if kind == "checkpoint":
            self._drop_oldest_checkpoint()

    def _hold(self, path: Path) -> Path:
        """Return a snapshot of a file or directory, under its own name."""
        assert self._here is not None
        if self._uploads is None:
            self._uploads = self._here().resolve() / UPLOADS
            for left in self._uploads.glob(f"{self.label}-*"):  # of a process that was killed
                if not left.name.startswith(f"{self.label}-{os.getpid()}-"):
                    shutil.rmtree(left, ignore_errors=True)
        self._serial += 1
        held = self._uploads / f"{self.label}-{os.getpid()}-{id(self)}-{self._serial}" / path.name
        left_out = take_snapshot(path, held)
        if left_out:
            log.warning(
                "%s gets %s without %s: only plain files and folders can be copied.",
                self.label,
                printable(path),
                list_some(map(printable, left_out)),
            )
        return held

    def _drop_oldest_checkpoint(self) -> None:
        """Give up the oldest waiting checkpoint if too many wait."""
        with self._changed:
            waiting = [
                each for each in self._records if each[0] == "log_artifact" and each[1][2] == "checkpoint"
            ]
            if len(waiting) <= MOST_WAITING:
                return
            self._records.remove(waiting[0])
            self._bytes -= _byte_count(waiting[0][1])
        held = waiting[0][1][0]
        log.warning(
            "%s does not get the checkpoint %s: %d newer ones wait for their upload.",
            self.label,
            printable(held.name),
            MOST_WAITING,
        )
        remove_snapshot(held.parent)

    def has_logged(self, checkpoint: str, run_dir: Path) -> bool:
        return self.logger.has_logged(checkpoint, run_dir)

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

    def discard(self) -> None:
        if self._thread is not None:  # else nothing was written
            self._put("discard", always=True)

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
        timeout = max(self.timeout, UPLOAD_TIMEOUT if self._has_checkpoints else 0.0)
        thread.join(timeout)
        self._join_or_abandon(thread, timeout)
        if self._uploads is not None:
            remove_if_empty(self._uploads)
        if self.dropped:
            log.warning("%s could not keep up: %s records were dropped", self.label, self.dropped)

    def _join_or_abandon(self, thread: threading.Thread, timeout: float) -> None:
        """Forget a thread that has ended, or abandon one that hangs."""
        if not thread.is_alive():
            self._thread = None
            return
        with self._changed:
            lost = sum(
                method not in NO_RECORDS for method in (self._busy, *(method for method, _ in self._records))
            )
            self.off = self._abandoned = True
            given_up, self._records = self._records, deque([("close", ())])  # for when the call returns
        for call in given_up:
            _release(*call)
        log.warning("%s did not finish within %s s: %s records are given up", self.label, timeout, lost)

    # ---- in its own thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = ""
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._records)
                method, given = self._records.popleft()
                self._bytes -= _byte_count(given)
                self._busy = method
            if method == "close" and self.off:
                with contextlib.suppress(Exception):
                    self.logger.close()
            elif not self.off:
                self._hand_over(method, given)
            _release(method, given)
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
        if self.waits and isinstance(error, BadValue):
            if self._patience > 0:
                self._bad_value = error  # raised in the caller's thread
            else:
                log.warning("%s skipped a value in %s: %s", self.label, method, error)
            return
        self.off = True
        log.warning("%s failed in %s and is switched off for this run", self.label, method, exc_info=error)


def _byte_count(given: Any) -> int:
    """Return the bytes of arrays, tensors and text, also in containers, without other values."""
    if isinstance(given, torch.Tensor):
        return given.element_size() * given.numel()  # a sparse one has no `nbytes`
    if isinstance(given, np.ndarray):
        return given.nbytes
    if isinstance(given, list | tuple | Mapping):
        return sum(map(_byte_count, given.values() if isinstance(given, Mapping) else given))
    return len(given) if isinstance(given, str | bytes) else 0


def _release(method: str, given: tuple[Any, ...]) -> None:
    """Remove the snapshot of an artifact that was handed over or given up."""
    if method == "log_artifact":
        remove_snapshot(given[0].parent)
