"""`StepContext`: one optimizer update as a single object. Also easy to make by hand, for testing a hook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class OnceFloat:
    """A number on a device that is read at most once, however many listeners use it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __float__(self) -> float:
        if type(self._value) is not float:
            self._value = float(self._value)
        return self._value


class _ReadFloat:
    """A field whose value may be on a device: it becomes a float when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, ctx: Any, owner: type | None = None) -> float:
        if ctx is None:
            return float("nan")
        value = getattr(ctx, self._name)
        if type(value) is not float:
            value = float(value)
            setattr(ctx, self._name, value)
        return value

    def __set__(self, ctx: Any, value: Any) -> None:
        setattr(ctx, self._name, value)


@dataclass(init=False, repr=False, eq=False)
class StepContext:
    """One optimizer update. `loss` (the window's mean) and `grad_norm` are read from the device on use.

    >>> StepContext(step=3, loss=0.5, lr=1e-3).loss
    0.5

    Two contexts are equal if their first seven fields are equal; the other fields are not compared.

    step: the number of the update, from 1. tokens_seen: tokens so far, over all ranks. model, optimizer:
    those that were updated. epoch: the epoch, from 0. rank, world_size: this process, and the number of
    processes. metrics: the newest metrics by name.
    """

    step: int = 0
    loss: _ReadFloat = _ReadFloat()
    """The mean loss over the accumulation window."""
    grad_norm: _ReadFloat = _ReadFloat()
    """The total gradient norm before clipping."""
    lr: float = float("nan")
    """The learning rate that the update used."""
    tokens_seen: int = 0
    model: Any = None
    optimizer: Any = None
    epoch: int = field(default=0, compare=False)
    rank: int = field(default=0, compare=False)
    world_size: int = field(default=1, compare=False)
    metrics: Any = field(default=None, compare=False)

    def __init__(
        self,
        step: int = 0,
        loss: Any = float("nan"),
        grad_norm: Any = float("nan"),
        lr: float = float("nan"),
        tokens_seen: int = 0,
        model: Any = None,
        optimizer: Any = None,
        *,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        metrics: Any = None,
    ) -> None:
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepContext) or type(other) is not type(self):
            return NotImplemented
        mine, others = (
            (each.step, each.loss, each.grad_norm, each.lr, each.tokens_seen, each.model, each.optimizer)
            for each in (self, other)
        )
        return mine == others  # tuples, so that a number that was never set (one NaN) equals itself

    def __repr__(self) -> str:
        return (
            f"StepContext(step={self.step}, loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, "
            f"lr={self.lr})"
        )
