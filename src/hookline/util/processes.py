"""Process-local resources: descriptors that forked children must not keep, threads that end with a run, and
programs that a worker imports again.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from typing import Any

from hookline.util.errors import HooklineError

log = logging.getLogger("hookline")

TURN = 1.0
"""Seconds."""

_private: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(*handles: Any) -> None:
    """Close these handles in every process that is forked from this one.

    A copy in a child, such as a loader's worker, keeps a connection open and a lock held after this process
    has released it.
    """
    for handle in handles:
        _private.add(handle)


def _close_copies() -> None:
    for handle in list(_private):
        with contextlib.suppress(OSError):
            handle.close()
    _private.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


def refuse_unguarded_program(what: str) -> None:
    """Raise if Python imports the program again, to start a worker process (every way to start one but fork).

    Otherwise the worker would begin the same run once more, and fail over the lock of its directory.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        program = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])
        raise HooklineError(
            f"{what} was called by a process that Python starts for the workers of a loader. Such a process "
            f"imports {program}, and must not train. In {program}, put what begins the training under "
            '`if __name__ == "__main__":`.'
        )


def wait_for_end(thread: threading.Thread, seconds: float) -> bool:
    """Wait for a thread for at most this many seconds; return whether it has ended.

    It waits in short turns, so that the time in which the whole process was suspended does not count.
    """
    while seconds > 0:
        thread.join(min(seconds, TURN))
        if not thread.is_alive():
            return True
        seconds -= TURN
    return not thread.is_alive()


def join(thread: threading.Thread, seconds: float, lost: str = "") -> bool:
    """Wait for a thread that should end, and log its name if it does not end in time; return whether it has
    ended.

    lost: the consequence, for the message.
    """
    if wait_for_end(thread, seconds):
        return True
    log.warning(
        "The thread %r did not end within %g s and is abandoned%s.",
        thread.name,
        seconds,
        f": {lost}" if lost else "",
    )
    return False
