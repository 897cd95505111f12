"""Where the processes of a job find each other, free of what an earlier start of the same job has left there.

torchrun keeps its store when it starts the ranks again, so that a rank may read the address of a process that
is dead and wait for it in vain (pytorch issue 135712). How often it was started, torchrun counts for each
machine on its own, so that number is no common name for a start either. So rank zero makes one up, and tells
it to whoever can show that they are alive.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from hookline.ranks import LONGEST_PAUSE, PAUSE, listed

REMINDER = 30.0
"""Seconds after which a rank that waits says for whom; then after twice as many, and so on."""
log = logging.getLogger("hookline")


def fresh_store(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A part of the store that only the processes of this start know."""
    store.set_timeout(timeout)
    what = f"Not all of the job's {world_size} processes have come"
    if rank == 0:
        name = uuid.uuid4().hex
        receive(store, name, world_size, what, timeout.total_seconds())
    else:
        me = uuid.uuid4().hex
        welcome = f"hookline/welcome/{me}"  # only an answer to this very process has this key
        store.set(f"hookline/arrived/{rank}", me)
        wait_until(lambda: store.check([welcome]), lambda: [0], what, timeout.total_seconds())
        name = store.get(welcome).decode()
        store.set(f"hookline/{name}/here/{rank}", "")
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(f"hookline/{name}", store)


def receive(store: Any, name: str, world_size: int, what: str, seconds: float) -> None:
    """Welcome everyone who has left a word at the door, dead or alive, until all who are
    alive have come in.
    """
    welcomed: set[bytes] = set()
    here = {rank: f"hookline/{name}/here/{rank}" for rank in range(1, world_size)}

    def all_are_here() -> bool:
        for rank in here:
            key = f"hookline/arrived/{rank}"
            if store.check([key]) and (who := store.get(key)) not in welcomed:
                welcomed.add(who)
                store.set(f"hookline/welcome/{who.decode()}", name)
        return bool(store.check([*here.values()]))

    wait_until(
        all_are_here, lambda: [rank for rank, key in here.items() if not store.check([key])], what, seconds
    )


def wait_until(
    is_so: Callable[[], bool], missing: Callable[[], list[int]], what: str, seconds: float
) -> None:
    """Look until it is so. After a while it is said who is missing, and what of it; in the end that is an
    error.
    """
    began, pause, reminder = time.monotonic(), PAUSE, REMINDER
    while not is_so():
        waited = time.monotonic() - began
        if waited > seconds:
            raise dist.DistStoreError(f"{what} in time ({seconds:g} s): {listed(missing())} did not.")
        if waited > reminder:
            log.warning("%s after %.0f s: this rank still waits for %s.", what, waited, listed(missing()))
            reminder *= 2
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
