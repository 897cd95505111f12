"""The base of DDP and FSDP: joins the process group, waits for all ranks of this start of the job, and
chooses the device of this rank.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import sys
import time
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from hookline.distributed.base import Strategy
from hookline.distributed.comm import LONGEST_PAUSE, PAUSE, Ranks, format_ranks, gloo_group
from hookline.distributed.error_output import print_uncaught_errors_once
from hookline.distributed.launch import RankInfo, find_rank, pick_device, set_torchrun_environment
from hookline.engine.checks import refused
from hookline.util.errors import OptionError

BACKENDS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "npu": "hccl"}
"""The backend of the model's collectives, by device type; other devices use gloo."""


class MultiRankStrategy(Strategy):
    """A strategy for several processes. With one process it does not communicate."""

    sync_buffers: bool = True
    """Whether all ranks use rank zero's buffers."""

    def __init__(
        self, device: str | torch.device = "auto", precision: str | int = 32, timeout: float = 1800
    ) -> None:
        """Read the rank from the environment. timeout: seconds until an incomplete collective raises."""
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
            raise refused(f"{type(self).__name__}: timeout", timeout, "a number of seconds above 0")
        self.rank_info = known_rank()
        self.timeout = float(timeout)
        super().__init__(own_device(device, self.rank_info), precision)
        self.rank, self.local_rank = self.rank_info.rank, self.rank_info.local_rank
        self.world_size = self.rank_info.world_size
        self.ranks = Ranks(self.rank, self.local_rank, self.world_size, timeout=self.timeout)

    def connect(self) -> None:
        """Join or make the process group, then make the control group. Does nothing when called again."""
        if self.world_size > 1 and self.ranks.group is None:
            join_group(self.device, self.rank_info, self.timeout)
            self.ranks = Ranks(
                self.rank, self.local_rank, self.world_size, control_group(self.timeout), self.timeout
            )
            atexit.register(_report_end, self.ranks)
            name_rank_in_log(self.rank)
            print_uncaught_errors_once()

    def begin_evaluation(self, module: nn.Module) -> None:
        """Broadcast rank zero's buffers (batch norm's averages), because those are the saved ones."""
        if self.world_size > 1 and self.sync_buffers:
            broadcasts: list[Any] = [
                dist.broadcast(each, 0, async_op=True) for each in module.buffers() if type(each) is Tensor
            ]
            for work in broadcasts:
                work.wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.before_collective is not None:
            self.before_collective("barrier")
        self.ranks.barrier()

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Return a number or tensor reduced over all ranks by 'mean', 'sum', 'max' or 'min'.

        Ranks that read the same batches (tensor parallelism) count once.
        """
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
        if self.before_collective is not None:
            self.before_collective("reduce")
        total = (
            value.detach().clone()
            if isinstance(value, Tensor)
            else torch.tensor(float(value), device=self.device)
        )
        if op in ("mean", "sum") and not self.ranks.is_reader:
            total.zero_()
        dist.all_reduce(total, operations[op])
        if op == "mean":
            total = total / self.ranks.data_size
        return total if isinstance(value, Tensor) else total.item()


def known_rank() -> RankInfo:
    """Return the rank from an existing process group, else from the environment."""
    info = find_rank()
    if dist.is_available() and dist.is_initialized():
        return RankInfo(
            dist.get_rank(), info.local_rank, dist.get_world_size(), info.local_world_size, "the user"
        )
    return info


def own_device(device: str | torch.device, info: RankInfo) -> torch.device:
    """Return the device of this process: of several accelerators, the one whose index is the local rank."""
    chosen = pick_device(device)
    if info.alone or chosen.type in ("cpu", "meta") or chosen.index is not None:
        return chosen
    count = torch.accelerator.device_count()
    if info.local_rank >= count:
        raise OptionError(
            f"This machine runs {info.local_world_size} processes but has {count} {chosen.type} devices, "
            f"so rank {info.rank} (local rank {info.local_rank}) has none. Start at most {count} per "
            "machine (torchrun --nproc-per-node), or pass device='cpu'."
        )
    return torch.device(chosen.type, info.local_rank)


def join_group(device: torch.device, info: RankInfo, timeout: float) -> None:
    """Make the process group and destroy it at exit. A process group of the user's stays as it is."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)
    if dist.is_initialized():
        return
    backend = BACKENDS.get(device.type, "gloo")
    if backend != "gloo":
        backend = f"cpu:gloo,{device.type}:{backend}"
    if info.rendezvous_address:
        set_torchrun_environment(info)
    limit = datetime.timedelta(seconds=timeout)
    c10d: Any = dist.distributed_c10d
    store, rank, world_size = next(c10d.rendezvous("env://", info.rank, info.world_size, timeout=limit))
    store = fresh_store(store, rank, world_size, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    atexit.register(_leave_group)


def _leave_group() -> None:
    _CONTROL.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _report_end(ranks: Ranks) -> None:
    if dist.is_initialized():
        ranks.report_end(getattr(sys, "last_value", None))  # the uncaught exception, if there is one


_CONTROL: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The control group of each process group, as long as the process group exists."""


RELEASING = 0.1
"""Seconds for this, at the end of the process."""


def control_group(timeout: float = 1800) -> Any:
    """Return the gloo group for Hookline's own messages, separate from the model's collectives."""
    world = dist.group.WORLD
    if world not in _CONTROL:
        _CONTROL[world] = gloo_group(timeout)
        atexit.unregister(_let_gloo_release)
        atexit.register(_let_gloo_release)
    return _CONTROL[world]


def _let_gloo_release() -> None:
    """Let the threads of gloo release the tensors of the last collectives, while there is an interpreter.

    To release them later aborts the process ("terminate called without an active exception"), and torch has
    no call that waits for these threads.
    """
    time.sleep(RELEASING)


class _RankName(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__("")
        self.prefix = f"[rank {rank}] "

    def filter(self, record: logging.LogRecord) -> bool:
        """Prefix the message with the rank, for the merged output of all ranks."""
        if isinstance(record.msg, str) and not record.msg.startswith(self.prefix):
            record.msg = self.prefix + record.msg
        return True


def name_rank_in_log(rank: int) -> None:
    """Begin every log message of Hookline with the rank."""
    log = logging.getLogger("hookline")
    if not any(isinstance(each, _RankName) for each in log.filters):
        log.addFilter(_RankName(rank))


# ---- rendezvous --------------------------------------------------------------------------------------------


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
            raise dist.DistStoreError(f"{what} in time ({seconds:g} s): {format_ranks(missing())} did not.")
        if waited > reminder:
            log.warning(
                "%s after %.0f s: this rank still waits for %s.", what, waited, format_ranks(missing())
            )
            reminder *= 2
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
