"""`hookline watch`: the data of a live page, and its server on loopback, for one browser, closed to every
other page and user.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import threading
import time
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hookline.control.client import COMMAND_ARGUMENTS, ask
from hookline.report.page import LIVE_SCRIPTS, embed, fill, page_data, short_names
from hookline.report.reader import FollowedRun
from hookline.util.errors import HooklineError, OptionError
from hookline.util.processes import join

UPDATE_INTERVAL = 1.0
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
        pause = UPDATE_INTERVAL
        while True:
            with self._changes:
                self._changes.wait_for(lambda: self._watchers or self._ended)
                if self._ended:
                    return
            began = time.monotonic()
            self.update()
            pause = max(UPDATE_INTERVAL, 9 * (time.monotonic() - began))
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
        return fill(_join_json(parts), short_names([self._run.run]), LIVE_SCRIPTS, "; connect-src 'self'")

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
            return f"{self._server_id}-{self._number}", _join_json(new) if new else ""


def _join_json(parts: dict[str, str]) -> str:
    """Return one JSON object from the texts of its parts, whose names are ours."""
    return "{" + ",".join(f'"{key}":{text}' for key, text in parts.items()) + "}"


# ---- the server --------------------------------------------------------------------------------------------


HOME = "127.0.0.1"
OWN_NAMES = (HOME, "localhost")
REQUEST_BYTES = 10_000
KEEP_ALIVE = 15.0
"""Seconds after which something is always sent, so that a closed browser is detected."""
PAGE_COMMANDS = {name: given for name, given in COMMAND_ARGUMENTS.items() if name != "status"}
"""The page gets the status with its updates."""
NO_SUCH_PAGE = "This page does not exist."
ONCE = (
    "Open the address that hookline watch printed. It works once: the browser that opened it was sent to "
    "another address. Start hookline watch again for a new one."
)
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Refusal(Exception):
    """A refused request, with its HTTP status code and the reason."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Watch:
    """Serves the page about one run until `close`.

    run_dir: the run's directory. port: 0: any free port.
    """

    def __init__(self, run_dir: Path, port: int = 0) -> None:
        self.run_dir = run_dir
        self.feed = Feed(run_dir)
        self.token: str = secrets.token_urlsafe(32)
        """Opens the page once; the browser that used it then has the cookie and knows the secret path."""
        self.cookie = secrets.token_urlsafe(32)
        self.room = f"/{secrets.token_urlsafe(16)}/"
        """The secret path of all pages. Cookies do not depend on the port: a browser sends them to every
        server of this machine unless they have a path, and the other servers cannot guess this one.
        """
        self._using_token = threading.Lock()
        try:
            self._server = _Server((HOME, port), _Handler)
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"--port {port} cannot be used: {getattr(error, 'strerror', None) or error}."
            ) from None
        self._server.watch = self
        self.port: int = self._server.server_address[1]

    @property
    def url(self) -> str:
        """Return the address of the page for the first visit."""
        return f"http://{HOME}:{self.port}/?token={self.token}"

    @property
    def cookie_name(self) -> str:
        """Return a name with the port, so that two of these servers do not share a cookie."""
        return f"hookline-{self.port}"

    def serve(self) -> None:
        """Serve until `close` is called from another thread, or Ctrl-C."""
        fresh = threading.Thread(target=self.feed.keep_fresh, name="hookline watch", daemon=True)
        fresh.start()
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self.feed.end()
            self._server.server_close()
            join(fresh, 5.0)

    def close(self) -> None:
        """End `serve`."""
        self.feed.end()
        self._server.shutdown()

    def use(self, token: str) -> bool:
        """Return whether this token opens the page; it does so once."""
        with self._using_token:
            fits = bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())
            if fits:
                self.token = ""
            return fits

    def knows(self, cookie: str) -> bool:
        """Return whether this cookie was issued by this server."""
        return hmac.compare_digest(cookie.encode(), self.cookie.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    watch: Watch

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection."""


class _Handler(BaseHTTPRequestHandler):
    server_version = "hookline"
    sys_version = ""
    timeout = 60

    @property
    def watch(self) -> Watch:
        """Return the `Watch` of this server."""
        assert isinstance(self.server, _Server)
        return self.server.watch

    def do_GET(self) -> None:
        """Send the page or its updates."""
        with self._refusing():
            self._check_host()
            request = urlsplit(self.path)
            query = parse_qs(request.query)
            if request.path == "/" and "token" in query:
                self._accept(query["token"][0])
                return
            resource = self._resource(request.path)
            if resource == "":
                self._send(200, "text/html; charset=utf-8", self.watch.feed.page().encode("utf-8", "replace"))
            elif resource == "feed":
                self._check_same_page()
                self._push(self.headers.get("Last-Event-ID") or query.get("from", [""])[0])
            else:
                raise Refusal(404, NO_SUCH_PAGE)

    def do_POST(self) -> None:
        """Run a command of the page."""
        with self._refusing():
            self._check_host()
            if self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
                raise Refusal(403, "Only the page itself may send this request.")
            resource = self._resource(self.path)
            self._check_same_page()
            if resource != "control":
                raise Refusal(404, NO_SUCH_PAGE)
            answer = self._control(self._body())
            self._send(200, "application/json", json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the first address contains the token."""

    # ---- access --------------------------------------------------------------------------------------------

    def _check_host(self) -> None:
        """Refuse another host name, because a foreign name that resolves to this machine would open our page
        to a foreign page.
        """
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        if host not in OWN_NAMES:
            raise Refusal(403, "The host name of this request is not allowed.")

    def _resource(self, path: str) -> str:
        """Return the requested resource; refuse a browser without the secret path and the cookie."""
        watch = self.watch
        if path == "/":
            raise Refusal(403, ONCE)
        room = path[: len(watch.room)]
        if not hmac.compare_digest(room.encode(), watch.room.encode()):
            raise Refusal(404, NO_SUCH_PAGE)
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(watch.cookie_name)
        except CookieError:
            found = None
        if found is None or not watch.knows(found.value):
            raise Refusal(403, ONCE)
        return path.removeprefix(watch.room)

    def _check_same_page(self) -> None:
        """Refuse requests from other pages. Browsers send the header; another client with the cookie may
        leave it out.
        """
        if self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise Refusal(403, "Only the page itself may send this request.")

    def _accept(self, token: str) -> None:
        watch = self.watch
        if not watch.use(token):
            raise Refusal(403, ONCE)
        cookie = f"{watch.cookie_name}={watch.cookie}; Path={watch.room}; HttpOnly; SameSite=Strict"
        self._send(303, "text/plain", b"", {"Location": watch.room, "Set-Cookie": cookie})

    # ---- answers -------------------------------------------------------------------------------------------

    def _push(self, since: str) -> None:
        feed = self.watch.feed
        self._begin(200, "text/event-stream", {})
        feed.join()
        try:
            while (changes := feed.wait(since, KEEP_ALIVE)) is not None:
                since, body = changes
                text = f"id: {since}\nevent: update\ndata: {body}\n\n" if body else ": keep alive\n\n"
                self.wfile.write(text.encode())
                self.wfile.flush()
        except OSError:
            pass  # the browser closed the connection
        finally:
            feed.leave()

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if (
            self.headers.get_content_type() != "application/json"
            or not length.isdecimal()
            or int(length) > REQUEST_BYTES
        ):
            raise Refusal(400, "A request must be a short JSON object.")
        request: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(self.rfile.read(int(length)))
        if (
            not isinstance(request, dict)
            or not isinstance(request.get("command"), str)
            or request["command"] not in PAGE_COMMANDS
        ):
            raise Refusal(400, f"A request must have a command: {', '.join(PAGE_COMMANDS)}.")
        return {
            key: request[key] for key in ("command", *PAGE_COMMANDS[request["command"]]) if key in request
        }

    def _control(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = ask(self.watch.run_dir, **request)
        except HooklineError as error:
            return {"error": str(error)}
        threading.Thread(target=self.watch.feed.update, daemon=True).start()  # the page sees it at once
        return answer

    @contextlib.contextmanager
    def _refusing(self) -> Any:
        try:
            yield
        except Refusal as refusal:
            self._send(refusal.code, "text/plain; charset=utf-8", str(refusal).encode())
        except OSError:
            pass  # the browser closed the connection
        except Exception as error:  # an empty answer would not show what is wrong
            self._send(
                500,
                "text/plain; charset=utf-8",
                f"An error in Hookline: {type(error).__name__}: {error}".encode(),
            )

    def _begin(self, code: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": kind, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, code: int, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self._begin(code, kind, {"Content-Length": str(len(body)), **(more or {})})
        self.wfile.write(body)
