"""What the configurations name: a module, its data and a hook."""

from __future__ import annotations

from typing import Any

import torch

from hookline import DataModule, Hook, Module


class Net(Module):
    def __init__(self, width: int = 2, scale: float = 1.0) -> None:
        super().__init__()
        self.width, self.scale = width, scale
        self.layer = torch.nn.Linear(4, width, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_((torch.arange(4 * width) % 5 - 2).view(width, 4) / 4)
            self.layer.bias.zero_()

    def training_step(self, batch: Any) -> Any:
        return (self.layer(batch) - self.scale).abs().sum() / 16

    def validation_step(self, batch: Any) -> Any:
        return (self.layer(batch) - self.scale).abs().sum() / 16


class Data(DataModule):
    def __init__(self, batches: int = 4) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return {
            name: [self.batch(first + number) for number in range(self.batches)]
            for name, first in (("web", 0), ("code", 9))
        }

    def val_dataloader(self) -> Any:
        return [self.batch(20)]

    def batch(self, number: int) -> Any:
        return torch.tensor(
            [[(number * 3 + row * 5 + column) % 7 - 3 for column in range(4)] for row in range(2)],
            dtype=torch.float64,
        )


class Report(Hook):
    def __init__(self, digits: int = 3, words: list[str] | None = None, factor: float | None = None) -> None:
        self.digits, self.words, self.factor = digits, words or [], factor
