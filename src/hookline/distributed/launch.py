"""Which process of how many this one is: read from what torchrun or SLURM has put into the environment."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hookline.distributed.comm import LONGEST_PAUSE, PAUSE, listed
from hookline.util.errors import OptionError

SLURM_PORTS = range(20000, 30000)
"""Where the first process of a SLURM job listens, chosen by the job's number: two jobs on one machine seldom
meet.
"""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process among those of the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: str = ""
    """'torchrun', 'SLURM', 'the user' (who made the process group), or nothing."""
    meet_at: str = ""
    """The address and port where the processes find each other, if the launcher did not put it into the
    environment.
    """

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.world_size == 1


def find_rank(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK), else those of `srun`, else alone."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return _checked(
            RankInfo(
                _number(env, "RANK"),
                _number(env, "LOCAL_RANK", 0),
                _number(env, "WORLD_SIZE"),
                _number(env, "LOCAL_WORLD_SIZE", 1),
                "torchrun",
            )
        )
    # an interactive shell (salloc, sbatch without srun) has SLURM_NTASKS but is no task of its own
    if (
        "SLURM_PROCID" in env
        and env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")) != "1"
        and _is_srun(env)
    ):
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        return _checked(
            RankInfo(
                _number(env, "SLURM_PROCID"),
                _number(env, "SLURM_LOCALID", 0),
                _number(env, tasks),
                _tasks_here(env),
                "SLURM",
                _slurm_address(env),
            )
        )
    return RankInfo()


def tell_as_torchrun(place: RankInfo) -> None:
    """Put into the environment what torchrun would have said, for everything that looks for it there
    (Accelerate, datasets).
    """
    host, _, port = place.meet_at.rpartition(":")
    for name, value in (
        ("MASTER_ADDR", host),
        ("MASTER_PORT", port),
        ("RANK", place.rank),
        ("LOCAL_RANK", place.local_rank),
        ("WORLD_SIZE", place.world_size),
        ("LOCAL_WORLD_SIZE", place.local_world_size),
    ):
        os.environ.setdefault(name, str(value))


def _is_srun(env: Mapping[str, str]) -> bool:
    return (
        env.get("SLURM_STEP_ID", "") not in ("", "4294967290", "4294967291")
        and env.get("SLURM_JOB_NAME") != "interactive"
    )


def _checked(place: RankInfo) -> RankInfo:
    if not 0 <= place.rank < place.world_size:
        raise OptionError(
            f"{place.launcher} says that this is rank {place.rank} of {place.world_size} processes; "
            f"ranks count from 0 to {place.world_size - 1}."
        )
    return place


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise OptionError(
            f"The environment says {name}={text!r}, which is no whole number. Was it set by hand? "
            "Start the job with torchrun or srun, or unset it."
        ) from None


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks on this node: `SLURM_STEP_TASKS_PER_NODE` is such as `2(x3),1`; the largest number is close
    enough for threads.
    """
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "1"))
    counts = [int(each) for each in re.findall(r"(?:^|,)(\d+)", text)]
    return max(counts, default=1)


def _slurm_address(env: Mapping[str, str]) -> str:
    """The job's first node, and a port made from the job's number, unless MASTER_ADDR and MASTER_PORT say
    otherwise.
    """
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost"))
    host = env.get("MASTER_ADDR", first_host(nodes))
    port = env.get("MASTER_PORT", str(SLURM_PORTS[int(env.get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]))
    return f"{host}:{port}"


def first_host(nodes: str) -> str:
    """The first name in a node list such as `gpu[03-05,9],login` or `a1,a2`."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found is not None else nodes


# ---- The device asked for, or the best there is


def pick_device(device: Any) -> torch.device:
    """The device asked for; 'auto' takes an accelerator if there is one."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(
            f"device={device!r} is no device: {str(error).splitlines()[0]}", option="device", value=device
        ) from None
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(
            f"device={device!r} is not available here: {str(error).splitlines()[0]}",
            option="device",
            value=device,
        ) from None
    return chosen


# ---- Where the processes of a job find each other


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
