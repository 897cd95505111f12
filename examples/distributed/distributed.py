"""Train on several processes with DDP, or with FSDP, which shards the weights over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/distributed/distributed.py --strategy ddp
    torchrun --standalone --nproc-per-node 2 examples/distributed/distributed.py --strategy fsdp

The same program trains on one process: `python examples/distributed/distributed.py --strategy auto`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from hookline import Hook, Metrics, Module, Trainer, seed_everything


class Residual(Module):
    """A stack of residual blocks. FSDP gathers one block at a time."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(16, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Shards(Hook):
    """Prints on every rank how many of the weights it holds, and on rank 0 the result."""

    def on_train_start(self, module: Residual, rank: int, world_size: int) -> None:
        weights = [each.detach() for each in module.parameters()]
        held = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in weights)
        share = held / sum(each.numel() for each in weights)
        print(f"rank {rank} of {world_size} holds {share:.0%} of the weights", flush=True)

    def on_train_end(self, rank: int, step: int, metrics: Metrics) -> None:
        if rank == 0:
            print(f"validation loss {metrics['val/loss']:.5f} after {step} steps", flush=True)


def main() -> None:
    """Train with the strategy of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("auto", "ddp", "fsdp"), default="auto")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    seed_everything(0)  # the same weights and data on all ranks; Hookline gives each rank its part
    inputs = torch.randn(8192, 16)
    targets = (inputs[:, :4] * inputs[:, 4:8]).sum(dim=1, keepdim=True)
    data = TensorDataset(inputs, targets)
    train, val = torch.utils.data.random_split(data, [7168, 1024])
    trainer = Trainer(
        strategy=options.strategy, max_epochs=options.epochs, hooks=[Shards()], enable_progress_bar=False
    )
    trainer.fit(Residual(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=256))


if __name__ == "__main__":
    main()
