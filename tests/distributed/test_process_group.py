"""The base of DDP and FSDP: which rank a process is, which device is its own, and how its log begins."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import distributed as dist

from hookline import DDP, OptionError
from hookline.distributed import process_group
from hookline.distributed.launch import RankInfo
from hookline.distributed.process_group import control_group, known_rank, name_rank_in_log, own_device

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
        group = control_group(60)
        assert control_group(60) is group is not dist.group.WORLD
    finally:
        process_group._leave_group()
    assert not dist.is_initialized() and not process_group._CONTROL


def test_one_process_reduces_nothing_and_an_unknown_operation_is_refused() -> None:
    strategy = DDP(device="cpu")
    assert strategy.reduce(3.0, "sum") == 3.0 and strategy.ranks.alone
    with pytest.raises(OptionError, match="op='median', allowed: 'mean', 'sum', 'max', 'min'"):
        strategy.reduce(3.0, "median")
