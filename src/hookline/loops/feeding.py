"""Loaders that train some of the optimizers only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookline.errors import OptionError
from hookline.optimizers import gradients


class Feeding:
    """Which optimizers each loader trains, and what each of them got.

    A batch that does not train an optimizer must not leave gradients in its parameters, though backward reaches them: what they
    had before is put aside and comes back.
    """

    def __init__(self, fed: list[list[int]], optimizers: list[Optimizer]) -> None:
        self.fed = fed
        """Numbers of optimizers by the number of the loader."""
        self.updates = [0] * len(optimizers)
        """Updates of each optimizer, which its schedulers go by."""
        self.updated: set[int] = set()
        """The optimizers that took part in the newest update."""
        own = [{id(p): p for group in each.param_groups for p in group["params"]} for each in optimizers]
        self._spared: list[list[Tensor]] = []
        for numbers in fed:
            trained = {key for number in numbers for key in own[number]}
            self._spared.append([p for each in own for key, p in each.items() if key not in trained])
        self._aside: list[Tensor | None] = []

    def spare(self, loader: int) -> None:
        """Before backward: put the gradients aside that this batch must not add to."""
        self._aside = [parameter.grad for parameter in self._spared[loader]]
        for parameter in self._spared[loader]:
            parameter.grad = None

    def bring_back(self, loader: int, window: dict[int, int]) -> None:
        """After backward: they are as they were. The window notes whom the batch was for."""
        for parameter, grad in zip(self._spared[loader], self._aside, strict=True):
            parameter.grad = grad
        self._aside = []
        for number in self.fed[loader]:
            window[number] = window.get(number, 0) + 1

    def note_update(self, number: int) -> None:
        """An optimizer took part in an update."""
        self.updated.add(number)
        self.updates[number] += 1

    def add_loader(self) -> None:
        """A loader that comes late trains all optimizers."""
        self.fed.append(list(range(len(self.updates))))
        self._spared.append([])

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"updates": list(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.updates = list(state.get("updates", self.updates))


def even_out(optimizer: Optimizer, batches: int, size: int) -> None:
    """Losses were divided by the window's length; make it the number of batches that this optimizer got."""
    if batches != size and (grads := gradients(optimizer)):
        torch._foreach_mul_(grads, size / batches)  # pyright: ignore[reportPrivateImportUsage]


def make_feeding(names: list[str], asked: dict[str, list[int]], optimizers: list[Optimizer], accumulate: int) -> Feeding:
    """From names of loaders and numbers of optimizers, checked."""
    for name, numbers in asked.items():
        for number in numbers:
            if number >= len(optimizers):
                raise OptionError(f"Mixture: the loader {name!r} is to train optimizer {number}, and there are {len(optimizers)}: "
                                  f"{', '.join(f'{index} ({type(each).__name__})' for index, each in enumerate(optimizers))}.")  # fmt: skip
    own = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
    shared = [(a, b) for a in range(len(own)) for b in range(a) if own[a] & own[b]]
    if shared and accumulate > 1:
        raise OptionError(f"Mixture: optimizers {shared[0][1]} and {shared[0][0]} train the same parameters, so gradients that are "
                          "accumulated for one would reach the other; leave accumulate_grad_batches at 1, or give each its "
                          "own.")  # fmt: skip
    return Feeding([asked.get(name, list(range(len(optimizers)))) for name in names], optimizers)
