"""The base of DDP and FSDP: which rank a process is, which device is its own, and how its log begins."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from hookline import DDP, Hook, OptionError, Preempted
from hookline.distributed import process_group
from hookline.distributed.comm import Ranks, describe_ended_ranks
from hookline.distributed.launch import RankInfo
from hookline.distributed.process_group import (
    control_group,
    fresh_store,
    known_rank,
    name_rank_in_log,
    own_device,
)

TWO = RankInfo(rank=3, local_rank=1, world_size=4, local_world_size=2, launcher="torchrun")


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "pick_device", lambda device: torch.device(device))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_accelerators")
def test_of_several_accelerators_a_process_takes_that_of_its_local_rank() -> None:
    assert own_device("cuda", TWO) == torch.device("cuda", 1)
    assert own_device("cuda:0", TWO) == torch.device("cuda", 0)  # as the user says
    assert own_device("cuda", RankInfo()) == torch.device("cuda")
    assert own_device("cpu", TWO) == torch.device("cpu")


@pytest.mark.usefixtures("two_accelerators")
def test_more_processes_than_devices_are_refused_with_what_to_do() -> None:
    info = RankInfo(rank=2, local_rank=2, world_size=3, local_world_size=3, launcher="torchrun")
    with pytest.raises(
        OptionError, match=r"runs 3 processes but has 2 cuda devices, so rank 2.*nproc-per-node"
    ):
        own_device("cuda", info)


@pytest.fixture
def log() -> Any:
    log = logging.getLogger("hookline")
    before = list(log.filters)
    yield log
    log.filters[:] = before


def test_messages_begin_with_the_rank_once(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        name_rank_in_log(3)
    with caplog.at_level(logging.WARNING, "hookline"):
        log.warning("slow by %d s", 5)
        log.warning(ValueError("an object"))
    assert caplog.messages == ["[rank 3] slow by 5 s", "an object"]


def test_a_process_group_of_the_users_own_says_the_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert known_rank().alone
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        info = known_rank()
        assert (info.rank, info.world_size, info.launcher) == (0, 1, "the user")
        before = atexit._ncallbacks()
        group = control_group(60)
        assert control_group(60) is group is not dist.group.WORLD
        assert atexit._ncallbacks() == before + 1  # once, the end of the process waits for gloo's threads
    finally:
        atexit.unregister(process_group._let_gloo_release)
        process_group._leave_group()
    assert not dist.is_initialized() and not process_group._CONTROL


def test_one_process_reduces_nothing_and_an_unknown_operation_is_refused() -> None:
    strategy = DDP(device="cpu")
    assert strategy.reduce(3.0, "sum") == 3.0 and strategy.ranks.alone
    with pytest.raises(OptionError, match="op='median', allowed: 'mean', 'sum', 'max', 'min'"):
        strategy.reduce(3.0, "median")


# ---- Where ranks meet: what an earlier start of the job has left there leads nobody astray


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
    monkeypatch.setattr("hookline.distributed.process_group.REMINDER", 0.05)
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
