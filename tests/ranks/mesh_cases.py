"""Four ranks on meshes with tensor parallelism. Run by test_meshes.py under torchrun."""

from __future__ import annotations

from typing import Any

import torch
from ranks.equal_cases import Norms
from ranks.worlds import RANK, Batch, distance, fit, pairs, report
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from hookline import FSDP, Module

EQUAL_OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clipped": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    "clipped by value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
}
MESHES: dict[str, Any] = {
    "2 x 2": lambda: FSDP(tensor_parallel=2),
    "own 2 x 2": lambda: FSDP(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))),
    "1 x 4": lambda: FSDP(tensor_parallel=4),
    "2 x 1 x 2": lambda: FSDP(replicas=2, tensor_parallel=2),
}


class Block(nn.Module):
    """Two layers that tensor parallelism divides, and a norm that it leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Parallel(Module):
    """A model whose blocks are divided over the tensor mesh, if there is one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, 2)
        self.tags: list[Any] = []

    def configure_model(self) -> None:
        mesh = self.trainer.strategy.tensor_mesh
        if mesh is not None:
            for block in self.blocks:
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = self.dropout(each(x))
        return self.last(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.tags.append(batch[2].tolist())
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def dealt(data: list[list[Batch]]) -> list[Batch]:
    """The batches of all turns, which Hookline deals to the data-parallel ranks."""
    return [batch for turn in data for batch in turn]


def joined(data: list[list[Batch]], size: int) -> list[Batch]:
    """What one process would train on, if `size` ranks read different batches."""
    flat = dealt(data)
    turns = [flat[start : start + size] for start in range(0, len(flat), size)]
    return [tuple(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]) for parts in zip(*turn, strict=True)) for turn in turns]  # type: ignore[misc]


def equal(mesh: str, options: dict[str, Any]) -> dict[str, Any]:
    """A run on a mesh against one process: weights, norms and validation loss."""
    here, there, data = Norms(), Norms(), pairs()
    many, trainer = fit(MESHES[mesh](), dealt(data), Parallel, dealt(data), max_epochs=2, hooks=[here], **options)
    size = trainer.strategy.ranks.data_size
    one, alone = fit(
        "single", joined(data, size), Parallel, joined(data, size), max_epochs=2, hooks=[there], **options
    )
    return {
        "size": size,
        "weights": distance(many, one),
        "steps": [trainer.state.step, alone.state.step],
        "samples": [trainer.state.samples_seen, alone.state.samples_seen],
        "norms": max(abs(a - b) for a, b in zip(here.seen, there.seen, strict=True)),
        "val": abs(trainer.metrics["val/loss"] - alone.metrics["val/loss"]),
    }


import faulthandler; faulthandler.dump_traceback_later(80, exit=True)
def main() -> None:
    for mesh in MESHES:
        for name, options in EQUAL_OPTIONS.items():
            report(f"equal, {mesh}, {name}", lambda m=mesh, o=options: equal(m, o))  # type: ignore[misc]


if __name__ == "__main__":
    main()
