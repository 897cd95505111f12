"""A user's own logger: waited for while it is quick, left to its queue once it is slow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline.loggers.base import BadValue, Logger, check_image
from hookline.loggers.queued import Queued

log = logging.getLogger("hookline")


class Awaited(Queued):
    """Calls `logger` in a thread of its own and waits for it, so that it is as if it were called directly.

    That ends when its slow calls have cost the run `PATIENCE`: from then on the run goes on without waiting,
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
