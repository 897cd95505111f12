"""Where ranks meet: what an earlier start of the job has left there leads nobody astray."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from tiny import Net, batches, quiet
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from hookline import Hook, Preempted
from hookline.distributed.comm import Ranks, describe_ended_ranks
from hookline.distributed.rendezvous import fresh_store

PATIENCE = timedelta(seconds=60)


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


def test_ranks_that_do_not_come_are_named_in_the_error() -> None:
    store = HashStore()
    store.set("hookline/arrived/2", "a process that is dead")
    with pytest.raises(
        dist.DistStoreError,
        match=r"Not all of the job's 3 processes have arrived in time \(0.1 s\): ranks 1, 2 did not",
    ):
        fresh_store(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match="rank 0 did not"):
        fresh_store(HashStore(), 1, 2, timedelta(seconds=0.1))


def test_a_rank_that_waits_for_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hookline.distributed.rendezvous.REMINDER", 0.05)
    store = HashStore()

    def come() -> None:
        end = time.monotonic() + PATIENCE.total_seconds()
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.01)
        fresh_store(store, 1, 2, PATIENCE)

    late = threading.Thread(target=come)
    late.start()
    fresh_store(store, 0, 2, PATIENCE)
    late.join()
    assert "this rank still waits for rank 1" in caplog.records[0].getMessage()


def test_a_process_that_ends_after_a_signal_does_not_pass_for_one_that_was_done() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(Preempted):
            quiet(strategy="single", hooks=[Signalled()]).fit(Net(), batches(2))
        assert describe_ended_ranks(1) == ""
        Ranks().report_end(None)
        assert describe_ended_ranks(1) == "Processes of this job have ended: rank 0 after SIGTERM."
        Ranks().report_end(ValueError("of its own"))
        assert (
            describe_ended_ranks(1) == "Processes of this job have ended: rank 0 by ValueError: of its own."
        )
    finally:
        dist.destroy_process_group()


class Signalled(Hook):
    def teardown(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
