"""The smallest model, data and trainer that show a behaviour."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Hook, Module, Trainer
from hookline.run.option_tables import OLD_NAMES, OLD_SAVING

step_graphs = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="compile='step' needs torch 2.13"
)


class Net(Module):
    """A linear regression."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Adapted(Net):
    """A head that trains on a frozen base; the statistics of the base change while it trains."""

    def __init__(self, lr: float = 0.1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        super().__init__(lr)
        self.base = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        for number, parameter in enumerate([*self.base.parameters(), *self.layer.parameters()]):
            parameter.requires_grad_(number >= 6)
            nn.init.normal_(parameter, generator=generator)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layer(self.base(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(self.base(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Block(nn.Module):
    """A layer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)


class Blocks(nn.Module):
    """A list of layers, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(2, 2)


def shown(value: Any) -> str:
    """A test's name for a value: the same in every process, so no addresses, and not the whole of a tensor."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))[:80]


def batches(n: int = 4, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """`n` batches of (inputs, targets), the same every time."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(n)
    ]


def quiet(**options: Any) -> Trainer:
    """A trainer that writes and shows nothing unless told to."""
    saving = {OLD_NAMES[old][1]: options.pop(old) for old in OLD_SAVING if old in options}
    defaults = {"logger": False, "enable_progress_bar": False, "max_epochs": 1, "num_sanity_val_steps": 0}
    return Trainer(**{**defaults, "checkpoint": {"last": False, **saving}, **options})


class SavesFirstEpoch(Hook):
    """Asks for a checkpoint at the end of the first epoch, and keeps where it is."""

    path: Any = None

    def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
        if epoch == 0:
            trainer.save_checkpoint()

    def on_checkpoint_save(self, path: Any) -> None:
        self.path = self.path or path  # not that of the state that the run ends with
