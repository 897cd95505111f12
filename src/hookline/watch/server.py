"""The server of `hookline watch`: on loopback, for one browser, closed to every other page and user."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import threading
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hookline.control.client import ask
from hookline.util.errors import HooklineError, OptionError
from hookline.util.processes import join
from hookline.watch.feed import Feed

HOME = "127.0.0.1"
OWN_NAMES = (HOME, "localhost")
LONGEST_REQUEST = 10_000
KEEP_ALIVE = 15.0
"""Seconds after which something is always sent, so that a closed browser is detected."""
COMMANDS = {
    "enable": ("hook",),
    "disable": ("hook",),
    "every": ("hook", "interval"),
    "checkpoint": (),
    "stop": (),
    "attach": ("file", "name"),
    "detach": ("hook",),
}
NOTHING = "This page does not exist."
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
    """Serves the page about one run until `close`."""

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
                raise Refusal(404, NOTHING)

    def do_POST(self) -> None:
        """Run a command of the page."""
        with self._refusing():
            self._check_host()
            if self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
                raise Refusal(403, "Only the page itself may send this request.")
            resource = self._resource(self.path)
            self._check_same_page()
            if resource != "control":
                raise Refusal(404, NOTHING)
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
            raise Refusal(404, NOTHING)
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
            or int(length) > LONGEST_REQUEST
        ):
            raise Refusal(400, "A request must be a short JSON object.")
        request: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(self.rfile.read(int(length)))
        if (
            not isinstance(request, dict)
            or not isinstance(request.get("command"), str)
            or request["command"] not in COMMANDS
        ):
            raise Refusal(400, f"A request must have a command: {', '.join(COMMANDS)}.")
        return {key: request[key] for key in ("command", *COMMANDS[request["command"]]) if key in request}

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
