"""A fit has the run's directory to itself: rank zero holds its lock, from before anything in it is read until
all is closed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from hookline.errors import RunLockedError
from hookline.loops.errands import carries_out
from hookline.loops.run import Run


@contextlib.contextmanager
def locked(run: Run) -> Iterator[None]:
    """Keep other jobs out of the run's directory meanwhile; a `RunLockedError`, on all ranks, names the one
    that is in it.
    """
    directory = run.directory
    try:
        run.strategy.ranks.decide(functools.partial(directory.hold, functools.partial(_tell, run)))
        yield
    finally:
        directory.release()


def _tell(run: Run, who: str) -> None:
    """From the lock's thread: the run cannot continue."""
    run.participants.errands.send("lock lost", who=who)


@carries_out("lock lost")
def end_without_lock(run: Run, sender: int, who: str) -> None:
    """End the run before it writes what another job would overwrite."""
    raise RunLockedError(
        f"This job gave no sign of life for a while, and another one has taken over its directory. {who}"
    )
