"""Write a small file, or call an address, as long as the run completes batches."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from hookline.engine.checks import check_file, refused
from hookline.engine.filters import SECONDS, parse_interval
from hookline.engine.hook import Hook
from hookline.hooks._outbox import Outbox, Secret
from hookline.util.errors import HookError, OptionError

log = logging.getLogger("hookline")


class Heartbeat(Hook):
    """Shows to other programs that a run is alive and how far it is. A run that hangs sends no heartbeat.

    The file is replaced atomically. A thread calls the address, which is kept secret. A failure of either
    does not affect the run.
    """

    tier = "builtin"
    observes = True
    ranks = "zero"
    on_error = "warn"

    def __init__(
        self,
        path: str | Path | None = None,
        url: str | None = None,
        every: str | float = "60 seconds",
        timeout: float = 10.0,
    ) -> None:
        """`path`: the file, by default `heartbeat.json` unless there is a `url`; relative to the run's
        directory.

        `url`: an address to GET, or `env:NAME` to take it from an environment variable. `every`: seconds, or
        '5 minutes'. `timeout`: seconds for a request.
        """
        address = None if url is None else Secret(url)
        url = None  # an error below may be shown with the variables of this function
        self._outbox = None if address is None else Outbox("Heartbeat", address, timeout, size=1)
        if path is not None:
            check_file("Heartbeat: path", path)
        self.every = _interval_seconds(every)
        self.path = (
            Path(path).expanduser()
            if path is not None
            else Path("heartbeat.json")
            if address is None
            else None
        )
        self._file: Path | None = None
        self._next = math.inf
        self._warned = False

    def setup(self, trainer: Any, state: Any) -> None:
        self._warned = False
        self._file = None if self.path is None else trainer.run_dir / self.path
        self._beat(state)

    def on_train_batch_end(self, state: Any, clock: Any = time.monotonic) -> None:
        if clock() >= self._next:
            self._beat(state)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def teardown(self, state: Any) -> None:
        self._beat(state, ping=state.status not in ("error", "interrupted"))
        self._next = math.inf
        if self._outbox is not None:
            self._outbox.close()

    def _beat(self, state: Any, ping: bool = True) -> None:
        self._next = time.monotonic() + self.every
        if self._outbox is not None and ping:
            self._outbox.put("GET")
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            temporary.write_text(json.dumps(self._facts(state)) + "\n")
            os.replace(temporary, self._file)
        except OSError as error:
            if not self._warned:
                log.warning(
                    "Heartbeat: %s cannot be written (%s); the run continues", self._file, error.strerror
                )
            self._warned = True

    def _facts(self, state: Any) -> dict[str, Any]:
        """Return the record without synchronizing with the device."""
        return {
            "time": round(time.time(), 3),
            "every": self.every,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "stage": state.stage,
            "status": state.status,
            "epoch": state.epoch,
            "step": state.step,
            "batches_seen": state.batches_seen,
            "samples_seen": state.samples_seen,
        }


def _interval_seconds(every: Any) -> float:
    if not isinstance(every, bool) and isinstance(every, int | float) and 0 <= every < math.inf:
        return float(every)
    if isinstance(every, str):
        try:
            number, unit = parse_interval(every, "every")
        except HookError as error:
            raise OptionError(f"Heartbeat: {error}", option="every", value=every) from None
        if unit in SECONDS:
            return number * SECONDS[unit]
    raise refused("Heartbeat: every", every, "a time: a number of seconds, or text such as '5 minutes'")
