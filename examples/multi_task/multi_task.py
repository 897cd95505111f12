"""Train one network on two tasks, with a mixture of two loaders.

Task `inside` classifies points (inside a circle or not), task `distance` estimates how far a point is from
the circle. `distance` has ten times less data; the mixture draws it for every third batch.
`python examples/multi_task/multi_task.py`
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from hookline import Mixture, Module, Trainer, seed_everything


class TwoTasks(Module):
    """A shared trunk with a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.ModuleDict({"inside": nn.Linear(64, 1), "distance": nn.Linear(64, 1)})

    def forward(self, points: Tensor, task: str) -> Tensor:
        out: Tensor = self.heads[task](self.trunk(points))
        return out.squeeze(1)

    # a keyword-only parameter is a fact: the name of the loader that the batch came from
    def training_step(self, batch: list[Tensor], batch_idx: int, *, dataloader_name: str) -> Tensor:
        points, targets = batch
        out = self(points, dataloader_name)
        if dataloader_name == "inside":
            return binary_cross_entropy_with_logits(out, targets)
        return mse_loss(out, targets)

    def validation_step(
        self, batch: list[Tensor], batch_idx: int, *, dataloader_name: str
    ) -> dict[str, Tensor]:
        points, targets = batch
        out = self(points, dataloader_name)
        if dataloader_name == "inside":
            return {"accuracy": ((out > 0) == (targets > 0)).float().mean()}
        return {"error": (out - targets).abs().mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_loader(task: str, size: int, shuffle: bool = True) -> DataLoader[tuple[Tensor, ...]]:
    """Return random points with the targets of a task."""
    points = 4 * torch.rand(size, 2) - 2
    distance = points.norm(dim=1) - 1
    targets = (distance < 0).float() if task == "inside" else distance.abs()
    return DataLoader(TensorDataset(points, targets), batch_size=64, shuffle=shuffle)


def main() -> None:
    """Train on both tasks and validate each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    seed_everything(0)
    train = {"inside": make_loader("inside", 20_000), "distance": make_loader("distance", 2_000)}
    val = {task: make_loader(task, 1_000, shuffle=False) for task in train}
    mixture = Mixture("weighted", {"inside": 2, "distance": 1}, loss_weights={"distance": 4.0})

    trainer = Trainer(max_epochs=options.epochs, enable_progress_bar=False)
    module = TwoTasks()
    print(str(trainer.explain(module, train, mixture=mixture)).partition("\n\n")[2], end="\n\n")
    metrics = trainer.fit(module, train, val, mixture=mixture)
    print(f"inside: accuracy {metrics['val/dl_inside/accuracy']:.3f}")
    print(f"distance: mean error {metrics['val/dl_distance/error']:.3f}")
    print(f"share of batches from `distance`: {metrics['train/dl_distance/proportion']:.3f}")


if __name__ == "__main__":
    main()
