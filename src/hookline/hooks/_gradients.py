"""What `GradientMonitor` measures of one update, and what it remembers of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.hooks._measuring import norms, percentiles, sample
from hookline.strategies.sharded import gather_rows, shards_of


class Measured:
    """One optimizer's gradients in numbers, still on the device. `rows` names layers and the places of their
    parameters.
    """

    def __init__(self, rows: dict[str, list[int]], parameters: Sequence[Tensor]) -> None:
        self.rows, self.parameters = rows, parameters
        self.grads = [each.grad for each in parameters if each.grad is not None]
        self.norms = norms(self.grads)
        self.percentiles = self.norms.new_empty(0)
        self.samples: list[Tensor] = []
        self.sizes = self.changes = self.norms.new_empty(0)
        self._before: list[Tensor] = []

    def sample(self, limit: int, wanted: Sequence[float], keep: bool) -> None:
        """Take values of each layer, for percentiles of their magnitudes and, if kept, for histograms."""
        share = limit // shards_of(self.grads)
        taken = [sample([self.grads[index] for index in places], share) for places in self.rows.values()]
        taken = gather_rows(taken, self.grads)
        if wanted and taken:
            self.percentiles = percentiles([each.abs() for each in taken], wanted)
        self.samples = taken if keep else []

    def remember_weights(self) -> None:
        """The update is next."""
        self._before = [each.detach().clone() for each in self.parameters]

    def compare_weights(self) -> None:
        """The update is made: how large was it, and how large are the weights?"""
        if self._before:
            self.sizes = norms(self._before)
            now = [each.detach() for each in self.parameters]
            self.changes = norms(torch._foreach_sub(now, self._before))  # pyright: ignore[reportPrivateImportUsage]
            self._before = []

    def tensors(self) -> list[Tensor]:
        """Everything there is to read."""
        return [self.norms, self.sizes, self.changes, self.percentiles.flatten(), *self.samples]


class Reading:
    """The numbers of one update, over all optimizers."""

    def __init__(self, parts: Iterable[Measured]) -> None:
        """Bring everything over in one read, whatever the number of layers and optimizers."""
        parts = list(parts)
        tensors = [each for part in parts for each in part.tensors()]
        numbers = torch.cat([each.to(tensors[0].device) for each in tensors]).cpu()
        pieces = iter(torch.split_with_sizes(numbers, [each.numel() for each in tensors]))
        self.norms: dict[str, float] = {}
        self.ratios: dict[str, float] = {}
        self.percentiles: dict[str, list[float]] = {}
        self.samples: dict[str, Tensor] = {}
        everything: list[float] = []
        for part in parts:
            found, sizes, changes = (next(pieces).tolist() for _ in range(3))
            table = next(pieces)
            everything += found
            for row, places in part.rows.items():
                self.norms[row] = _together(found, places)
                if changes:
                    size = _together(sizes, places)
                    self.ratios[row] = _together(changes, places) / size if size else math.nan
            if table.numel():
                self.percentiles.update(zip(part.rows, table.view(len(part.rows), -1).tolist(), strict=True))
            self.samples.update(
                zip(part.rows if part.samples else (), [next(pieces) for _ in part.samples], strict=True)
            )
        self.total = _together(everything, range(len(everything)))


def _together(parts: Sequence[float], places: Iterable[int]) -> float:
    """The norm of several tensors from the norm of each."""
    return math.hypot(*(parts[place] for place in places))


class History:
    """A norm for each layer and report. When it is full, every second report is dropped and from then on left
    out.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """A new run."""
        self.steps: list[int] = []
        self.norms: dict[str, list[float]] = {}
        """For each layer a norm at each of `steps`: NaN where it had no gradient, infinite where it was not
        finite.
        """
        self._stride, self._count = 1, 0

    def add(self, step: int, found: dict[str, float]) -> None:
        """Remember a report."""
        self._count += 1
        if (self._count - 1) % self._stride:
            return
        for row in found:
            self.norms.setdefault(row, [math.nan] * len(self.steps))
        self.steps.append(step)
        for row, values in self.norms.items():
            value = found.get(row, math.nan)
            values.append(math.inf if row in found and math.isnan(value) else value)
        if len(self.steps) > self.limit:
            self.steps = self.steps[::2]
            self.norms = {row: values[::2] for row, values in self.norms.items()}
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """As one matrix, not as many small numbers."""
        table = torch.tensor(list(self.norms.values()), dtype=torch.float64)
        return {
            "steps": list(self.steps),
            "rows": list(self.norms),
            "norms": table,
            "stride": self._stride,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps = list(state["steps"])
        self.norms = dict(zip(state["rows"], state["norms"].tolist(), strict=True))
        self._stride, self._count = state["stride"], state["count"]
