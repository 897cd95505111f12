"""Where a hosted run takes place: this process among others, and the user's own module inside what is run."""

from __future__ import annotations

import os
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def place_among_ranks() -> tuple[int, int, int]:
    """Rank, rank on this machine, number of processes: of the process group, or as the launcher has said."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), local, distributed.get_world_size()
    return int(os.environ.get("RANK", local)), local, int(os.environ.get("WORLD_SIZE", 1))


def own_module(module: nn.Module) -> nn.Module:
    """What the user wrote, without what distributes or compiles it."""
    while True:
        is_spread = isinstance(module, DistributedDataParallel)
        inner: Any = module.module if is_spread else vars(module).get("_modules", {}).get("_orig_mod")  # torch.compile's
        if inner is None:
            return module
        module = inner


def joins(model: Any) -> bool:
    """Whether ranks may have different numbers of batches (torch's `Join`): then they cannot meet after each."""
    return isinstance(model, DistributedDataParallel) and model._join_config.enable


def listed(given: Any) -> list[Any]:
    """One optimizer or scheduler, or several."""
    if hasattr(given, "step"):
        return [given]
    return [each for each in given if each is not None] if given is not None else []
