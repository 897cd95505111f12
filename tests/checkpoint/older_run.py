"""The run that `older/` was cut from; that was written when a run was always one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import Module, Trainer
from hookline.hooks import WeightAveraging


class Net(Module):
    """Batch statistics, dropout and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Dropout(0.2)
        self.again = self.layer

    def training_step(self, batch: Any) -> Any:
        loss = F.mse_loss(self.drop(self.norm(self.layer(batch[0]))), batch[1])
        self.log("error", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def run(folder: Any, resume: Any = None, stop: int = 0) -> Trainer:
    """Train it for two epochs, or until so many batches are done, in the middle of an accumulation window."""
    torch.manual_seed(1)
    trainer = Trainer(
        run_dir=folder,
        max_epochs=2,
        seed=3,
        hooks=[WeightAveraging(decay=0.5)],
        logger=False,
        enable_progress_bar=False,
        accumulate_grad_batches=2,
    )

    def leave(trainer: Any, batches_seen: int) -> None:
        if batches_seen == stop:
            trainer.save_checkpoint(f"{folder}/older")
            trainer.stop("cut")

    trainer.on("train_batch_end")(leave)
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    trainer.fit(Net(), DataLoader(TensorDataset(inputs, inputs * 2), 4, shuffle=True), resume=resume)
    return trainer
