"""Rank, world size and device of this process, read from the environment that torchrun or SLURM sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hookline.util.errors import OptionError, closest

SLURM_PORTS = range(20000, 30000)
"""Ports for rank zero of a SLURM job, chosen by job id, so that jobs on one machine seldom share one."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank and world size of this process, and the launcher that set them."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: str = ""
    """'torchrun', 'SLURM', 'the user' (the process group existed already), or empty."""
    rendezvous_address: str = ""
    """Address and port of the rendezvous, if the launcher did not put them into the environment."""

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.world_size == 1


def find_rank(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Return the rank from the variables of torchrun, else of `srun`; else that of a single process."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return _check_rank(
            RankInfo(
                _read_number(env, "RANK"),
                _read_number(env, "LOCAL_RANK", 0),
                _read_number(env, "WORLD_SIZE"),
                _read_number(env, "LOCAL_WORLD_SIZE", 1),
                "torchrun",
            )
        )
    # an interactive shell (salloc, sbatch without srun) has SLURM_NTASKS but is not a task
    if (
        "SLURM_PROCID" in env
        and env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")) != "1"
        and env.get("SLURM_STEP_ID", "") not in ("", "4294967290", "4294967291")
        and env.get("SLURM_JOB_NAME") != "interactive"
    ):
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        return _check_rank(
            RankInfo(
                _read_number(env, "SLURM_PROCID"),
                _read_number(env, "SLURM_LOCALID", 0),
                _read_number(env, tasks),
                _tasks_here(env),
                "SLURM",
                _slurm_address(env),
            )
        )
    return RankInfo()


def set_torchrun_environment(info: RankInfo) -> None:
    """Set torchrun's environment variables, for libraries that read them (Accelerate, datasets)."""
    host, _, port = info.rendezvous_address.rpartition(":")
    for name, value in (
        ("MASTER_ADDR", host),
        ("MASTER_PORT", port),
        ("RANK", info.rank),
        ("LOCAL_RANK", info.local_rank),
        ("WORLD_SIZE", info.world_size),
        ("LOCAL_WORLD_SIZE", info.local_world_size),
    ):
        os.environ.setdefault(name, str(value))


def _check_rank(info: RankInfo) -> RankInfo:
    if not 0 <= info.rank < info.world_size:
        raise OptionError(
            f"{info.launcher} says that this is rank {info.rank} of {info.world_size} processes; "
            f"ranks count from 0 to {info.world_size - 1}."
        )
    return info


def _read_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise OptionError(
            f"The environment says {name}={text!r}, which is not a whole number. Was it set by hand? "
            "Start the job with torchrun or srun, or unset it."
        ) from None


def _tasks_here(env: Mapping[str, str]) -> int:
    """Return the number of tasks on this node, from text such as `2(x3),1` (SLURM_STEP_TASKS_PER_NODE).

    It is the largest count in the text, which is close enough to choose a number of threads.
    """
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "1"))
    return max(map(int, re.findall(r"(?:^|,)(\d+)", text)), default=1)


def _slurm_address(env: Mapping[str, str]) -> str:
    """Return MASTER_ADDR and MASTER_PORT; by default the job's first node and a port from the job id."""
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost"))
    host = env.get("MASTER_ADDR", first_host(nodes))
    port = env.get("MASTER_PORT", str(SLURM_PORTS[int(env.get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]))
    return f"{host}:{port}"


def first_host(nodes: str) -> str:
    """Return the first name in a node list such as `gpu[03-05,9],login` or `a1,a2`."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found is not None else nodes


def pick_device(device: Any) -> torch.device:
    """Return the requested device; 'auto' is an accelerator if there is one, else the CPU."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        meant = (
            closest(str(device), ("auto", "cpu", "cuda", "mps"))
            or " Pass 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'."
        )
        raise OptionError(
            f"device={device!r} is not a device.{meant}", option="device", value=device
        ) from None
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(
            f"device={device!r} is not available here: {str(error).splitlines()[0].rstrip('.')}. Leave "
            "device out to take what is there.",
            option="device",
            value=device,
        ) from None
    return chosen
