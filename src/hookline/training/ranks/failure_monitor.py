"""When one rank fails, all ranks end: each logs within a second which rank failed and why, and exits a few
seconds later.

A failing rank writes a message to the store before its own teardown begins. The other ranks mostly fail by
themselves, at the next collective. If a rank does not, one of its threads ends the process; that thread needs
neither the main thread nor the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from hookline.distributed.comm import MAX_MESSAGE, Ranks, wait_for_all_ranks
from hookline.reliability.signals import Signals
from hookline.reliability.stacks import stack_of, waits_for_ranks
from hookline.run.run import Run
from hookline.util.errors import HooklineError, PeerError
from hookline.util.processes import close_in_children, join
from hookline.util.text import error_text

# ---- validate() inside a hook, on several ranks


ASK_AFTER = 1.0
"""Seconds to wait for the other ranks before asking whether they will call validate()."""
PAST_AFTER = 2.0
"""Seconds that a rank waits in another collective before it answers that it is past this validate()."""
PAUSE, LONG_PAUSE = 0.005, 0.1


class NestedValidation:
    """Make validate() inside a hook start on all ranks, or fail if another rank does not call it."""

    def __init__(self, monitor: RankMonitor, store: Any, messages: Any) -> None:
        """Take two connections to the store: `store` for the main thread, `messages` for the other."""
        self.monitor, self.run = monitor, monitor.run
        self.count = 0
        """How often the hooks of this rank have called validate()."""
        self._store, self._messages = store, messages
        self._thread = threading.get_ident()
        self._awaited = self._polls = 0
        self._since: float | None = None

    def begin(self) -> None:
        """Wait until all ranks have called validate(), or one answers that it will not."""
        self.count += 1
        key, began, asked = f"nested/{self.count}", time.monotonic(), False
        self._store.add(key, 1)
        while self._store.add(key, 0) < self.run.strategy.world_size:
            self.monitor.raise_failure()
            if not asked and time.monotonic() - began > ASK_AFTER:
                self.monitor.ask_for_validate(self.count, self.run.boundary.polls)
                asked = True
            if asked and self._store.check([f"{key}/past"]):
                other = self._store.get(f"{key}/past").decode()
                raise HooklineError(
                    f"validate() was called inside a hook on rank {self.run.strategy.rank}, but not on rank "
                    f"{other}, which has continued. It needs all ranks: call it on each of them at the same "
                    "event, not in a hook with ranks = 'zero' and not under `if rank == 0`."
                )
            time.sleep(LONG_PAUSE if asked else PAUSE)

    # ---- in the thread that reads messages -----------------------------------------------------------------

    def receive(self, number: int, polls: int) -> None:
        """Record that a rank waits for this rank's validate() of that number, after so many polls."""
        self._awaited, self._polls, self._since = number, polls, None

    def answer(self) -> None:
        """Answer the waiting rank if this rank is past the place and will not call validate() there."""
        if self.count >= self._awaited:
            return
        if self.run.boundary.polls <= self._polls and not waits_for_ranks(
            stack_of(self._thread), backward=False
        ):  # the main thread is not in a collective, which would be a later one
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        if self.run.boundary.polls > self._polls or now - self._since >= PAST_AFTER:
            self._messages.set(f"nested/{self._awaited}/past", str(self.run.strategy.rank))
            self._awaited = 0


# ---- liveness: notice that a rank has died without a message


GOODBYE = b"."
"""A rank sends it before it closes its connection in good order."""
CONNECT_TIMEOUT = 30.0
"""Seconds in which the next rank can be reached; after that it is not watched."""
log = logging.getLogger("hookline")


