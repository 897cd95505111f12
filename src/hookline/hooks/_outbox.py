"""Send requests to a secret address from a thread. A failure there does not affect the run."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import queue
import string
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

from hookline.engine.checks import Count, Timeout
from hookline.util.errors import HookError, OptionError, missing_package

log = logging.getLogger("hookline")


class Secret:
    """An address that repr, dump, copy and pickle do not show; a call returns it."""

    __slots__ = ("_read", "problem")

    def __init__(self, given: Any, option: str = "url") -> None:
        """Read an address, or `env:NAME`. Keep a problem in `problem`: raising here would show the address
        among the variables of this frame.

        option: the name of the option in that text.
        """
        self.problem = ""
        where = f"{option} (not shown, it is a secret)"
        if isinstance(given, str) and given.startswith("env:"):
            where = f"{option}: the environment variable {given.removeprefix('env:')}"
            given = os.environ.get(given.removeprefix("env:"))
        if given is None:
            self.problem = f"{where} is not set."
        elif not isinstance(given, str) or not _is_address(given):
            self.problem = f"{where} must be an address that begins with https:// or http://."
        address = str(given)
        self._read: Callable[[], str] = lambda: address

    def __call__(self) -> str:
        return self._read()

    def __repr__(self) -> str:
        return "<secret>"


class Outbox:
    """Sends requests one after the other from a thread. A failure there does not affect the run."""

    def __init__(self, who: str, address: Secret, timeout: float = 10.0, size: int = 32) -> None:
        if address.problem:
            raise OptionError(f"{who}: {address.problem}")
        Timeout(0.001)(f"{who}: timeout", timeout)
        Count(1)(f"{who}: queue_size", size)
        if importlib.util.find_spec("httpx") is None:
            raise HookError(missing_package(who, "httpx", "webhook"))
        self._address, self._who, self._timeout, self._size = address, who, float(timeout), size
        self._queue: queue.Queue[tuple[str, bytes | None] | None] = queue.Queue(size)
        self._thread: threading.Thread | None = None
        self.failed = self.dropped = 0

    def put(self, method: str, body: bytes | None = None) -> None:
        """Queue a request, or drop it if the queue is full. Never waits."""
        if self._thread is None or not self._thread.is_alive():
            self._queue = queue.Queue(self._size)
            self._thread = threading.Thread(
                target=self._work, args=(self._queue,), name="hookline-outbox", daemon=True
            )
            self._thread.start()
        try:
            self._queue.put_nowait((method, body))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1 and self._size > 1:  # a second heartbeat in the queue is not needed
                log.warning("%s: the queue of messages is full; some are dropped", self._who)

    def close(self) -> None:
        """Wait for queued requests, at most for the timeout of one request."""
        thread, waiting, self._thread = self._thread, self._queue, None
        if thread is None:
            return
        until = time.monotonic() + self._timeout
        try:
            waiting.put(None, timeout=self._timeout)
            thread.join(max(0.0, until - time.monotonic()))
        except queue.Full:
            pass
        if thread.is_alive():
            left = 1  # the request that hangs; the thread ends after it
            with contextlib.suppress(queue.Empty):
                while True:
                    left += waiting.get_nowait() is not None
            log.warning(
                "%s: gave up on messages that could not be sent in %g s: %d are not sent",
                self._who,
                self._timeout,
                left,
            )
            waiting.put(None)

    def _work(self, waiting: queue.Queue[tuple[str, bytes | None] | None]) -> None:
        silence(LOUD)
        client: Any = None  # reused, because setting up TLS takes longer than a request
        while (message := waiting.get()) is not None:
            try:
                client = client or self._make_client()
                problem = self._send(client, *message)
            except Exception as error:
                problem = type(error).__name__  # the text may contain the address
            if not problem:
                continue
            self.failed += 1
            if self.failed == 1:  # once, because the service may be down for days
                log.warning("%s: a message was not delivered (%s); the run continues", self._who, problem)
        if client is not None:
            client.close()

    def _make_client(self) -> Any:
        import httpx

        return httpx.Client(timeout=self._timeout, follow_redirects=False)

    def _send(self, client: Any, method: str, body: bytes | None) -> str:
        """Send a request and return the problem, or an empty string."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        with client.stream(method, self._address(), content=body, headers=headers) as answer:
            if answer.is_redirect:
                return f"answered {answer.status_code}, and redirects are not followed"
            return "" if answer.is_success else f"answered {answer.status_code}"


LOUD = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
)
"""Loggers that log every request with its address."""
_quiet = threading.local()


def silence(loggers: Iterable[str]) -> None:
    """Drop what these loggers log in this thread: it may name an address, and is reported in our words."""
    _quiet.here = True
    for name in loggers:
        logging.getLogger(name).addFilter(_not_ours)


def _not_ours(record: logging.LogRecord) -> bool:
    return not getattr(_quiet, "here", False)


def _is_address(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and not set(text) & set(string.whitespace)
        )
    except ValueError:
        return False
