"""Rendezvous: wait for all ranks of this start of the job, apart from what an earlier start has left."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from hookline.distributed.comm import LONGEST_PAUSE, PAUSE, listed

log = logging.getLogger("hookline")
REMINDER = 30.0
"""Seconds after which a waiting rank logs which ranks are missing; the interval doubles each time."""


def fresh_store(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a part of the store that only the processes of this start use.

    Keys of an earlier start of the same job stay in the store. So rank zero chooses a new name, and each
    process receives it under a key of its own.
    """
    store.set_timeout(timeout)
    what = f"Not all of the job's {world_size} processes have arrived"
    if rank == 0:
        name = uuid.uuid4().hex
        _admit_ranks(store, name, world_size, what, timeout.total_seconds())
    else:
        own_id = uuid.uuid4().hex
        welcome = f"hookline/welcome/{own_id}"  # rank zero sets this key for this process only
        store.set(f"hookline/arrived/{rank}", own_id)
        wait_until(lambda: store.check([welcome]), lambda: [0], what, timeout.total_seconds())
        name = store.get(welcome).decode()
        store.set(f"hookline/{name}/here/{rank}", "")
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(f"hookline/{name}", store)


def _admit_ranks(store: Any, name: str, world_size: int, what: str, seconds: float) -> None:
    """Send the new name to every process that arrives, until all ranks have confirmed it.

    Ids of processes that are dead may still be in the store; they never confirm.
    """
    admitted: set[bytes] = set()
    here = {rank: f"hookline/{name}/here/{rank}" for rank in range(1, world_size)}

    def all_are_here() -> bool:
        for rank in here:
            key = f"hookline/arrived/{rank}"
            if store.check([key]) and (process := store.get(key)) not in admitted:
                admitted.add(process)
                store.set(f"hookline/welcome/{process.decode()}", name)
        return bool(store.check([*here.values()]))

    wait_until(
        all_are_here, lambda: [rank for rank, key in here.items() if not store.check([key])], what, seconds
    )


def wait_until(
    is_done: Callable[[], bool], missing: Callable[[], list[int]], what: str, seconds: float
) -> None:
    """Poll until `is_done`; log the missing ranks now and then, and raise after `seconds`."""
    began, pause, reminder = time.monotonic(), PAUSE, REMINDER
    while not is_done():
        waited = time.monotonic() - began
        if waited > seconds:
            raise dist.DistStoreError(f"{what} in time ({seconds:g} s): {listed(missing())} did not.")
        if waited > reminder:
            log.warning("%s after %.0f s: this rank still waits for %s.", what, waited, listed(missing()))
            reminder *= 2
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