class LivenessRing:
    """Connections of the ranks in a ring: each rank notices when its connection to the next one breaks."""

    def __init__(self, rank: int, gather: Callable[[str], list[str]]) -> None:
        """Listen for the rank before this one and connect to the next.

        gather: exchanges the addresses of all ranks. It must raise if a rank dies meanwhile, as a collective
        does: waiting in the store for an address of a dead rank would last until the store's timeout.
        """
        self._incoming: list[socket.socket] = []
        self._wake_reader, self._wake_writer = socket.socketpair()
        close_in_children(self._wake_reader, self._wake_writer)
        self._outgoing: socket.socket | None = None
        self._server: socket.socket | None = None
        try:
            addresses = gather(self._listen(rank))
        except BaseException:
            self.leave()
            raise
        self.next = (rank + 1) % len(addresses)
        if addresses[self.next]:  # else that rank has said why
            self._connect(addresses[self.next])

    def _listen(self, rank: int) -> str:
        """Listen for the rank before this one, and return the address; empty if that is not possible."""
        try:
            host = own_address()
            self._server = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            log.warning("Rank %d cannot be watched (%s): its death is noticed later.", rank, error)
            return ""
        # a copy in a worker process would keep connections open after this process has died
        close_in_children(self._server)
        self._server.setblocking(False)
        return f"{self._server.getsockname()[1]} {host}"

    def _connect(self, address: str) -> None:
        """Connect to the next rank."""
        port, _, host = address.partition(" ")
        try:
            self._outgoing = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT)
            close_in_children(self._outgoing)
            keep_alive(self._outgoing)
        except OSError as error:
            log.warning(
                "Rank %d cannot be watched from here (%s): its death is noticed later.", self.next, error
            )

    def lost(self, seconds: float) -> bool:
        """Wait for so many seconds; return whether the next rank has died meanwhile."""
        sockets = [each for each in (self._wake_reader, self._server, self._outgoing) if each is not None]
        ready, _, _ = select.select(sockets, [], [], seconds)
        if self._server in ready and self._server is not None:
            with contextlib.suppress(OSError):
                self._accept(self._server)
        if self._outgoing is None or self._outgoing not in ready:
            return False
        try:
            received = self._outgoing.recv(1)
        except OSError:
            received = b""
        self._outgoing.close()
        self._outgoing = None
        return received != GOODBYE

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        close_in_children(connection)
        self._incoming.append(connection)

    def wake(self) -> None:
        """End the waiting of `lost`."""
        self._wake_writer.send(GOODBYE)

    def leave(self) -> None:
        """Send GOODBYE and close all sockets."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._accept(self._server)  # a connection that was made after the last `lost`
        for connection in self._incoming:
            with contextlib.suppress(OSError):
                connection.sendall(GOODBYE)
        for endpoint in (*self._incoming, self._outgoing, self._server, self._wake_reader, self._wake_writer):
            if endpoint is not None:
                endpoint.close()


def own_address() -> str:
    """Return the address of this machine in the network of MASTER_ADDR."""
    master = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1")))
    family, kind, protocol, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, but chooses the network interface
        return str(probe.getsockname()[0])


def keep_alive(connection: socket.socket) -> None:
    """Let the system probe the connection every second, and close it after four seconds without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- the monitor


POLL = 0.5
"""Seconds between two reads of the messages."""
RANK_TIMEOUT = 5.0
"""Seconds in which a rank may end by itself after another rank has failed and tears down."""
DEAD_RANK_TIMEOUT = 2.5
"""The same after another rank has died: shorter, because that one does not tear down."""
WAKING = 2.0
"""Seconds before the end of its timeout at which a busy rank is interrupted."""
OWN_TIMEOUT = 7.0
"""Seconds in which a rank that has failed itself may emit on_exception and tear down."""
CLOSING = 1.0
"""Seconds in which the loggers may write their pending records."""
DEATH_REPORT_SECONDS = 3.0
"""Seconds to wait for the message of which rank has died, when this rank has only lost a connection."""
LEAVING = 10.0
"""Seconds in which a call to the store returns, also on a busy machine."""
EXIT_FAILED = 1
DIED = "it died without a message: it was killed, or its machine is gone."
GONE = "it, or the launcher beside it through which the ranks find each other, is gone."


@dataclass(frozen=True, slots=True)
class Failure:
    """Which rank has failed, and why."""

    rank: int
    text: str
    died: bool = False
    """Whether the rank died without reporting the failure itself."""

    def __str__(self) -> str:
        return f"Rank {self.rank} has failed: {self.text}"

    def peer_error(self) -> PeerError:
        """Return the error of another rank."""
        return PeerError(f"{self} This rank cannot continue without it.")


