"""Loops written by hand, and a hook that notes what it hears in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hookline import Hook, Line, every


def net_and_sgd(lr: float = 0.1) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), lr=lr)


def recorder(names: Any, *, detail: bool = False) -> Any:
    """A hook that hears all these events and writes them down."""

    def listening_to(name: str) -> Callable[..., None]:
        def method(self: Any, step: int, batch_idx: int, epoch: int) -> None:
            self.seen.append((name, step, batch_idx, epoch) if detail else name)

        return method

    made = type("Records", (Hook,), {name: listening_to(name) for name in names})()
    made.seen = []
    return made


class Counts(Hook):
    """Counts its calls, and keeps the count."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    @every("3 steps")
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def train(
    line: Line, net: Any, sgd: Any, data: Any, *, epochs: int = 1, val: Any = (), window: int = 1
) -> None:
    """An ordinary loop with a line."""
    with line:
        for _ in line.epochs(epochs):
            data = list(data)
            for index, (x, y) in enumerate(line.epoch(data)):
                loss = F.mse_loss(net(x), y)
                if index % window == 0:
                    sgd.zero_grad()
                line.backward(loss, divide_by=min(window, len(data) - index // window * window))
                if (index + 1) % window == 0 or index + 1 == len(data):
                    sgd.step()
            for x, y in line.validation(val) if val else ():
                line.log("val/loss", F.mse_loss(net(x), y))


class Facts(Hook):
    """What a step and an epoch were told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, float]] = []
        self.epochs: list[float] = []

    def on_step_end(self, loss: float, grad_norm: float) -> None:
        self.steps.append((loss, grad_norm))

    def on_train_epoch_end(self, metrics: Any) -> None:
        self.epochs.append(metrics["train/loss"])
