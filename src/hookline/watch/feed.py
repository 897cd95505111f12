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
        self._born = secrets.token_hex(4)
        self._news = threading.Condition()
        self._looking = threading.Lock()
        self._number = 0
        self._parts: dict[str, str] = {}
        """As JSON, which is compared and sent."""
        self._changed: dict[str, int] = {}
        self._watchers = 0
        self._ended = False
        self._told_at = time.monotonic()
        self._was_running: bool | None = None
        self._take({**page_data([self._run.run]), "stuck": ""})

    # ---- keeping it fresh ----------------------------------------------------------------------------------

    def keep_fresh(self) -> None:
        """Update while there are viewers, and sleep while there are none, until `end` is called."""
        pause = EVERY
        while True:
            with self._news:
                self._news.wait_for(lambda: self._watchers or self._ended)
                if self._ended:
                    return
            began = time.monotonic()
            self.look()
            pause = max(EVERY, 9 * (time.monotonic() - began))
            with self._news:
                self._news.wait_for(lambda: self._ended, timeout=pause)

    def look(self) -> None:
        """Update all parts. Show a failure on the page, because a page that is not updated must not look
        live.
        """
        with self._looking:
            try:
                job = self._job()
                has_changed = self._was_running not in (
                    None,
                    job["running"],
                )  # a job that was killed writes nothing about it
                self._was_running = job["running"]
                self._take({"job": job})
                self._take({**self._written(has_changed), "stuck": ""})
            except Exception as error:
                self._told_at = -DOUBT  # at the next look all of it again
                self._take(
                    {
                        "stuck": f"What the run has written since cannot be read ({type(error).__name__}: "
                        f"{error})."
                    }
                )

    def _written(self, has_changed: bool) -> dict[str, Any]:
        """Return the data of the run's files, or an empty dictionary if they have not changed."""
        try:
            is_new = self._run.refresh()
        except (OSError, HooklineError):
            return {}  # the directory is gone, or somebody is moving it: what is known is still true
        now = time.monotonic()
        if not is_new and not has_changed and now - self._told_at < DOUBT:
            return {}
        self._told_at = now
        return page_data([self._run.run])

    def _job(self) -> dict[str, Any]:
        try:
            return {"running": True, **ask(self._run_dir, "status", patience=STATUS_TIMEOUT)}
        except HooklineError as error:
            return {"running": False, "why": str(error)}

    def _take(self, data: dict[str, Any]) -> None:
        with self._news:
            texts = {key: embed(value) for key, value in data.items()}
            new = {key: text for key, text in texts.items() if self._parts.get(key) != text}
            if new.keys() <= set(VOLATILE):
                return
            self._number += 1
            self._parts |= new
            self._changed |= dict.fromkeys(new, self._number)
            self._news.notify_all()

    def end(self) -> None:
        """Release all waiting threads."""
        with self._news:
            self._ended = True
            self._news.notify_all()

    # ---- looking at it -------------------------------------------------------------------------------------

    def page(self) -> str:
        """Return the current page."""
        self.look()
        with self._news:
            parts = {**self._parts, "live": embed(f"{self._born}-{self._number}")}
        return fill(_object(parts), names([self._run.run]), LIVE_SCRIPTS, "; connect-src 'self'")

    def join(self) -> None:
        """Add a viewer."""
        with self._news:
            self._watchers += 1
            self._news.notify_all()

    def leave(self) -> None:
        """Remove a viewer."""
        with self._news:
            self._watchers -= 1

    def wait(self, since: str, seconds: float) -> tuple[str, str] | None:
        """Return the changes since a state as (name of the new state, JSON); the JSON is empty if the time
        runs out.

        Return None if the server ends. An unknown state counts as the first one.
        """
        born, _, text = since.partition("-")
        known = int(text) if born == self._born and text.isdecimal() else 0
        with self._news:
            self._news.wait_for(lambda: self._number > known or self._ended, timeout=seconds)
            if self._ended:
                return None
            new = {key: self._parts[key] for key, number in self._changed.items() if number > known}
            return f"{self._born}-{self._number}", _object(new) if new else ""


def _object(parts: dict[str, str]) -> str:
    """Return one JSON object from the texts of its parts, whose names are ours."""
    return "{" + ",".join(f'"{key}":{text}' for key, text in parts.items()) + "}"
