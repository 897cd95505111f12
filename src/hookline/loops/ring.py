"""Who notices that a rank has died without a word: each one holds a connection to the next, which the system
closes with it.

Nothing is sent over it. A process that is killed closes it at once; a machine that is gone stops answering
the system's own keep-alive probes; a process that is merely busy, even if it holds the interpreter's lock for
minutes, keeps it open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from typing import Any

from hookline.processes import close_in_children

GOODBYE = b"."
"""What a rank sends when it leaves in good order."""
MEETING = 30.0
"""Seconds in which the next rank can be reached, or it is done without."""
log = logging.getLogger("hookline")


class Ring:
    """This rank's door, at which the rank before it has called, and its line to the rank after it."""

    def __init__(self, rank: int, world_size: int, board: Any) -> None:
        """`board`: the store through which ranks find each other's doors."""
        self.next = (rank + 1) % world_size
        self._callers: list[socket.socket] = []
        self._bell, self._rope = socket.socketpair()
        close_in_children(self._bell, self._rope)
        self._line: socket.socket | None = None
        self._door: socket.socket | None = None
        try:
            host = own_address()
            self._door = socket.create_server((host, 0), family=_family(host))
            close_in_children(
                self._door
            )  # while a worker holds a copy, nothing tells that this process is gone
            self._door.setblocking(False)
            board.set(f"door/{rank}", f"{self._door.getsockname()[1]} {host}")
            port, _, other = board.get(f"door/{self.next}").decode().partition(" ")
            self._line = socket.create_connection((other, int(port)), timeout=MEETING)
            close_in_children(self._line)
            keep_alive(self._line)
        except (OSError, RuntimeError) as error:
            log.warning(
                "Rank %d cannot be watched from here (%s): should it be killed, it is noticed later.",
                self.next,
                error,
            )

    def lost(self, seconds: float) -> bool:
        """Wait so long; whether the next rank has died meanwhile."""
        heard = [each for each in (self._bell, self._door, self._line) if each is not None]
        ready, _, _ = select.select(heard, [], [], seconds)
        if self._door in ready and self._door is not None:
            with contextlib.suppress(OSError):
                self._let_in(self._door)
        if self._line is None or self._line not in ready:
            return False
        try:
            said = self._line.recv(1)
        except OSError:
            said = b""
        self._line.close()
        self._line = None
        return said != GOODBYE

    def _let_in(self, door: socket.socket) -> None:
        caller, _ = door.accept()
        close_in_children(caller)
        self._callers.append(caller)

    def wake(self) -> None:
        """End the waiting."""
        self._rope.send(GOODBYE)

    def leave(self) -> None:
        """Say goodbye and close everything."""
        if self._door is not None:
            with contextlib.suppress(OSError):
                self._let_in(self._door)  # one that called while nobody was looking
        for each in self._callers:
            with contextlib.suppress(OSError):
                each.sendall(GOODBYE)
        for open_one in (*self._callers, self._line, self._door, self._bell, self._rope):
            if open_one is not None:
                open_one.close()


def own_address() -> str:
    """The address by which this machine is reached from where the ranks meet."""
    meeting = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1")))
    family, kind, protocol, _, address = socket.getaddrinfo(*meeting, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, but settles the way
        return str(probe.getsockname()[0])


def keep_alive(line: socket.socket) -> None:
    """Let the system ask every second, and give up after four without an answer."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
