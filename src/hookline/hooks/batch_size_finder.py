"""Find the largest batch size that fits into memory, and train with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

from torch import nn

from hookline.engine.checks import Count, Number, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks._snapshot import Snapshot
from hookline.util.errors import HookError, OptionError, StopTraining

WHO = "BatchSizeFinder"
LARGEST = 2**31 - 1
OPTIONS = {"limit_train_batches": 1.0, "overfit_batches": 0.0, "control": False}
"""Options of the short fit in which sizes are tried."""
log = logging.getLogger("hookline")


class BatchSizeFinder(Hook):
    """Finds the largest batch size that fits into memory, by training on a few batches of each size.

    >>> BatchSizeFinder(mode="binsearch").find(trainer, module, train_loader)
    128

    As a hook of a run it searches before the optimizers are made, and the run trains with the size that it
    found; a resumed run keeps that size. Weights, buffers, optimizers, random streams and generators are
    restored after the search. Other hooks do not take part in it. On several ranks, a size must fit on all.
    """

    tier = "builtin"

    @checked_parameters
    def __init__(
        self,
        mode: Literal["power", "binsearch"] = "power",
        init: Annotated[int, Count(1)] = 2,
        max: Annotated[int, Count(1)] | None = None,
        steps: Annotated[int, Count(1)] = 3,
        margin: Annotated[float, Number(0.0, 0.9)] = 0.0,
        name: str | None = None,
    ) -> None:
        """Choose how to search.

        mode: 'power' doubles the size until memory is exhausted; 'binsearch' then searches between the last
        two sizes. init: the first size; if it does not fit, smaller ones are tried. max: the largest size;
        None: the samples of the dataset. steps: batches to train on with each size. margin: the fraction by
        which a size that memory limits is made smaller, because later batches may need more.
        """
        super().__init__(name)
        if max is not None and max < init:
            raise OptionError(f"{WHO}: max={max} is less than init={init}.", option="max", value=max)
        self.mode, self.init, self.max, self.steps, self.margin = mode, init, max, steps, margin
        self.batch_size: int | None = None
        """The size that was found."""
        self.tried: dict[int, bool] = {}
        """Each size that was tried, and whether it fits."""
        self._trainer: Any = None

    def find(
        self, trainer: Any, module: nn.Module, train: Any = None, val: Any = None, **arguments: Any
    ) -> int:
        """Search with a trainer like this one, but without its hooks, and return the batch size.

        Takes the arguments of `trainer.fit`; nothing is validated. It does not change the given trainer, and
        changes only the device of the module.
        """
        found = self._find(trainer, module, train, val=val, **arguments)
        if found is None:
            raise HookError(f"{WHO}: the search did not begin, or was stopped: there is nothing to train.")
        return found

    def _find(self, trainer: Any, module: nn.Module, train: Any = None, **arguments: Any) -> int | None:
        search = _Search(self)
        trainer.fit_aside(search, OPTIONS, module, train, **arguments)
        self.batch_size = search.found
        return search.found

    def setup(self, stage: str, trainer: Any, rank: int) -> None:
        """Search before the run makes its loader and its optimizers."""
        self._trainer = trainer if stage == "fit" else None
        if stage != "fit" or trainer.is_resuming:
            return  # `load_state_dict` has the size of a resumed run
        size = self._find(trainer, trainer.module, **trainer.batch_sizes.arguments)
        if size is None:
            return  # a signal has ended the search, and ends the run
        trainer.batch_sizes.set(size)
        if rank == 0:
            log.info("%s: the run trains with batches of %d", WHO, size)

    def on_fit_start(self) -> None:
        self._trainer = None  # the loader is made soon, and a rollback keeps its size

    def teardown(self) -> None:
        self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size or 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch_size = state["batch_size"] or None
        if self.batch_size is not None and self._trainer is not None:
            self._trainer.batch_sizes.set(self.batch_size)


class _Search(Hook):
    """The hook of the short fit in which the sizes are tried. The fit ends before its first batch."""

    def __init__(self, finder: BatchSizeFinder) -> None:
        super().__init__("batch_size_search")
        self.finder = finder
        self.found: int | None = None

    def on_train_start(
        self, trainer: Any, module: nn.Module, optimizers: list[Any], schedulers: list[Any]
    ) -> None:
        finder, sizes = self.finder, trainer.batch_sizes
        sizes.check()
        largest = sizes.largest()
        most = min(each for each in (finder.max, largest, LARGEST) if each is not None)
        if finder.max is None and largest is None:
            raise OptionError(f"{WHO}: the dataset has no length; pass max=, the largest size to try.")
        finder.tried = {}
        before = Snapshot(module, optimizers, schedulers, on_cpu=True)

        def fits(size: int) -> bool:
            if trainer.should_stop and trainer.strategy.ranks.alone:
                raise StopTraining(trainer.state.stop_reason)
            try:
                finder.tried[size] = sizes.fits(size, finder.steps)
            finally:
                before.restore()
            log.info("%s: batches of %d %s", WHO, size, "fit" if finder.tried[size] else "do not fit")
            return finder.tried[size]

        self.found = search(fits, finder.init, most, finder.mode, finder.margin)
        trainer.stop("the search of a batch size is over")


def search(fits: Callable[[int], bool], init: int, most: int, mode: str, margin: float) -> int:
    """Return the largest size that fits. fits: tries a size. most: the largest size to try."""
    low, high = 0, 0
    size = min(init, most)
    while True:
        if fits(size):
            low = size
        else:
            high = size
        if not low:  # smaller than `init`
            if high == 1:
                raise HookError(
                    f"{WHO}: memory is exhausted by a batch of one sample. Use a smaller model or sample, "
                    "activation_checkpointing=True, or precision='bf16-mixed'."
                )
            size = high // 2
        elif not high:
            if low == most or (mode == "power" and 2 * low > most):
                return low
            size = min(2 * low, most)
        elif mode == "power" or high - low == 1:
            return max(1, int(low * (1 - margin)))
        else:
            size = (low + high) // 2
