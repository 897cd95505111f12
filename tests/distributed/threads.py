"""Several ranks in one process: threads that communicate over real gloo groups."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from hookline.distributed.comm import Ranks

T = TypeVar("T")
LIMIT = 120.0
"""Seconds after which a rank that waits for another one fails."""


def on_ranks(count: int, act: Callable[[Ranks], T]) -> list[T | BaseException]:
    """Return what `act` returns on each rank, or the exception that it raises there."""
    store = dist.HashStore()
    found: dict[int, T | BaseException] = {}

    def run(rank: int) -> None:
        try:
            group: Any = dist.ProcessGroupGloo(store, rank, count, datetime.timedelta(seconds=LIMIT))
            found[rank] = act(Ranks(rank, rank, count, group, LIMIT))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    return [found[rank] for rank in range(count)]
