"""The smallest model, data and trainer that behave like real ones."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from hookline.run._arguments import OptionArguments
from hookline.run.module import Module
from hookline.training.trainer import Trainer


class TinyModule(Module):
    """A linear regression of four numbers onto two."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.lr = lr

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for a batch's inputs."""
        outputs: Tensor = self.layer(inputs)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tiny_batches(n: int = 4, size: int = 3, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return `n` batches of inputs and targets, the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(n)
    ]


def tiny_trainer(*hooks: Any, **options: Unpack[OptionArguments]) -> Trainer:
    """Return a trainer on the CPU without output; for one epoch, or as long as max_epochs, max_steps or
    max_time say.
    """
    quiet: OptionArguments = {"enable_progress_bar": False, "num_sanity_val_steps": 0, "checkpoint": False}
    if options.get("max_steps", -1) < 0 and options.get("max_time") is None:
        quiet["max_epochs"] = 1
    quiet.update(options)
    return Trainer(hooks=hooks, logger=False, device="cpu", **quiet)
