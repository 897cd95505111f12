"""Keep your own training loop, and add hooks to it: `hookline.Line`.

`python examples/own_loop/own_loop.py`
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import Hook, Line, Metrics, every
from hookline.hooks import EarlyStopping, ModelCheckpoint


def spirals(count: int) -> TensorDataset:
    """Return points of two spirals, and the spiral that each belongs to."""
    labels = torch.randint(2, (count,))
    turn = 2 * torch.rand(count) + 0.2
    angle = turn * torch.pi + labels * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(count, 2), labels)


class Report(Hook):
    """Prints the gradient norm now and then, and the result of each validation."""

    @every("100 steps")
    def on_step_end(self, step: int, loss: float, grad_norm: float) -> None:
        print(f"step {step:4}   loss {loss:.3f}   gradient norm {grad_norm:.2f}")

    def on_validation_end(self, epoch: int, metrics: Metrics) -> None:
        print(f"epoch {epoch:2}    accuracy {metrics['val/accuracy']:.3f}")


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the share of right answers."""
    logits: Tensor = model(batch[0])
    return (logits.argmax(dim=1) == batch[1]).float().mean()


def main() -> None:
    """Train with a loop that is written by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--run-dir", default="runs/own-loop")
    options = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(spirals(4000), batch_size=64, shuffle=True)
    val_loader = DataLoader(spirals(1000), batch_size=500)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    hooks = [
        Report(),
        EarlyStopping("val/accuracy", mode="max", stopping_threshold=0.99, patience=5),
        ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best"),
    ]
    line = Line(model, optimizer, hooks=hooks, logger=True, run_dir=options.run_dir)
    with line:
        for _ in line.epochs(options.epochs):  # ends early if a hook requests it
            model.train()
            for points, labels in line.epoch(loader):
                loss = cross_entropy(model(points), labels)
                optimizer.zero_grad()
                line.backward(loss)
                line.clip_gradients(1.0)
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for batch in line.validation(val_loader):
                    line.log("val/accuracy", accuracy(model, batch))
    print(f"{line.status} after {line.global_step} steps")

    hookline.load_weights(model, f"{options.run_dir}/checkpoints/best")
    test = spirals(1000)
    print(f"test accuracy of the best checkpoint: {accuracy(model, list(test.tensors)):.3f}")


if __name__ == "__main__":
    main()
