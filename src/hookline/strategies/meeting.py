"""Where the processes of a job find each other, free of what an earlier start of the same job has left there.

torchrun keeps its store when it starts the ranks again, so that a rank may read the address of a process that is dead and wait
for it in vain (pytorch issue 135712). How often it was started, torchrun counts for each machine on its own, so that number is no
common name for a start either. So rank zero makes one up, and tells it to whoever can show that they are alive.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

from torch import distributed as dist

PAUSE = 0.02
"""Seconds between two looks at who has come."""


def fresh_store(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A part of the store that only the processes of this start know."""
    store.set_timeout(timeout)
    if rank == 0:
        name = uuid.uuid4().hex
        receive(store, name, world_size, time.monotonic() + timeout.total_seconds())
    else:
        me = uuid.uuid4().hex
        store.set(f"hookline/arrived/{rank}", me)
        name = store.get(f"hookline/welcome/{me}").decode()  # only an answer to this very process has this key
        store.add(f"hookline/{name}/here", 1)
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(f"hookline/{name}", store)


def receive(store: Any, name: str, world_size: int, deadline: float) -> None:
    """Welcome everyone who has left a word at the door, dead or alive, until all who are alive have come in."""
    welcomed: set[bytes] = set()
    while store.add(f"hookline/{name}/here", 0) < world_size - 1:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"Not all of the job's {world_size} processes have come in time.")
        for rank in range(1, world_size):
            key = f"hookline/arrived/{rank}"
            if store.check([key]) and (who := store.get(key)) not in welcomed:
                welcomed.add(who)
                store.set(f"hookline/welcome/{who.decode()}", name)
        time.sleep(PAUSE)
