"""What a live page shows, kept fresh while somebody looks: the run's files, and what the running job says of
itself.
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
"""Seconds between two looks. Looking may take a tenth of the time at most: a huge run is looked at less
often.
"""
STATUS_TIMEOUT = 2.0
"""Seconds that a job has to say how it is."""
DOUBT = 30.0
"""Seconds after which even a run that has written nothing is told anew: it may have been silent for too long.
"""
VOLATILE = ("made",)
"""What is new every time and worth nothing by itself."""


class Feed:
    """The newest state of every part of the page, each with the number of the change that brought it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._run = FollowedRun(run_dir)
        self._born = secrets.token_hex(4)
        self._news = threading.Condition()
        self._looking = threading.Lock()
        self._number = 0
        self._parts: dict[str, str] = {}
        """As JSON, because that is compared and sent."""
        self._changed: dict[str, int] = {}
        self._watchers = 0
        self._ended = False
        self._told_at = time.monotonic()
        self._was_running: bool | None = None
        self._take({**page_data([self._run.run]), "stuck": ""})

    # ---- keeping it fresh ----------------------------------------------------------------------------------

    def keep_fresh(self) -> None:
        """Until `end` is called: look while there are watchers, sleep while there are none."""
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
        """See what is new. Whatever goes wrong is said on the page: one that stands still
        must not look live.
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
        """What the run's files tell, if that is anything new."""
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
        """Let everyone who waits go."""
        with self._news:
            self._ended = True
            self._news.notify_all()

    # ---- looking at it -------------------------------------------------------------------------------------

    def page(self) -> str:
        """The page as it is now."""
        self.look()
        with self._news:
            parts = {**self._parts, "live": embed(f"{self._born}-{self._number}")}
        return fill(_object(parts), names([self._run.run]), LIVE_SCRIPTS, "; connect-src 'self'")

    def join(self) -> None:
        """Somebody looks."""
        with self._news:
            self._watchers += 1
            self._news.notify_all()

    def leave(self) -> None:
        """Somebody looks no longer."""
        with self._news:
            self._watchers -= 1

    def wait(self, since: str, seconds: float) -> tuple[str, str] | None:
        """What has changed since then, as (name of this state, JSON); empty JSON if nothing has within so
        many seconds.

        None if the server ends. A state that this server did not name is one before all.
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
    """One JSON object from the texts of its parts, whose names are ours."""
    return "{" + ",".join(f'"{key}":{text}' for key, text in parts.items()) + "}"
