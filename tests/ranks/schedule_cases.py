"""Schedules, collections of garbage and the search of a batch size on two ranks. Run by test_schedules.py under torchrun,
which starts the job again after rank 1 has killed itself.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import torch
from ranks.worlds import RANK, Deep, distance, fit, mine, pairs, quiet, report, whole
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import DDP, FSDP, Hook, Trainer
from hookline.hooks import (
    AccumulationSchedule,
    BatchSizeFinder,
    GarbageCollection,
    LRSchedule,
    ParameterSchedule,
)

LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
WHERE = ("forward", "backward", "step")


class Saves(Hook):
    """Saves inside a window; the process of rank 1 ends some batches later."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies
        self.values: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, batches_seen: int, rank: int) -> None:
        if batches_seen == 10:
            trainer.save_checkpoint()
        if batches_seen == 13 and rank == 1 and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_optimizer_step(self, step: int, optimizer: Any, batches_seen: int) -> None:
        group = optimizer.param_groups[0]
        self.values.append([step, batches_seen, group["weight_decay"], group["lr"], *group["betas"]])


def scheduled(name: str, dies: bool = False, resume: str | None = None) -> dict[str, Any]:
    """Train three epochs of eight batches with schedules of everything."""
    saves = Saves(dies)
    hooks = [
        AccumulationSchedule({0: 3, "2 steps": 1, "1 epoch": 4, "5 steps": 2}),
        ParameterSchedule("optimizer.weight_decay", "cosine", end=0.0),
        ParameterSchedule("optimizer.betas[0]", {"1 epoch": 0.5, 7: 0.8}, name="betas"),
        LRSchedule("linear"),
        GarbageCollection(every=2, full_at=()),
        saves,
    ]
    torch.manual_seed(7)
    module = Deep()
    trainer = quiet(DDP(), hooks=hooks, max_epochs=3, run_dir=name, checkpoint={"last": False})
    trainer.fit(module, mine(pairs(8)), resume=resume)
    weights = {key: each.tolist() for key, each in whole(module).items()}
    return {"values": saves.values, "weights": weights}


class Collections(Hook):
    """The step and the generation of each collection, while automatic ones would come all the time."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.trainer: Any = None

    def on_train_start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        gc.callbacks.append(self.look)

    def look(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.seen.append([self.trainer.global_step, info["generation"]])

    def on_train_batch_end(self, rank: int) -> None:
        keep = [[object()] for _ in range(3000 * (rank + 1))]
        del keep

    def teardown(self) -> None:
        gc.callbacks.remove(self.look)


def collected() -> list[Any]:
    watch = Collections()
    hook = GarbageCollection(every=3, full_at=("validation", "checkpoint"), log=True)
    data = mine(pairs(8))
    _, trainer = fit(DDP(), data, val=data, hooks=[watch, hook], run_dir="gc", val_check_interval=4)
    return [watch.seen, gc.isenabled(), trainer.metrics["gc/seconds"] > 0]


class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Greedy(torch.optim.AdamW):
    full = False

    def step(self, closure: Any = None) -> Any:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


class Small(Deep):
    """On rank 1 fewer samples fit into memory."""

    where = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        full = RANK == 1 and len(batch[0]) > 5
        if full and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        outputs = self.norm(self(batch[0]))
        if full and self.where == "backward":
            outputs = Full.apply(outputs)
        self.optimizer.full = full and self.where == "step"
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        self.optimizer = Greedy(self.parameters(), lr=0.01)
        return self.optimizer


def loader(size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 2, generator=generator))
    return DataLoader(data, size, shuffle=True)


def found(where: str) -> dict[str, Any]:
    make = type("Made", (Small,), {"where": where})
    torch.manual_seed(3)
    finder = BatchSizeFinder()
    size = finder.find(quiet(DDP(), max_epochs=9), make(), loader(2))
    return {"size": size, "tried": list(finder.tried.items())}


def trained() -> dict[str, Any]:
    finder = BatchSizeFinder("binsearch")
    searched, trainer = fit(DDP(), loader(2), Small, hooks=[finder], seed=5, run_dir="searched")
    expected, other = fit(DDP(), loader(5), Small, seed=5, run_dir="expected")
    return {
        "size": finder.batch_size,
        "sizes": trainer.module.sizes[-other.global_step :],
        "far": distance(searched, expected),
        "weights": sum(each.sum().item() for name, each in searched.items() if "norm." not in name),
    }


def main() -> None:
    if LIFE == 0:
        scheduled("killed", dies=True)  # does not return
    report("resumed", lambda: scheduled("killed", resume="auto"))
    report("whole", lambda: scheduled("whole"))
    report("collected", collected)
    for where in WHERE:
        report(f"found: {where}", lambda w=where: found(w))  # type: ignore[misc]
    report("trained", trained)
    report("fsdp", lambda: BatchSizeFinder().find(quiet(FSDP()), Deep(), loader(2)))
