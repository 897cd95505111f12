"""What strategies for many ranks have in common: how the ranks find each other, and which device is whose."""

from __future__ import annotations

import atexit
import datetime
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hookline.distributed.base import Strategy
from hookline.distributed.comm import Ranks, gloo_group
from hookline.distributed.launch import RankInfo, find_rank, fresh_store, pick_device, tell_as_torchrun
from hookline.engine.checks import refused
from hookline.util.errors import OptionError

BACKENDS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl"}
"""What a model's own traffic goes over, by the kind of device; everything else uses gloo."""


class ManyRanks(Strategy):
    """A strategy of several processes. With one process it is that process and talks to nobody."""

    sync_buffers: bool = True
    """Whether rank zero's buffers are those of all."""

    def __init__(
        self, device: str | torch.device = "auto", precision: str | int = 32, timeout: float = 1800
    ) -> None:
        """`timeout`: seconds after which something that not all ranks have joined, of the model's or
        Hookline's, is an error.
        """
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
            raise refused(f"{type(self).__name__}: timeout", timeout, "a number of seconds above 0")
        self.rank_info = known_rank()
        self.timeout = float(timeout)
        super().__init__(own_device(device, self.rank_info), precision)
        self.rank, self.local_rank = self.rank_info.rank, self.rank_info.local_rank
        self.world_size = self.rank_info.world_size
        self.ranks = Ranks(self.rank, self.local_rank, self.world_size, timeout=self.timeout)

    def connect(self) -> None:
        """Join the process group, or make it; then a group for control traffic. Once per process."""
        if self.world_size > 1 and self.ranks.group is None:
            join_group(self.device, self.rank_info, self.timeout)
            self.ranks = Ranks(
                self.rank, self.local_rank, self.world_size, control_group(self.timeout), self.timeout
            )
            atexit.register(_tell_end, self.ranks)
            name_rank_in_log(self.rank)

    def begin_evaluation(self, module: nn.Module) -> None:
        """Buffers (batch norm's averages) become rank zero's, which are those that are saved: each rank has
        moved its own.
        """
        if self.world_size > 1 and self.sync_buffers:
            begun: list[Any] = [
                dist.broadcast(each, 0, async_op=True) for each in module.buffers() if type(each) is Tensor
            ]
            for each in begun:
                each.wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.ranks.barrier()

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """A number or a tensor over all ranks: 'mean', 'sum', 'max' or 'min'. Waits for all."""
        operations = {
            "mean": dist.ReduceOp.SUM,
            "sum": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
        }
        if op not in operations:
            raise OptionError(f"reduce: op={op!r}, allowed: {', '.join(map(repr, operations))}.")
        if self.world_size == 1:
            return value
        total = (
            value.detach().clone()
            if isinstance(value, Tensor)
            else torch.tensor(float(value), device=self.device)
        )
        dist.all_reduce(total, operations[op])
        if op == "mean":
            total = total / self.world_size
        return total if isinstance(value, Tensor) else total.item()


def known_rank() -> RankInfo:
    """From a process group that is there already, else from the environment."""
    place = find_rank()
    if dist.is_available() and dist.is_initialized():
        return RankInfo(
            dist.get_rank(), place.local_rank, dist.get_world_size(), place.local_world_size, "the user"
        )
    return place


def own_device(device: str | torch.device, place: RankInfo) -> torch.device:
    """The device of this process: of several accelerators on a machine the one with its local
    rank's number.
    """
    chosen = pick_device(device)
    if place.alone or chosen.type in ("cpu", "meta") or chosen.index is not None:
        return chosen
    count = torch.accelerator.device_count()
    if place.local_rank >= count:
        raise OptionError(
            f"This machine runs {place.local_world_size} processes but has {count} {chosen.type} devices, "
            f"so rank {place.rank} (local rank {place.local_rank}) has none. Start at most {count} per "
            "machine (torchrun --nproc-per-node), or pass device='cpu'."
        )
    return torch.device(chosen.type, place.local_rank)


def join_group(device: torch.device, place: RankInfo, timeout: float) -> None:
    """Make the process group if nobody has, and take it down when the process ends; the user's own is left
    alone.
    """
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)
    if dist.is_initialized():
        return
    backend = BACKENDS.get(device.type, "gloo")
    if backend != "gloo":
        backend = f"cpu:gloo,{device.type}:{backend}"
    if place.meet_at:
        tell_as_torchrun(place)
    patience = datetime.timedelta(seconds=timeout)
    c10d: Any = dist.distributed_c10d
    store, rank, world_size = next(c10d.rendezvous("env://", place.rank, place.world_size, timeout=patience))
    store = fresh_store(store, rank, world_size, patience)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
    atexit.register(_leave_group)


def _leave_group() -> None:
    _CONTROL.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell_end(ranks: Ranks) -> None:
    if dist.is_initialized():
        ranks.tell_end(getattr(sys, "last_value", None))  # what has ended the interpreter, if something did


_CONTROL: dict[int, Any] = {}


def control_group(timeout: float = 1800) -> Any:
    """One gloo group per process group, for what ranks say to each other beside the model's own traffic."""
    whole = id(dist.group.WORLD)
    if whole not in _CONTROL:
        _CONTROL[whole] = gloo_group(timeout)
    return _CONTROL[whole]


class _RankName(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__("")
        self.prefix = f"[rank {rank}] "

    def filter(self, record: logging.LogRecord) -> bool:
        """Whoever reads the merged output of all ranks sees who said it."""
        if isinstance(record.msg, str) and not record.msg.startswith(self.prefix):
            record.msg = self.prefix + record.msg
        return True


def name_rank_in_log(rank: int) -> None:
    """Let every message of Hookline's begin with the rank."""
    log = logging.getLogger("hookline")
    if not any(isinstance(each, _RankName) for each in log.filters):
        log.addFilter(_RankName(rank))