class RankMonitor:
    """Report this rank's failure to the other ranks, and end this rank when another one fails."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.failure: Failure | None = None
        """The first failure of any rank that this rank knows of."""
        self._error: BaseException | None = None
        self._deadline: float | None = None
        self._interrupted = False
        self._known = 0
        self._over = threading.Event()
        self._failed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        run, ranks = self.run, self.run.strategy.ranks
        # a new name for each run: the messages of an earlier run may still be in the store
        self._name = ranks.from_zero(uuid.uuid4().hex)
        # one connection for each thread
        self._store, self._messages = ranks.store(self._name), ranks.store(self._name)
        self._liveness = LivenessRing(ranks.rank, ranks.gather)
        self.nested = NestedValidation(self, self._store, self._messages)
        run.failure_monitor = self
        for watch in (self._watch_next, self._watch_messages):
            thread = threading.Thread(
                target=watch, name=f"hookline failure monitor: {watch.__name__}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._liveness.wake()
        for thread in self._threads:
            thread.join(2 * POLL)
            if thread.is_alive() and self.failure is None:
                wait_at_exit(thread)
        self._liveness.leave()

    # ---- this rank fails -----------------------------------------------------------------------------------

    def report_failure(self, error: BaseException) -> BaseException:
        """Report the failure of this rank to the others. Return the error to raise.

        If it follows from another rank's failure, that is a `PeerError` instead of the error of a lost
        connection, and another error gets a note.
        """
        self._error = error
        self._deadline = time.monotonic() + OWN_TIMEOUT
        if is_lost_connection(error):
            self._failed.wait(DEATH_REPORT_SECONDS)  # the rank before the one that died reports it
        if self.failure is None:
            self.post(failure_text(error))
        elif self.failure.rank != self.run.strategy.rank and not isinstance(error, PeerError):
            if is_lost_connection(error):
                peer = self.failure.peer_error()
                peer.__cause__ = error
                peer.add_note(error.__notes__.pop())  # the last one is the position of this rank
                return peer
            error.add_note(f"{self.failure} This rank could not continue without it.")
        return error

    def post(self, text: str, failed: bool = True) -> None:
        """Write a message for all ranks: a failure, or with failed=False a warning."""
        rank = self.run.strategy.rank
        if failed and self.failure is None:
            self.failure = Failure(rank, text)
            self.run.strategy.ranks.record_failure(text)
            self._deadline = self._deadline or time.monotonic() + OWN_TIMEOUT
        self._write(self._store, {"rank": rank, "text": text, "failed": failed})

    def ask_for_validate(self, number: int, polls: int) -> None:
        """Ask the other ranks whether they will still call validate() for this time."""
        self._write(self._store, {"rank": self.run.strategy.rank, "failed": False, "nested": [number, polls]})

    def _write(self, store: Any, message: dict[str, Any]) -> None:
        try:
            number = store.add("messages", 1)
            store.set(f"message/{number}", json.dumps(message))
        except (RuntimeError, dist.DistError) as error:
            log.warning(
                "The other ranks could not be informed (%s): %s", str(error).partition("\n")[0], message
            )

    def wait_for_all_ranks(self, where: str) -> None:
        """Wait without a time limit until all ranks are here; raise if one has failed."""
        wait_for_all_ranks(self._store, where, self.run.strategy.world_size, self.raise_failure)

    def raise_failure(self) -> None:
        """Raise `PeerError` if another rank has failed and this one is not ending yet."""
        if self.failure is not None and self.run.state.exception is None and not self._over.is_set():
            raise self.failure.peer_error()

    # ---- another rank fails --------------------------------------------------------------------------------

    def _watch_next(self) -> None:
        """Watch the next rank, and end this process at its deadline. Runs in its own thread."""
        while not self._over.is_set():
            if self._liveness.lost(POLL) and not self._over.is_set():
                self._record_failure(Failure(self._liveness.next, DIED, died=True))
                # in a thread, because the store may be gone as well, and a call to it may block for long
                threading.Thread(
                    target=self._report_death, name="hookline failure monitor: report", daemon=True
                ).start()
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                self._end_process()
            if self._deadline is not None and now >= self._deadline - WAKING:
                self._interrupt()

    def _report_death(self) -> None:
        assert self.failure is not None
        self._write(
            self.run.strategy.ranks.store(self._name),
            {"rank": self.failure.rank, "text": self.failure.text, "failed": True, "died": True},
        )

    def _watch_messages(self) -> None:
        """Read the messages of all ranks. Runs in its own thread."""
        while not self._over.wait(POLL):
            try:
                for self._known in range(self._known + 1, self._messages.add("messages", 0) + 1):
                    self._read(json.loads(self._messages.get(f"message/{self._known}")))
                self.nested.answer()
            except (RuntimeError, dist.DistError):
                if self.run.state.status in ("training", "running") and not self._over.is_set():
                    self._record_failure(Failure(0, GONE, died=True))
                return

    def _read(self, message: dict[str, Any]) -> None:
        if message["failed"]:
            self._record_failure(Failure(message["rank"], message["text"], message.get("died", False)))
        elif "nested" in message:
            self.nested.receive(*message["nested"])
        elif message["rank"] != self.run.strategy.rank:
            log.warning("Rank %d reports: %s", message["rank"], message["text"])

    def _record_failure(self, failure: Failure) -> None:
        """Record the first failure, which causes the later ones, and set this rank's deadline."""
        if self.failure is None:
            self.failure = failure
            log.error("%s This rank ends too.", failure)
        if self._deadline is None:
            self._deadline = time.monotonic() + (DEAD_RANK_TIMEOUT if failure.died else RANK_TIMEOUT)
        self._failed.set()

    def _interrupt(self) -> None:
        """Interrupt a busy hook so that it can end in good order: our SIGTERM handler raises `PeerError`."""
        is_ours = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Signals)
        if not self._interrupted and self._error is None and is_ours:
            os.kill(os.getpid(), signal.SIGTERM)
        self._interrupted = True

    def _end_process(self) -> None:
        """Exit the process after its deadline; give the loggers CLOSING seconds to close first."""
        log.error(
            "%s This rank did not end by itself, so its process is ended. Checkpoints that were saved before "
            "are complete.",
            self.failure,
        )
        if self._error is not None:
            traceback.print_exception(self._error)
        closing = threading.Thread(
            target=self.run.state.logger.close, name="hookline failure monitor: close loggers", daemon=True
        )
        closing.start()
        join(closing, CLOSING, "pending records of the loggers are not written")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_FAILED)


