"""When one rank fails, all end: each hears of it within a second, says who it was and where, and is gone a
few seconds later.

A failing rank leaves a note where all ranks look, before its own teardown begins. Ranks that hear of it
mostly fail by themselves, in the next thing they do together; those that do not are ended. What ends them
needs neither the interpreter's main thread nor the others.
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
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from hookline.distributed.comm import LONGEST, assemble
from hookline.reliability.signals import Signals
from hookline.reliability.stacks import stack_of, waits_for_ranks
from hookline.run.run import Run
from hookline.util.errors import HooklineError, PeerError
from hookline.util.processes import close_in_children, join

# ---- validate() inside a hook, where there are several ranks


ASKING = 1.0
"""Seconds to wait for the others before asking where they are."""
STANDING = 2.0
"""Seconds that a rank has waited for others elsewhere when it is sure that it will not come."""
PAUSE, LONG_PAUSE = 0.005, 0.1


class Nested:
    """This rank's part in it: how often its hooks have called validate(), and how often another's are known
    to have.
    """

    def __init__(self, run: Run, store: Any, notes: Any) -> None:
        """`store`: the notes as the thread that trains sees them; `notes`: as the thread does that watches
        them.
        """
        self.run = run
        self.count = 0
        self._store, self._messages = store, notes
        self._thread = threading.get_ident()
        self._awaited = self._asks = 0
        self._since: float | None = None

    def begin(self) -> None:
        """Wait until all ranks have called it, or one says that it will not."""
        peers = self.run.failure_monitor
        assert peers is not None
        self.count += 1
        key, began, asked = f"nested/{self.count}", time.monotonic(), False
        self._store.add(key, 1)
        while self._store.add(key, 0) < self.run.strategy.world_size:
            peers.raise_failure()
            if not asked and time.monotonic() - began > ASKING:
                peers.ask_for_validate(self.count, self.run.boundary.polls)
                asked = True
            if asked and self._store.check([f"{key}/past"]):
                other = self._store.get(f"{key}/past").decode()
                raise HooklineError(
                    f"validate() was called inside a hook on rank {self.run.strategy.rank}, but not on rank "
                    f"{other}, which has gone on. It takes all ranks: call it on each of them at the same "
                    "event, not in a hook with ranks = 'zero' and not under `if rank == 0`."
                )
            time.sleep(LONG_PAUSE if asked else PAUSE)

    # ---- in the thread that reads the notes ----------------------------------------------------------------

    def heard(self, number: int, asks: int) -> None:
        """Somebody waits for this rank to call it for that time; the ranks had met so often then."""
        self._awaited, self._asks, self._since = number, asks, None

    def look(self) -> None:
        """Answer, if this rank has gone past the place."""
        if self.count >= self._awaited:
            return
        if self.run.boundary.polls <= self._asks and not self._waits():
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        if self.run.boundary.polls > self._asks or now - self._since >= STANDING:
            self._messages.set(f"nested/{self._awaited}/past", str(self.run.strategy.rank))
            self._awaited = 0

    def _waits(self) -> bool:
        """Whether the run waits for other ranks: it has come to something later that all of them do."""
        return waits_for_ranks(stack_of(self._thread), backward=False)


# ---- Who notices that a rank has died without a word


GOODBYE = b"."
"""What a rank sends when it leaves in good order."""
MEETING = 30.0
"""Seconds in which the next rank can be reached, or it is done without."""
log = logging.getLogger("hookline")


class LivenessRing:
    """This rank's door, at which the rank before it has called, and its line to the rank after it."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        """`store`: the store through which ranks find each other's doors."""
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
            store.set(f"door/{rank}", f"{self._door.getsockname()[1]} {host}")
            port, _, other = store.get(f"door/{self.next}").decode().partition(" ")
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


POLL = 0.5
"""Seconds between two looks at the notes."""
RANK_TIMEOUT = 5.0
"""Seconds in which a rank may end by itself after another one has failed: as a rule when that one has torn
down and closes.
"""
DEAD_RANK_TIMEOUT = 2.5
"""The same after another one has died: it will do nothing any more, and it may have taken a while to notice.
"""
WAKING = 2.0
"""Seconds before its end in which a rank that is busy with something of its own is woken."""
OWN_TIMEOUT = 7.0
"""Seconds in which a rank that failed itself may tell its hooks and tear down."""
CLOSING = 1.0
"""Seconds for the loggers to write what they have."""
SILENCE = 3.0
"""Seconds to wait for word of who has died, when this rank has only lost contact."""
LEAVING = 10.0
"""Seconds in which a call to the store comes back, busy as the machine may be."""
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """Which rank has failed, and how."""

    rank: int
    text: str
    died: bool = False
    """Whether it could not even say so itself."""

    def __str__(self) -> str:
        return f"Rank {self.rank} has failed: {self.text}"


class RankMonitor:
    """Watches the other ranks for the length of one run; does nothing where there are none."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.failure: Failure | None = None
        """The first one that this rank has heard of, or its own."""
        self._error: BaseException | None = None
        self._deadline: float | None = None
        self._interrupted = False
        self._known = 0
        self._over = threading.Event()
        self._failed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        run, ranks = self.run, self.run.strategy.ranks
        if ranks.alone:
            return
        self._name = ranks.from_zero(
            uuid.uuid4().hex
        )  # a job that is started again may find the old notes still there
        self._store, self._messages = (
            ranks.store(self._name),
            ranks.store(self._name),
        )  # a connection for each thread
        self._ring = LivenessRing(ranks.rank, ranks.world_size, self._store)
        self.nested = Nested(run, self._store, self._messages)
        run.failure_monitor = self
        for each in (self._watch_next, self._watch_messages):
            thread = threading.Thread(target=each, name=f"hookline peers: {each.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def __exit__(self, *error: object) -> None:
        if not self._threads:
            return
        self._over.set()
        self._ring.wake()
        for each in self._threads:
            each.join(2 * POLL)
            if each.is_alive() and self.failure is None:
                wait_at_exit(each)
        self._ring.leave()

    # ---- this rank fails -----------------------------------------------------------------------------------

    def report_failure(self, error: BaseException) -> None:
        """This rank has failed: let the others know, or find out that it is their failure
        that has come here.
        """
        self._error = error
        self._deadline = time.monotonic() + OWN_TIMEOUT
        if _is_lost_contact(error):
            self._failed.wait(SILENCE)  # the one that died cannot say so; the rank before it does
        if self.failure is None:
            where = next(
                iter(getattr(error, "__notes__", [])), ""
            )  # the hook and event, or the position of the run
            self.post(f"{type(error).__name__}: {str(error)[:LONGEST]} ({where}).")
        elif self.failure.rank != self.run.strategy.rank and not isinstance(error, PeerError):
            error.add_note(f"{self.failure} This rank could not go on without it.")

    def post(self, text: str, failed: bool = True) -> None:
        """Leave a note for all ranks: of a failure, or of something to be known."""
        rank = self.run.strategy.rank
        if failed and self.failure is None:
            self.failure = Failure(rank, text)
            self.run.strategy.ranks.remember_failure(text)
            self._deadline = self._deadline or time.monotonic() + OWN_TIMEOUT
        self._write(self._store, {"rank": rank, "text": text, "failed": failed})

    def ask_for_validate(self, number: int, polls: int) -> None:
        """Ask the others whether they will still call validate() for that time."""
        self._write(self._store, {"rank": self.run.strategy.rank, "failed": False, "nested": [number, polls]})

    def _write(self, store: Any, note: dict[str, Any]) -> None:
        try:
            number = store.add("notes", 1)
            store.set(f"note/{number}", json.dumps(note))
        except (RuntimeError, dist.DistError) as error:
            log.warning("The other ranks could not be told (%s): %s", str(error).partition("\n")[0], note)

    def assemble(self, where: str) -> None:
        """Wait until all ranks have come here, however long one takes; not for one that has failed."""
        assemble(self._store, where, self.run.strategy.world_size, self.raise_failure)

    def raise_failure(self) -> None:
        """End what this rank is doing, if another one has failed and this one is not ending yet."""
        if self.failure is not None and self.run.state.exception is None and not self._over.is_set():
            raise PeerError(f"{self.failure} This rank cannot go on without it.")

    # ---- another rank fails --------------------------------------------------------------------------------

    def _watch_next(self) -> None:
        """In a thread of its own: the rank after this one, and how long this one may still take to end."""
        while not self._over.is_set():
            if self._ring.lost(POLL) and not self._over.is_set():
                self._heard(
                    Failure(
                        self._ring.next,
                        "it died without a word: it was killed, or its machine is gone.",
                        died=True,
                    )
                )
                # the place of the notes may be gone as well, and to find that out may take long
                threading.Thread(
                    target=self._report_death, name="hookline peers: telling", daemon=True
                ).start()
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                self._end_process()
            if self._deadline is not None and now >= self._deadline - WAKING:
                self._interrupt()

    def _report_death(self) -> None:
        assert self.failure is not None
        store = self.run.strategy.ranks.store(self._name)
        self._write(
            store, {"rank": self.failure.rank, "text": self.failure.text, "failed": True, "died": True}
        )

    def _watch_messages(self) -> None:
        """In a thread of its own: what other ranks have to say."""
        while not self._over.wait(POLL):
            try:
                for self._known in range(self._known + 1, self._messages.add("notes", 0) + 1):
                    self._read(json.loads(self._messages.get(f"note/{self._known}")))
                self.nested.look()
            except (RuntimeError, dist.DistError):
                if self.run.state.status in ("training", "running") and not self._over.is_set():
                    gone = "it, or the launcher beside it through which the ranks find each other, is gone."
                    self._heard(Failure(0, gone, died=True))
                return

    def _read(self, note: dict[str, Any]) -> None:
        if note["failed"]:
            self._heard(Failure(note["rank"], note["text"], note.get("died", False)))
        elif "nested" in note:
            self.nested.heard(*note["nested"])
        elif note["rank"] != self.run.strategy.rank:
            log.warning("Rank %d says: %s", note["rank"], note["text"])

    def _heard(self, failure: Failure) -> None:
        """The first failure is the reason; what follows is its consequence."""
        if self.failure is None:
            self.failure = failure
            log.error("%s This rank ends too.", failure)
        if self._deadline is None:
            self._deadline = time.monotonic() + (DEAD_RANK_TIMEOUT if failure.died else RANK_TIMEOUT)
        self._failed.set()

    def _interrupt(self) -> None:
        """Give a hook that is in the middle of something the chance to end in good order: our handler raises
        `PeerError`.
        """
        if not self._interrupted and self._error is None and _is_ours(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        self._interrupted = True

    def _end_process(self) -> None:
        """It has had its time. What its loggers hold is written, if they can."""
        log.error(
            "%s This rank does not end by itself; the process is ended. Checkpoints that were saved before "
            "are whole.",
            self.failure,
        )
        if self._error is not None:
            traceback.print_exception(self._error)
        closing = threading.Thread(
            target=self.run.state.logger.close, name="hookline peers: closing loggers", daemon=True
        )
        closing.start()
        join(closing, CLOSING, "what the loggers hold is not written")
        for each in (sys.stdout, sys.stderr):
            each.flush()
        os._exit(EXIT_FAILED)


def wait_at_exit(thread: threading.Thread) -> None:
    """Let the process end only after this thread has.

    One that comes back from a call to the store while the interpreter ends would abort the process, whatever
    it has achieved.
    """
    atexit.register(join, thread, LEAVING)


def _is_ours(handler: Any) -> bool:
    return isinstance(getattr(handler, "__self__", None), Signals)


def _is_lost_contact(error: BaseException) -> bool:
    """Whether it says no more than that another rank does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
