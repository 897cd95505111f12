"""The device of these tests: CUDA (also ROCm, which torch calls CUDA); with HOOKLINE_TEST_DEVICE=cpu they are tried without one."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Hook, Module, Trainer

DEVICE = os.environ.get("HOOKLINE_TEST_DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
RANKS = int(os.environ.get("HOOKLINE_TEST_RANKS", torch.cuda.device_count() if ON_GPU else 2))
"""One for each GPU of this machine."""


class Net(Module):
    """Layers with dropout, whose numbers come from the random stream of the device."""

    def __init__(self, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class KeepsScale(Hook):
    """Keeps the scale of the gradient scaler after every batch."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any) -> None:
        self.scales.append(trainer.strategy.precision.scaler.get_scale())


def made(dropout: float = 0.0) -> Net:
    """The same module every time, and the random streams after it the same."""
    torch.manual_seed(3)
    return Net(dropout)


def batches(n: int = 8, size: int = 16, pinned: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The same batches every time, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    found = [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(n)
    ]
    return [(x.pin_memory(), y.pin_memory()) for x, y in found] if pinned and ON_GPU else found


def quiet(**options: Any) -> Trainer:
    """A trainer on the device that shows nothing and saves only what is asked for."""
    defaults = {
        "device": DEVICE,
        "logger": False,
        "enable_progress_bar": False,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "checkpoint": {"last": False},
    }
    return Trainer(**{**defaults, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two models have the same weights, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
