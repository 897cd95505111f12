"""A terminal that a test can read, and modules whose progress is shown."""

from __future__ import annotations

import os
import pty
import threading
import time
from typing import Any

import pytest
from tiny import Net


class Terminal:
    """A real pseudo-terminal to put in place of stderr; `text()` is everything that was written to it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.file = os.fdopen(self.slave, "w", buffering=1)
        self.chunks: list[bytes] = []
        self.reader = threading.Thread(target=self._drain, daemon=True)
        self.reader.start()

    def _drain(self) -> None:
        while True:
            try:
                chunk = os.read(self.master, 65536)
            except OSError:  # Linux says so when the other end is closed
                return
            if not chunk:
                return
            self.chunks.append(chunk)

    def so_far(self) -> str:
        """What has been drawn until now: up to a mark, which is waited for."""
        self.file.write("\0")
        self.file.flush()
        end = time.monotonic() + 60
        while b"\0" not in b"".join(self.chunks) and time.monotonic() < end:
            time.sleep(0.01)
        self.chunks[:] = [b"".join(self.chunks).replace(b"\0", b"")]
        return self.chunks[0].decode()

    def text(self) -> str:
        if not self.file.closed:
            self.file.close()
            self.reader.join(timeout=60)
            os.close(self.master)
        return b"".join(self.chunks).decode()


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("acc", 0.25, prog_bar=True)
        self.log("hidden", 0.75)
        return super().training_step(batch, batch_idx)


def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
