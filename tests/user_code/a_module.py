"""A module and its data, as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import DataModule, Hook, Metrics, Module, on

Batch = tuple[Tensor, Tensor]


@on("train_end")
def say_goodbye(status: str) -> None:
    assert status == "completed"


class Regression(Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.epochs = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("mse", loss, prog_bar=True, on_epoch=True, reduce="max")
        self.log_dict({"a": 1.0, "b": loss})
        return {"loss": loss}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def configure_hooks(self) -> list[Any]:
        return [say_goodbye]

    def on_train_epoch_end(self, metrics: Metrics) -> None:
        self.epochs += 1
        assert metrics["train/loss"] >= 0.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.current_epoch + self.global_step >= 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        result = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(result["loss"])
        optimizer.step()
        return result


class Data(DataModule):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.zeros(6, 4), torch.zeros(6, 2))
        self.stages.append(stage)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=2)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(self.data, batch_size=3), DataLoader(self.data, batch_size=2)]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int = 0) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def teardown(self, stage: str) -> None: ...


class Watch(Hook):
    def on_validation_batch_end(self, dataloader_idx: int, loader_name: str, outputs: Any) -> None:
        assert loader_name == f"dl{dataloader_idx}"
