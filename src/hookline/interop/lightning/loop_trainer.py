"""Hookline's trainer that runs the loop of a Lightning trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hookline.interop.lightning.connector import LightningLog
from hookline.interop.lightning.names import LightningNames
from hookline.interop.lightning.profiling import profiling
from hookline.interop.lightning.rules import LightningRules
from hookline.interop.lightning.tuning import Rerun, ends_tuning
from hookline.run.run import Run
from hookline.run.state import State
from hookline.training.trainer import Trainer as HooklineTrainer

T = TypeVar("T")


class NamedTrainer(LightningNames, HooklineTrainer):
    """Hookline's trainer with Lightning's names besides its own, for modules and callbacks of this
    dialect.
    """

    @property
    def _own(self) -> Any:
        return self


class LoopTrainer(Rerun):
    """Hookline's trainer that runs the loop of a Lightning trainer."""

    lightning_trainer: Any = None
    """The trainer that modules and callbacks see."""
    began = 0
    """The batches that were trained on before the last fit."""
    is_tuned = False
    """Whether a tuner has ended the current stage."""

    def _finish(self, run: Run, body: Callable[[Run], T]) -> Any:
        self.is_tuned, shows_model = False, self.shows_model
        shown = self.lightning_trainer
        profiler = shown._given["profiler"] if shown is not None and self._around is None else None
        try:
            with profiling(profiler, shown, run):
                return super()._finish(run, functools.partial(self._loop, body))
        finally:
            self.shows_model = shows_model

    def _loop(self, body: Callable[[Run], T], run: Run) -> Any:
        """Run the loop, unless a tuner has ended the stage."""
        if self.is_tuned:
            self.shows_model = False  # a search trains no model
            return None
        shown = self.lightning_trainer
        if shown is not None:
            run.module.zero_grad()  # a stage begins without gradients
        try:
            return body(run)
        except Exception as error:
            if ends_tuning(error):
                self.is_tuned, self.shows_model = True, False
                return None
            raise

    def _make_state(self, **facts: Any) -> State:
        if self.lightning_trainer is not None:
            facts["log"] = LightningLog(self.lightning_trainer._logger_connector)
        state = super()._make_state(**facts)
        if self.lightning_trainer is not None:
            state.setup.shown_trainer = self.lightning_trainer
        return state

    def _start(self, stage: str, *given: Any, **named: Any) -> Run:
        """Continue to count where the last fit ended, as Lightning does. A checkpoint replaces the counts."""
        run: Run = super()._start(stage, *given, **named)
        if isinstance(self.rules, LightningRules):
            self.rules.loaded_at.clear()
        counts = run.state.counts
        if self._fitted is not None:
            counts.load_state_dict(self._fitted.state.counts.state_dict(), resumed=False)
        if self._fitted is not None and stage == "fit":
            assert self.lightning_trainer is not None
            counts.epoch = counts.epochs_seen = self.lightning_trainer.current_epoch
        if stage == "fit":
            self.began = counts.batches_seen
        return run
