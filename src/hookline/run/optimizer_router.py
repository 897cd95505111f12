"""Route the gradients of each loader to the optimizers that it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hookline.util.errors import OptionError


class OptimizerRouter:
    """Knows which optimizers each loader trains, and counts their updates.

    A backward reaches all parameters. So the gradients of optimizers that this batch does not train are set
    aside before it and restored after it.
    """

    def __init__(self, fed: Mapping[str, Sequence[int]], optimizers: list[Optimizer]) -> None:
        self.fed = dict(fed)
        """The indices of the optimizers that each loader trains; a loader without an entry trains all."""
        self.updates = [0] * len(optimizers)
        """The number of updates of each optimizer; its schedulers depend on it."""
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
        pairs = ((low, high) for high in self._all for low in range(high))
        self._shared = next((pair for pair in pairs if own[pair[0]].keys() & own[pair[1]].keys()), None)
        """Two optimizers that train the same parameters, if there are any."""
        self._aside: list[Tensor | None] = []
        self._unproven = {
            name: [(number, list(own[number].values())) for number in numbers]
            for name, numbers in fed.items()
        }
        """The parameters that each loader trains, until its first batch is checked."""

    def check_accumulation(self, batches: int) -> None:
        """Refuse windows of several batches if optimizers share parameters."""
        if self._shared is not None and batches > 1:
            raise OptionError(
                f"Mixture: optimizers {self._shared[0]} and {self._shared[1]} train the same parameters, so "
                "gradients that are accumulated for one would reach the other. Leave "
                "accumulate_grad_batches at 1, or give each optimizer its own parameters."
            )

    def set_aside_gradients(self, loader: str) -> None:
        """Set aside, before backward, the gradients that this batch must not change."""
        spared = self._spared.get(loader, ())
        self._aside = [parameter.grad for parameter in spared]
        for parameter in spared:
            parameter.grad = None

    def restore_gradients(self, loader: str, fed: dict[int, float], weight: float) -> None:
        """Restore the gradients that were set aside, and record which optimizers this batch trained."""
        for parameter, grad in zip(self._spared.get(loader, ()), self._aside, strict=True):
            parameter.grad = grad
        self._aside = []
        if loader in self._unproven:
            self._check_first_batch(loader)
        for number in self.fed.get(loader, self._all):
            fed[number] = fed.get(number, 0) + weight

    def _check_first_batch(self, loader: str) -> None:
        """Raise if the loss of a loader does not reach the parameters that it should train."""
        for number, parameters in self._unproven.pop(loader):
            if all(parameter.grad is None for parameter in parameters):
                raise OptionError(
                    f"Mixture: the loader {loader!r} should train optimizer {number}, but the loss of its "
                    "first batch reaches none of that optimizer's parameters."
                )

    def begin_update(self, count: float) -> None:
        """Clear the record of the last update."""
        self.updated.clear()

    def count_update(self, number: int) -> None:
        """Count an update of this optimizer."""
        self.updated.add(number)
        self.updates[number] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the counts for a checkpoint."""
        return {"updates": list(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts from a checkpoint."""
        self.updates = list(state.get("updates", self.updates))


def make_router(
    asked: Mapping[str, int | Sequence[int]], optimizers: list[Optimizer], accumulate: int
) -> OptimizerRouter:
    """Make a router from names of loaders and indices of optimizers, after checking them."""
    fed = {name: [numbers] if isinstance(numbers, int) else list(numbers) for name, numbers in asked.items()}
    known = ", ".join(f"{index} ({type(each).__name__})" for index, each in enumerate(optimizers))
    for name, numbers in fed.items():
        if wrong := [number for number in numbers if number >= len(optimizers)]:
            raise OptionError(
                f"Mixture: the loader {name!r} should train optimizer {wrong[0]}, which does not exist. "
                f"Optimizers: {known}."
            )
    router = OptimizerRouter(fed, optimizers)
    router.check_accumulation(accumulate)
    return router
