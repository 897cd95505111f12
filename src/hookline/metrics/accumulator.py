"""A running reduction of one value, kept on its device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "min", "max", "last")
ValuePart = tuple[str, Any, float]
"""One rank's part of a value: its reduction, its total so far (None: no value), and the weight of the
total.
"""
FOLD_AFTER = 256
"""Values that are kept before they are reduced to one, to bound memory and spread the kernels' cost."""


class Accumulator:
    """A running reduction that costs two list appends per value."""

    __slots__ = ("count", "is_mean", "reduce", "total", "values", "weights")

    def __init__(self, reduce: str = "mean") -> None:
        self.reduce = reduce
        self.is_mean = reduce == "mean"
        self.values: list[Any] = []
        self.weights: list[float] = []
        self.total: Any = None
        self.count: float = 0

    def add(self, value: Any, weight: float) -> None:
        """Add a detached scalar tensor or a number."""
        if self.is_mean and type(value) is float:
            self.total = value * weight if self.total is None else self.total + value * weight
            self.count += weight
            return
        self.values.append(value)
        self.weights.append(weight)
        if len(self.values) >= FOLD_AFTER:
            self.fold()

    def fold(self) -> None:
        """Reduce the values since the last fold, without reading them from the device."""
        if not self.values:
            return
        values, weights = self.values, self.weights
        self.values, self.weights = [], []
        part = _reduce(values, weights, self.reduce)
        self.count += sum(weights)
        if self.total is None or self.reduce == "last":
            self.total = part
        elif self.reduce in ("mean", "sum"):
            self.total = self.total + part
        else:
            self.total = _reduce([self.total, part], [1, 1], self.reduce)

    def part(self) -> ValuePart:
        """Return this rank's part, for the reduction over ranks."""
        self.fold()
        return self.reduce, self.total, self.count

    def state_dict(self) -> dict[str, Any]:
        """Return the total and weight so far."""
        self.fold()
        return {"reduce": self.reduce, "total": self.total, "count": self.count}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Accumulator:
        """Return an accumulator that continues from a saved state."""
        made = cls(state["reduce"])
        made.total, made.count = state["total"], state["count"]
        return made

    def compute(self) -> Any:
        """Return the reduced value so far, a tensor on its device or a number; None if there is no value."""
        self.fold()
        weight = self.count if self.is_mean and self.count else 1
        return self.total if self.total is None or weight == 1 else self.total / weight


def _reduce(values: list[Any], weights: list[float], reduce: str) -> Any:
    if reduce == "last":
        return values[-1]
    if any(isinstance(value, Tensor) for value in values):
        device = next(value.device for value in values if isinstance(value, Tensor))
        dtype = torch.float32 if device.type == "mps" else torch.float64
        try:
            stacked = torch.stack(values).to(dtype).reshape(len(values))
        except (TypeError, RuntimeError):  # numbers, devices or shapes are mixed
            stacked = torch.stack(
                [torch.as_tensor(value, dtype=dtype, device=device).reshape(()) for value in values]
            )
        if reduce == "mean":
            even = weights.count(weights[0]) == len(weights)
            scale = weights[0] if even else torch.tensor(weights, dtype=dtype, device=device)
            return (stacked * scale).sum()
        return stacked.sum() if reduce == "sum" else stacked.min() if reduce == "min" else stacked.max()
    if reduce == "mean":
        return math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
    return math.fsum(values) if reduce == "sum" else min(values) if reduce == "min" else max(values)
