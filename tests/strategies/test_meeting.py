"""Where ranks meet: what an earlier start of the job has left there leads nobody astray."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from hookline.strategies.meeting import fresh_store

PATIENCE = timedelta(seconds=20)


def meet(store: Any, world_size: int = 3) -> list[Any]:
    """The stores that the ranks of one start get."""
    found: dict[int, Any] = {}

    def come(rank: int) -> None:
        found[rank] = fresh_store(store, rank, world_size, PATIENCE)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE.total_seconds())
    return [found[rank] for rank in range(world_size)]


def test_the_ranks_of_one_start_share_a_store() -> None:
    stores = meet(HashStore())
    stores[2].set("door", "open")
    assert [each.get("door") for each in stores] == [b"open"] * 3


def test_a_second_start_finds_nothing_of_the_first() -> None:
    store = HashStore()
    first = meet(store)
    first[0].set("address", "of a process that is dead")
    second = meet(store)
    assert not second[1].check(["address"])
    second[0].set("address", "new")
    assert second[2].get("address") == b"new"


def test_a_rank_that_does_not_come_is_an_error() -> None:
    with pytest.raises(dist.DistStoreError, match="Not all of the job's 2 processes have come in time"):
        fresh_store(HashStore(), 0, 2, timedelta(seconds=0.1))
