"""What every rank runs: strategies over NCCL against one process, and a checkpoint of all ranks. Started by test_ranks.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu.accelerator import DEVICE, ON_GPU, batches, made, quiet
from torch import Tensor, nn

from hookline import DDP, FSDP

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE = f"{DEVICE}:{os.environ['LOCAL_RANK']}" if ON_GPU else DEVICE
# sums in another order differ by far less than what counts as equal
torch.set_default_dtype(torch.float64)


class Own(list[tuple[Tensor, Tensor]]):
    """Batches that are this rank's already."""

    shards_itself = True


def data(n: int = 6) -> tuple[Own, list[tuple[Tensor, Tensor]]]:
    """This rank's batches, and what one process would train on in the same steps."""
    each = batches(n * WORLD)
    steps = [each[begin : begin + WORLD] for begin in range(0, n * WORLD, WORLD)]
    joined = [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in steps]
    return Own(step[RANK] for step in steps), joined


def whole(module: nn.Module) -> dict[str, Tensor]:
    """The weights, put together if they are sharded. All ranks call it."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()
        for name, value in module.state_dict().items()
    }


def compare(make: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """Train on all ranks and in one process, and return the largest difference of the weights."""
    mine, joined = data()
    many, one = made(), made()
    trainer = quiet(strategy=make(), device="auto", max_epochs=2, **options)
    trainer.fit(many, mine)
    weights = whole(many)
    quiet(strategy="single", device=HERE, max_epochs=2, **options).fit(one, joined)
    alone = whole(one)
    return {
        "distance": max((weights[name] - alone[name]).abs().max().item() for name in alone),
        "device": str(trainer.strategy.device),
        # of the device: the group also has gloo, for tensors on the CPU
        "backend": dist.group.WORLD._get_backend(trainer.strategy.device).name(),
        "steps": trainer.state.step,
    }


def saved(make: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """Save a checkpoint of all ranks, and the weights that it must have."""
    module = made()
    trainer = quiet(strategy=make(), device="auto", run_dir=folder / "run", checkpoint=True)
    trainer.fit(module, data()[0])
    weights = whole(module)
    if RANK == 0:
        torch.save(weights, folder / "weights.pt")
    return {"path": str(folder / "run" / "checkpoints" / "last")}


def main() -> None:
    """Run every case; the test reads what it prints."""
    folder = Path(sys.argv[1])
    device = {} if ON_GPU else {"device": "cpu"}
    cases: dict[str, Callable[[], Any]] = {
        "ddp": lambda: compare(lambda: DDP(**device)),
        "ddp, accumulated": lambda: compare(lambda: DDP(**device), accumulate_grad_batches=2),
        "fsdp": lambda: compare(lambda: FSDP(**device)),
        "fsdp, clipped": lambda: compare(lambda: FSDP(**device), gradient_clip_val=0.05),
        "fsdp, saved": lambda: saved(lambda: FSDP(**device), folder),
    }
    if ON_GPU:
        cases["fsdp, offloaded"] = lambda: compare(lambda: FSDP(offload=True))
    for name, case in cases.items():
        print("CASE", json.dumps([name, RANK, case()]), flush=True)


if __name__ == "__main__":
    main()
