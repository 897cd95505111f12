"""A minimal model to try hooks on: it has its own data and runs in a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hookline.interop.lightning import LightningModule


class RandomDataset(Dataset[Tensor]):
    """Random vectors, drawn when the dataset is created."""

    def __init__(self, size: int = 32, length: int = 64) -> None:
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class BoringModel(LightningModule):
    """One layer, random data, every loader and step: derive from it and override what you want to try."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the layer."""
        return self.layer(x)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the mean squared distance of the outputs from one."""
        return nn.functional.mse_loss(outputs, torch.ones_like(outputs))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch."""
        return {"loss": self.loss(self(batch))}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a validation batch, logged as `val/x`."""
        return {"x": self.loss(self(batch))}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a test batch, logged as `test/y`."""
        return {"y": self.loss(self(batch))}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the outputs."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return SGD with a learning rate that decreases every epoch."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        """Return a loader with 64 batches of one vector."""
        return DataLoader(RandomDataset())

    def val_dataloader(self) -> Any:
        """Return a loader with 64 other batches."""
        return DataLoader(RandomDataset())

    test_dataloader = predict_dataloader = val_dataloader
