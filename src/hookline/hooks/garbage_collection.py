"""Collect garbage at fixed steps, the same on all ranks, instead of whenever Python does."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from hookline.engine.checks import Count, Several, checked_parameters
from hookline.engine.filters import FilterSettings
from hookline.engine.hook import Hook
from hookline.util.errors import HookError

MOMENTS = {
    "epoch": "on_train_epoch_end",
    "validation": "on_validation_end",
    "checkpoint": "on_save_checkpoint",
}
OLDEST = 2
"""The generation of a full collection."""
OF_PYTHON = 10_000
"""Fewer frozen objects than this are Python's own: in 3.12, a collection freezes a few hundred. A program
that freezes its objects has more of them, because torch alone has over 100,000.
"""


class GarbageCollection(Hook):
    """Switches Python's automatic garbage collection off during a fit and collects every n steps instead.

    Automatic collections pause each rank at another moment, and the other ranks wait for it. Here all ranks
    collect after the same step. The end of the run restores the setting, also after a failure.
    """

    tier = "builtin"
    may_listen = ("on_step_end", *MOMENTS.values())
    observes = True

    @checked_parameters
    def __init__(
        self,
        every: Annotated[int, Count(1)] = 100,
        generation: Literal[0, 1, 2] = 1,
        full_at: Annotated[str | Sequence[str], Several(MOMENTS)] = ("epoch",),
        freeze: bool = False,
        log: bool = False,
        name: str | None = None,
    ) -> None:
        """Choose when to collect.

        every: steps between two collections. generation: the oldest generation that they visit; 2 visits all
        objects and takes longest. full_at: moments of full collections: 'epoch' (its end), 'validation' (its
        end), 'checkpoint' (before one is saved), or none. freeze: leave the objects that exist when training
        begins (imports, datasets) out of all collections, which makes them shorter. log: log the seconds of
        each collection as `gc/seconds` and what it freed as `gc/collected`.
        """
        super().__init__(name)
        self.every, self.generation, self.freeze, self.log = every, generation, freeze, log
        self.full_at: tuple[str, ...] = tuple(full_at)
        self.collections = 0
        """Collections of this run so far."""
        self.seconds = 0.0
        """The time that they took."""
        self._was_enabled: bool | None = None
        """Whether automatic collection was on before the run; None outside of a run."""
        self._is_frozen = False
        steps = FilterSettings(every=f"{every} steps")
        self.__dict__["on_step_end"] = steps(functools.partial(self._collect, generation))
        for moment in self.full_at:
            self.__dict__[MOMENTS[moment]] = functools.partial(self._collect, OLDEST)

    def setup(self, stage: str, hooks: Any) -> None:
        if stage != "fit":
            return
        if any(isinstance(each, GarbageCollection) and each is not self for each in hooks):
            raise HookError("Two hooks GarbageCollection would both switch Python's collections: keep one.")
        self.collections, self.seconds = 0, 0.0
        self._was_enabled = gc.isenabled()
        gc.disable()

    def on_train_start(self, state: Any) -> None:
        """Collect once, so that all ranks begin with as little garbage."""
        self._collect(OLDEST, state)
        if self.freeze and gc.get_freeze_count() < OF_PYTHON:  # what the user has frozen stays frozen
            gc.freeze()
            self._is_frozen = True

    def _collect(self, generation: int, state: Any) -> None:
        if self._was_enabled is None or state.sanity_checking:
            return
        began = time.perf_counter()
        found = gc.collect(generation)
        spent = time.perf_counter() - began
        self.collections += 1
        self.seconds += spent
        if self.log:
            state.trainer.log_dict({"gc/seconds": spent, "gc/collected": float(found)})

    def enabled_changed(self, enabled: bool) -> None:
        """Collect automatically while the hook is switched off, if Python did so before the run."""
        if self._was_enabled:
            (gc.disable if enabled else gc.enable)()

    def teardown(self, stage: str) -> None:
        if self._was_enabled is None:
            return
        if self._is_frozen:
            gc.unfreeze()
            self._is_frozen = False
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
