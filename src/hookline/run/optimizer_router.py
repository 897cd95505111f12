"""Loaders that train some of the optimizers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hookline.util.errors import OptionError


class OptimizerRouter:
    """Which optimizers each loader trains, and what each of them got.

    A batch that does not train an optimizer must not leave gradients in its parameters, though backward
    reaches them: what they had before is put aside and comes back.
    """

    def __init__(self, fed: Mapping[str, Sequence[int]], optimizers: list[Optimizer]) -> None:
        self.fed = dict(fed)
        """Numbers of optimizers by the name of the loader; one that is not named trains all."""
        self.updates = [0] * len(optimizers)
        """Updates of each optimizer, which its schedulers go by."""
        self.updated: set[int] = set()
        """The optimizers that took part in the newest update."""
        self._all = range(len(optimizers))
        own = [{id(p): p for group in each.param_groups for p in group["params"]} for each in optimizers]
        self._spared: dict[str, list[Tensor]] = {}
        for name, numbers in fed.items():
            trained = {key for number in numbers for key in own[number]}
            self._spared[name] = list(
                {key: p for each in own for key, p in each.items() if key not in trained}.values()
            )
        self._aside: list[Tensor | None] = []
        self._unproven = {
            name: [(number, list(own[number].values())) for number in numbers]
            for name, numbers in fed.items()
        }
        """What each loader is to train, until its first batch has shown that it does."""

    def set_aside_gradients(self, loader: str) -> None:
        """Before backward: put the gradients aside that this batch must not add to."""
        spared = self._spared.get(loader, ())
        self._aside = [parameter.grad for parameter in spared]
        for parameter in spared:
            parameter.grad = None

    def restore_gradients(self, loader: str, fed: dict[int, float], weight: float) -> None:
        """After backward: they are as they were. The window notes whom the batch was for."""
        for parameter, grad in zip(self._spared.get(loader, ()), self._aside, strict=True):
            parameter.grad = grad
        self._aside = []
        if loader in self._unproven:
            self._prove(loader)
        for number in self.fed.get(loader, self._all):
            fed[number] = fed.get(number, 0) + weight

    def _prove(self, loader: str) -> None:
        """A loader that is to train an optimizer whose parameters its loss does not reach would train
        nothing, in silence.
        """
        for number, parameters in self._unproven.pop(loader):
            if all(parameter.grad is None for parameter in parameters):
                raise OptionError(
                    f"Mixture: the loader {loader!r} is to train optimizer {number}, but the loss of its "
                    "first batch reaches none of that optimizer's parameters."
                )

    def begin_update(self, count: float) -> None:
        """Forget which optimizers took part in the last update."""
        self.updated.clear()

    def count_update(self, number: int) -> None:
        """An optimizer took part in an update."""
        self.updated.add(number)
        self.updates[number] += 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"updates": list(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.updates = list(state.get("updates", self.updates))


def make_router(
    asked: Mapping[str, int | Sequence[int]], optimizers: list[Optimizer], accumulate: int
) -> OptimizerRouter:
    """From names of loaders and numbers of optimizers, checked."""
    fed = {name: [numbers] if isinstance(numbers, int) else list(numbers) for name, numbers in asked.items()}
    known = ", ".join(f"{index} ({type(each).__name__})" for index, each in enumerate(optimizers))
    for name, numbers in fed.items():
        if wrong := [number for number in numbers if number >= len(optimizers)]:
            raise OptionError(
                f"Mixture: the loader {name!r} is to train optimizer {wrong[0]}, and there are only: {known}."
            )
    own = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
    shared = [(a, b) for a in range(len(own)) for b in range(a) if own[a] & own[b]]
    if shared and accumulate > 1:
        raise OptionError(
            f"Mixture: optimizers {shared[0][1]} and {shared[0][0]} train the same parameters, so gradients "
            "that are accumulated for one would reach the other; leave accumulate_grad_batches at 1, or "
            "give each its own."
        )
    return OptimizerRouter(fed, optimizers)
