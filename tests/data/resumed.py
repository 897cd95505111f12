"""A run, and the same run cut in two: what was seen and what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import Net, quiet
from torch import Tensor, nn
from torch.utils.data import Dataset

from hookline import Hook


class Samples(Dataset[Any]):
    """Sample `i` begins with `i`. `noise` says which streams its augmentation draws from."""

    def __init__(self, n: int = 12, noise: str = "") -> None:
        self.n = n
        self.noise = noise
        self.reads: list[Any] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads.append(index)
        x = torch.full((4,), index / self.n)
        if "python" in self.noise:
            x[1] += random.random()
        if "numpy" in self.noise:
            x[2] += float(np.random.randn())
        if "torch" in self.noise:
            x[3] += torch.rand(()).item()
        return x, x[:2] * 2


class Dropping(Net):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__(lr=0.05)
        self.drop = nn.Dropout(dropout)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.drop(batch[0]), batch[1]), batch_idx)


class Seen(Hook):
    """Keeps what every batch was, and asks for checkpoints after some of them."""

    def __init__(self, folder: Path | None = None, cuts: tuple[int, ...] = ()) -> None:
        self.folder, self.cuts = folder, cuts
        self.batches: list[Any] = []

    def on_train_batch_end(self, trainer: Any, batch: Any, batches_seen: int) -> None:
        self.batches.append(batch[0].tolist())
        if batches_seen in self.cuts:
            assert self.folder is not None
            trainer.save_checkpoint(self.folder / f"after-{batches_seen}")


Made = Callable[[], Any]


def run(
    loader: Any, seen: Seen, seed: int, dropout: float = 0.3, resume: Path | None = None, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(seed)
    trainer = quiet(**{"max_epochs": 3, "hooks": [seen], **options})
    trainer.fit(Dropping(dropout), loader, resume=resume)
    return {**trainer.module.state_dict(), "drawn next": torch.rand(3)}


def check(make: Made, folder: Path, cuts: tuple[int, ...], after: Made | None = None, **options: Any) -> Seen:
    """Cut a run after these batches: each time the rest sees the same batches and ends with the same weights."""
    whole = Seen(folder, cuts)
    expected = run(make(), whole, 1, **options)
    for cut in cuts:
        rest = Seen()
        ended = run((after or make)(), rest, 1000 + cut, resume=folder / f"after-{cut}", **options)
        assert rest.batches == whole.batches[cut:], f"cut after {cut} batches"
        for name, value in expected.items():
            assert torch.equal(value, ended[name]), f"cut after {cut} batches: {name}"
    return whole