# ---- a loop of the user's own, which no thread watches


class RankFailures:
    """Finds the rank that has failed, in a loop that only sees that its connection is lost. All ranks make it
    together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # a new name for each run: the failure of an earlier run may still be in the store
        self._store = ranks.store(ranks.from_zero(uuid.uuid4().hex))
        self._liveness = LivenessRing(ranks.rank, ranks.gather)

    def leave(self) -> None:
        """Leave the other ranks in good order."""
        self._liveness.leave()

    def explain(self, error: BaseException) -> BaseException:
        """Report the failure of this rank to the others. Return the error to raise: a `PeerError` that names
        the failed rank, if this one has only lost its connection.
        """
        if not isinstance(error, Exception) or isinstance(error, PeerError):
            return error
        if not is_lost_connection(error):
            self._post(Failure(self._ranks.rank, failure_text(error)))
            return error
        failure = self._find()
        if failure is None or failure.rank == self._ranks.rank:
            return error
        peer = failure.peer_error()
        peer.__cause__ = error
        return peer

    def _find(self) -> Failure | None:
        """Wait until the failure of a rank is known: by its message, or because its connection is closed."""
        until = time.monotonic() + DEATH_REPORT_SECONDS
        while time.monotonic() < until:
            if self._liveness.lost(LONG_PAUSE):
                died = Failure(self._liveness.next, DIED, died=True)
                self._post(died)
                return died
            try:
                if self._store.check(["failed"]):
                    return Failure(*json.loads(self._store.get("failed")))
            except (RuntimeError, dist.DistError):
                return Failure(0, GONE, died=True)
        return None

    def _post(self, failure: Failure) -> None:
        """Write the failure for all ranks. The first one counts."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.compare_set("failed", "", json.dumps([failure.rank, failure.text, failure.died]))


# ---- errors


def wait_at_exit(thread: threading.Thread) -> None:
    """Let the process end only after this thread has ended.

    A thread that returns from a call to the store while the interpreter shuts down would abort the process.
    """
    atexit.register(join, thread, LEAVING)


def failure_text(error: BaseException) -> str:
    """Return an error with its first note, which names the hook and event, or the position of the run."""
    (kind, text), notes = error_text(error), getattr(error, "__notes__", [])
    return f"{kind}: {text[:MAX_MESSAGE]}{f' ({notes[0]})' if notes else ''}."


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error only says that another rank does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
