"""Modules, loaders and hooks for tests of the step, and the same training as a loop written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny import Net
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Hook

Batch = tuple[Tensor, Tensor]


class Stream:
    """A loader that cannot tell its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Skipped(Hook):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_step_skipped(self, reason: str) -> None:
        self.reasons.append(reason)


class AtBatchStart(Hook):
    """Returns a signal at the batches named."""

    def __init__(self, signals: dict[int, Any]) -> None:
        self.signals = signals

    def on_train_batch_start(self, batch_idx: int) -> Any:
        return self.signals.get(batch_idx)


def twins(net: Any = None) -> tuple[Any, Any]:
    net = Net() if net is None else net
    return net, copy.deepcopy(net)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def by_hand(
    net: Net, windows: list[list[Batch]], planned: int = 1, before_step: Callable[[], Any] = lambda: None
) -> None:
    """Each window is one update; losses are divided by `planned`, and rescaled if the window holds fewer."""
    optimizer = net.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        for batch in window:
            loss = net.training_step(batch, 0)
            (loss if planned == 1 else loss / planned).backward()
        if len(window) != planned:
            for p in net.parameters():
                p.grad *= planned / len(window)
        before_step()
        optimizer.step()


class TwoPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(self.first(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.first.parameters(), lr=0.1),
            torch.optim.Adam(self.layer.parameters(), lr=0.01),
        ]


class Curved(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


class Returning(Net):
    """Returns what a function makes of the loss."""

    def __init__(self, make: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(super().training_step(batch, batch_idx), batch_idx)


class BeforeStep(Hook):
    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer

    def on_before_optimizer_step(self, optimizer: Any) -> Any:
        return self.answer(optimizer)


def as_net(twin: Returning) -> Any:
    twin.make = lambda loss, i: loss
    return twin
