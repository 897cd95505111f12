"""The data of a live page, updated while a browser shows it: the run's files and the status of the running
job.
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from hookline.control.client import ask
from hookline.report.content import names, page_data
from hookline.report.follow import FollowedRun
from hookline.report.page import LIVE_SCRIPTS, embed, fill
from hookline.util.errors import HooklineError

EVERY = 1.0
"""Seconds between two updates. Updates may take a tenth of the time at most, so a huge run is updated less
often.
"""
STATUS_TIMEOUT = 2.0
"""Seconds that a job has to report its status."""
DOUBT = 30.0
"""Seconds after which the page is updated even if the run has written nothing, because it may be stalled."""
VOLATILE = ("made",)
"""Parts that differ every time and do not count as a change."""


class Feed:
    """The newest state of every part of the page, each with the number of its last change."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._run = FollowedRun(run_dir)
        self._server_id = secrets.token_hex(4)
        self._changes = threading.Condition()
        self._updating = threading.Lock()
        self._number = 0
        self._parts: dict[str, str] = {}
        """As JSON, which is compared and sent."""
        self._changed: dict[str, int] = {}
        self._watchers = 0
        self._ended = False
        self._updated_at = time.monotonic()
        self._was_running: bool | None = None
        self._store({**page_data([self._run.run]), "stuck": ""})

    # ---- updates -------------------------------------------------------------------------------------------

    def keep_fresh(self) -> None:
        """Update while there are viewers, and sleep while there are none, until `end` is called."""
        pause = EVERY
        while True:
            with self._changes:
                self._changes.wait_for(lambda: self._watchers or self._ended)
                if self._ended:
                    return
            began = time.monotonic()
            self.update()
            pause = max(EVERY, 9 * (time.monotonic() - began))
            with self._changes:
                self._changes.wait_for(lambda: self._ended, timeout=pause)

    def update(self) -> None:
        """Update all parts. Show a failure on the page, because a page that is not updated must not look
        live.
        """
        with self._updating:
            try:
                job = self._job()
                # a job that was killed does not write that it ended
                has_changed = self._was_running not in (None, job["running"])
                self._was_running = job["running"]
                self._store({"job": job})
                self._store({**self._written(has_changed), "stuck": ""})
            except Exception as error:
                self._updated_at = -DOUBT  # read everything again at the next update
                self._store(
                    {"stuck": f"The run's new records cannot be read ({type(error).__name__}: {error})."}
                )

    def _written(self, has_changed: bool) -> dict[str, Any]:
        """Return the data of the run's files, or an empty dictionary if they have not changed."""
        try:
            is_new = self._run.refresh()
        except (OSError, HooklineError):
            return {}  # the directory was removed or is being moved: keep the known data
        now = time.monotonic()
        if not is_new and not has_changed and now - self._updated_at < DOUBT:
            return {}
        self._updated_at = now
        return page_data([self._run.run])

    def _job(self) -> dict[str, Any]:
        try:
            return {"running": True, **ask(self._run_dir, "status", patience=STATUS_TIMEOUT)}
        except HooklineError as error:
            return {"running": False, "why": str(error)}

    def _store(self, data: dict[str, Any]) -> None:
        with self._changes:
            texts = {key: embed(value) for key, value in data.items()}
            new = {key: text for key, text in texts.items() if self._parts.get(key) != text}
            if new.keys() <= set(VOLATILE):
                return
            self._number += 1
            self._parts |= new
            self._changed |= dict.fromkeys(new, self._number)
            self._changes.notify_all()

    def end(self) -> None:
        """Release all waiting threads."""
        with self._changes:
            self._ended = True
            self._changes.notify_all()

    # ---- viewers -------------------------------------------------------------------------------------------

    def page(self) -> str:
        """Return the current page."""
        self.update()
        with self._changes:
            parts = {**self._parts, "live": embed(f"{self._server_id}-{self._number}")}
        return fill(_object(parts), names([self._run.run]), LIVE_SCRIPTS, "; connect-src 'self'")

    def join(self) -> None:
        """Add a viewer."""
        with self._changes:
            self._watchers += 1
            self._changes.notify_all()

    def leave(self) -> None:
        """Remove a viewer."""
        with self._changes:
            self._watchers -= 1

    def wait(self, since: str, seconds: float) -> tuple[str, str] | None:
        """Return the changes since a state as (name of the new state, JSON); the JSON is empty if the time
        runs out.

        Return None if the server ends. An unknown state counts as the first one.
        """
        server_id, _, text = since.partition("-")
        known = int(text) if server_id == self._server_id and text.isdecimal() else 0
        with self._changes:
            self._changes.wait_for(lambda: self._number > known or self._ended, timeout=seconds)
            if self._ended:
                return None
            new = {key: self._parts[key] for key, number in self._changed.items() if number > known}
            return f"{self._server_id}-{self._number}", _object(new) if new else ""


def _object(parts: dict[str, str]) -> str:
    """Return one JSON object from the texts of its parts, whose names are ours."""
    return "{" + ",".join(f'"{key}":{text}' for key, text in parts.items()) + "}"
