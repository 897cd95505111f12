"""Search hyperparameters with Optuna. A trial that is not promising is pruned.

`python examples/optuna_study/optuna_study.py`
"""

from __future__ import annotations

import argparse

import optuna
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from hookline import Module, Trainer, seed_everything
from hookline.hooks import OptunaPruning


class Regression(Module):
    """A network with one hidden layer."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def objective(trial: optuna.Trial, epochs: int, folder: str) -> float:
    """Train with the hyperparameters of a trial, and return its validation loss."""
    seed_everything(0)
    inputs = torch.randn(3000, 8)
    data = TensorDataset(inputs, (inputs[:, :1] * inputs[:, 1:2]).sin() + inputs[:, 2:3])
    train, val = torch.utils.data.random_split(data, [2500, 500])
    module = Regression(
        width=trial.suggest_int("width", 8, 128, log=True), lr=trial.suggest_float("lr", 1e-4, 0.3, log=True)
    )
    trainer = Trainer(
        max_epochs=epochs,
        run_dir=f"{folder}/trial-{trial.number}",
        hooks=[OptunaPruning(trial, monitor="val/loss")],
        enable_progress_bar=False,
    )
    metrics = trainer.fit(module, DataLoader(train, batch_size=50, shuffle=True), DataLoader(val, 500))
    return metrics["val/loss"]


def main() -> None:
    """Run the study and print its trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--run-dir", default="runs/study")
    options = parser.parse_args()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
    )
    study.optimize(lambda trial: objective(trial, options.epochs, options.run_dir), options.trials)
    for each in study.trials:
        width, lr = each.params["width"], each.params["lr"]
        reports, loss = len(each.intermediate_values), each.value or float("nan")
        print(
            f"trial {each.number:2}   width {width:3}   lr {lr:.5f}   {each.state.name.lower():8} "
            f"after {reports:2} epochs   validation loss {loss:.4f}"
        )
    print(f"best: {study.best_params}, validation loss {study.best_value:.4f}")


if __name__ == "__main__":
    main()
