"""`StepContext`: one optimizer update as a single object. Also easy to make by hand, for testing a hook."""

from __future__ import annotations

from typing import Any


class OnceFloat:
    """A number on a device that is read at most once, however many look at it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __float__(self) -> float:
        if type(self._value) is not float:
            self._value = float(self._value)
        return self._value


class StepContext:
    """What an update did. `loss` (the mean over the window) and `grad_norm` are read from the device when looked at.

    >>> StepContext(step=3, loss=0.5, lr=1e-3).loss
    0.5
    """

    __slots__ = (
        "_grad_norm", "_loss", "epoch", "lr", "metrics", "model", "optimizer", "rank", "step", "tokens_seen",
        "world_size",
    )  # fmt: skip

    def __init__(
        self, step: int = 0, loss: Any = float("nan"), grad_norm: Any = float("nan"), lr: float = float("nan"),
        tokens_seen: int = 0, model: Any = None, optimizer: Any = None, *,
        epoch: int = 0, rank: int = 0, world_size: int = 1, metrics: Any = None,
    ) -> None:  # fmt: skip
        self.step = step
        self._loss = loss
        self._grad_norm = grad_norm
        self.lr = lr
        self.tokens_seen = tokens_seen
        self.model = model
        self.optimizer = optimizer
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.metrics = {} if metrics is None else metrics

    @property
    def loss(self) -> float:
        """The mean loss over the accumulation window."""
        if type(self._loss) is not float:
            self._loss = float(self._loss)
        return self._loss

    @property
    def grad_norm(self) -> float:
        """The total gradient norm before clipping."""
        if type(self._grad_norm) is not float:
            self._grad_norm = float(self._grad_norm)
        return self._grad_norm

    def __repr__(self) -> str:
        return f"StepContext(step={self.step}, loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, lr={self.lr})"
