"""A loop written by hand that kills its own process at a chosen place: `python -c` with `main(...)`."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from hookline import Hook, Line
from hookline.hooks import EarlyStopping, ModelCheckpoint

EPOCHS = 4


class Counts(Hook):
    """Counts what the hooks of an uninterrupted loop would receive."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"validations": 0, "epochs": 0, "steps": 0}
        self.losses: list[float] = []

    def on_validation_end(self) -> None:
        self.counts["validations"] += 1

    def on_train_epoch_end(self, metrics: Any) -> None:
        self.counts["epochs"] += 1
        self.losses.append(metrics["train/loss"])

    def on_step_end(self) -> None:
        self.counts["steps"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {**self.counts, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        self.counts = {name: state[name] for name in self.counts}


def loader_of(kind: str) -> Any:
    data = torch.Generator().manual_seed(7)
    dataset = TensorDataset(torch.randn(11, 4, generator=data), torch.randn(11, 2, generator=data))
    own = torch.Generator().manual_seed(3) if kind in ("own generator", "seeded by epoch") else None
    return DataLoader(dataset, batch_size=2, shuffle=kind != "in order", generator=own)


def main(folder: str, kind: str, window: int, steps: int | None, kill: tuple[int, str] | None) -> None:
    """Train, and be killed in the epoch and at the place of `kill`; or write what the loop has come to."""

    def reached(epoch: int, place: str) -> None:
        if kill == (epoch, place):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5)
    by_epoch = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=EPOCHS)
    loader, val_loader = loader_of(kind), loader_of("in order")
    stopping, counts = EarlyStopping("val/loss", patience=50), Counts()
    saving = ModelCheckpoint(
        monitor=None if steps else "val/loss", save_last=True, every_n_train_steps=steps, filename="{step}"
    )
    line = Line(net, sgd, schedulers=by_epoch, hooks=[stopping, saving, counts], run_dir=folder)
    order: list[Any] = []
    with line:
        found = line.load_checkpoint("auto")
        torch.rand(3)  # streams are those of the checkpoint when the epoch begins, whatever is drawn here
        for epoch in line.epochs(EPOCHS):
            reached(epoch, "start")
            if kind == "seeded by epoch":
                loader.generator.manual_seed(100 + epoch)
            net.train()
            for x, y in line.epoch(loader):
                if line.batch_idx % window == 0:
                    sgd.zero_grad()
                noise = random.random() + np.random.rand()
                line.backward(mse_loss(net(x), y + 0.01 * noise), divide_by=window)
                is_last = line.batch_idx + 1 == len(loader)
                if (line.batch_idx + 1) % window == 0 or is_last:
                    sgd.step()
                order.append([epoch, line.batch_idx, round(float(x.sum()), 4), sgd.param_groups[0]["lr"]])
                reached(epoch, f"batch {line.batch_idx}")
            reached(epoch, "trained")
            net.eval()
            with torch.no_grad():
                for x, y in line.validation(val_loader):
                    line.log("val/loss", mse_loss(net(x), y))
            reached(epoch, "validated")
            by_epoch.step()
    ending = {
        "weights": [each.flatten().tolist() for each in net.parameters()],
        "lr": sgd.param_groups[0]["lr"],
        "schedule": by_epoch.last_epoch,
        "steps": line.global_step,
        "batches": line.state.batches_seen,
        "checks": stopping.checks,
        "counts": counts.counts,
        "losses": counts.losses,
        "random": [random.random(), np.random.rand(), torch.rand(1).item()],
    }
    Path(folder, "end.json").write_text(json.dumps({"end": ending, "order": order, "resumed": found}))
