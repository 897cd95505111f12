"""The output of errors: one that several ranks raise is printed by one of them; the others print one line.

The ranks claim an error in the store, by its type and text. Before they are connected, as for a wrong option,
this is the store of torchrun's agent. Without a store every rank prints its error.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch import distributed as dist

from hookline.distributed.comm import PAUSE
from hookline.util.errors import PeerError
from hookline.util.short_traceback import keeps_all

ZERO_FIRST = 1.0
"""Seconds in which rank zero may claim an error before another rank does: its output is read first."""
PRINTING = 5.0
"""Seconds to wait until another rank has printed the error: torchrun ends all ranks as soon as one ends."""
ENDING = 1.0
"""Seconds in which that rank may end first, because torchrun names the first one as the cause."""
CONNECTING = datetime.timedelta(seconds=5)


def print_uncaught_errors_once() -> None:
    """Make an uncaught error of several ranks be printed by one of them. Call it with several processes."""
    if not isinstance(sys.excepthook, ErrorOutput):
        sys.excepthook = ErrorOutput(sys.excepthook)


class ErrorOutput:
    """An exception hook (`sys.excepthook`) around the one that was there."""

    is_printing = False
    """Whether one prints: torch puts its own hook between two of them when it connects the ranks."""

    def __init__(self, inner: Callable[..., object]) -> None:
        self.inner = inner

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error as the inner hook does, or one line if another rank prints it."""
        if ErrorOutput.is_printing:
            self.inner(kind, error, trace)
            return
        ErrorOutput.is_printing = True
        if isinstance(error, PeerError) and not keeps_all():
            error, trace = _without_traceback(error), None
        try:
            print_once(error, lambda: self.inner(kind, error, trace))
        finally:
            ErrorOutput.is_printing = False


def _without_traceback(error: PeerError) -> PeerError:
    """Return the error with its notes only: where this rank waited does not show why another one failed."""
    plain = PeerError(*error.args)
    for note in getattr(error, "__notes__", ()):
        plain.add_note(note)
    return plain


def print_once(error: BaseException | str, show: Callable[[], object]) -> None:
    """Call `show` on one of the ranks that have this error, and print one line on the others."""
    rank, store = _connect()
    key = _key_of(error)
    if store is None or not key or keeps_all():
        show()
        return
    with _sigterm_held() as is_ending:
        printer = _claim(store, key, rank, is_ending)
        if printer != rank:
            kind = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
            print(
                f"[rank {rank}] {kind}the same error as on rank {printer}, which prints it",
                file=sys.stderr,
                flush=True,
            )
            return
        try:
            show()
        finally:
            sys.stderr.flush()
            with contextlib.suppress(RuntimeError, dist.DistError):
                store.set(f"{key}/printed", "")


def _connect() -> tuple[int, Any]:
    """Return the rank, and the store of the process group or of torchrun's agent; None if there is none."""
    with contextlib.suppress(Exception):  # whatever fails here must not hide the error
        torch_dist: Any = dist
        # the agent keeps its store when it starts the ranks again
        name = f"hookline/errors/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if dist.is_initialized():
            return dist.get_rank(), torch_dist.PrefixStore(
                name, torch_dist.distributed_c10d._get_default_store()
            )
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = torch_dist.TCPStore(host, port, is_master=False, timeout=CONNECTING)
            return int(os.environ["RANK"]), torch_dist.PrefixStore(name, store)
    return 0, None


def _key_of(error: BaseException | str) -> str:
    """Return a key that is equal for the same error of another rank; empty if its text cannot be read."""
    with contextlib.suppress(Exception):  # a broken __str__ must not hide the error
        return hashlib.sha256(f"{type(error).__name__}: {error}".encode()).hexdigest()
    return ""


def _claim(store: Any, key: str, rank: int, is_ending: Callable[[], bool]) -> int:
    """Return the rank that prints the error: rank zero if it has it too, else the first rank that has it.

    If it is another rank, wait until that one has printed it and ends, which makes torchrun send SIGTERM.
    is_ending: returns whether it has arrived.
    """
    printer = rank
    with contextlib.suppress(Exception):  # the store is gone
        if rank:
            _wait_for(lambda: is_ending() or store.check([key]), ZERO_FIRST)
        printer = int(store.compare_set(key, "", str(rank)))
        if printer != rank:
            _wait_for(lambda: store.check([f"{key}/printed"]), PRINTING)
            _wait_for(is_ending, ENDING)
    return printer


def _wait_for(is_done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_done() and time.monotonic() < end:
        time.sleep(PAUSE)


@contextlib.contextmanager
def _sigterm_held() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM has arrived. It does not end the process meanwhile.

    torchrun sends it to all ranks as soon as one has ended, which would be before this one prints its error.
    """
    received: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    except ValueError:  # this is not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
