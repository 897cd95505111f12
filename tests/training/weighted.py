"""Uneven batches of tokens, and the update of one large batch that they must make."""

from __future__ import annotations

from typing import Any

import torch
from tiny import quiet
from torch import Tensor, nn

from hookline import Hook, Module

CLOSE = 1e-12


Batch = dict[str, Tensor]


class Tokens(Module):
    """A loss over the tokens that the mask keeps, in float64."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).squeeze(-1)

    def training_step(self, batch: Batch) -> Any:
        errors = (self(batch["x"]) - batch["y"]).square()
        return (errors * batch["mask"]).sum() / batch["mask"].sum()

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def count(batch: Batch) -> int:
    return int(batch["mask"].sum())


def uneven(*tokens: int, length: int = 6) -> list[Batch]:
    """A batch for each number of tokens: as many samples as it takes, the last one padded."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for many in tokens:
        rows = max(1, -(-many // length))
        mask = (torch.arange(rows * length) < many).to(torch.float64).reshape(rows, length)
        made.append(
            {
                "x": torch.randn(rows, length, 3, generator=generator, dtype=torch.float64),
                "y": torch.randn(rows, length, generator=generator, dtype=torch.float64),
                "mask": mask,
            }
        )
    return made


def large(data: list[Batch]) -> Batch:
    return {name: torch.cat([each[name] for each in data]) for name in data[0]}


def windows(data: list[Batch], size: int) -> list[Batch]:
    return [large(data[start : start + size]) for start in range(0, len(data), size)]


def assert_close(a: nn.Module, b: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=CLOSE), name


def trained(data: Any, optimizer: str = "sgd", **options: Any) -> Tokens:
    net = Tokens(optimizer)
    quiet(**{"count_tokens": count, **options}).fit(net, data)
    return net


def by_tokens(data: Any, optimizer: str = "sgd", **options: Any) -> Tokens:
    return trained(data, optimizer, accumulate_by="tokens", **options)


class Heard(Hook):
    """Skips, and the losses of updates."""

    def __init__(self) -> None:
        self.skips: list[str] = []
        self.losses: list[float] = []
        self.rows: list[float] = []
        self.tokens = 0

    def on_step_skipped(self, reason: str) -> None:
        self.skips.append(reason)

    def on_step_end(self, ctx: Any, tokens_seen: int) -> None:
        self.losses.append(float(ctx.loss))
        self.tokens = tokens_seen

    def on_train_metrics(self, metrics: Any) -> None:
        if "train/loss" in metrics:
            self.rows.append(float(metrics["train/loss"]))
