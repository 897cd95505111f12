"""Real HTTP servers on loopback: one that takes messages, and the ways in which others do not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class Server(ThreadingHTTPServer):
    """Answers with `status` and `headers`, after `release` if it is to hang, and keeps what it got."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, status: int = 200, headers: dict[str, str] | None = None, hangs: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.headers, self.hangs = status, headers or {}, hangs
        self.got: list[tuple[str, str, bytes]] = []
        self.sent: list[dict[str, str]] = []
        """The headers of what it got, by names in lower case."""
        self.busy = threading.Event()
        self.release = threading.Event()

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.got]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self) -> None:
        self.server.busy.set()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.sent.append({name.lower(): value for name, value in self.headers.items()})
        self.server.got.append((self.command, self.path, body))
        if self.server.hangs:
            self.server.release.wait(120)
            return
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(**how: Any) -> Iterator[Server]:
    """A server for the length of a block."""
    server = Server(**how)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        thread.join(60)
        server.server_close()


def nobody_at(path: str = "/") -> str:
    """An address where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}{path}"
