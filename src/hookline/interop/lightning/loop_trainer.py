"""Hookline's trainer that runs the loop of a Lightning trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hookline.interop.lightning.connector import LightningLog
from hookline.interop.lightning.names import LightningNames
from hookline.interop.lightning.profiling import profiling
from hookline.interop.lightning.rules import LightningRules
from hookline.interop.lightning.tuning import ends_tuning
from hookline.run.run import Run
from hookline.run.state import State
from hookline.training.loading import use_training_loaders
from hookline.training.trainer import Trainer as HooklineTrainer

T = TypeVar("T")
REPLACED = ("configure_hooks", "configure_model", "configure_optimizers")
"""Actions of the module that a run inside another one does not call."""


class NamedTrainer(LightningNames, HooklineTrainer):
    """Hookline's trainer with Lightning's names besides its own, for modules and callbacks of this
    dialect.
    """

    @property
    def _own(self) -> Any:
        return self


class LoopTrainer(HooklineTrainer):
    """Hookline's trainer that runs the loop of a Lightning trainer."""

    lightning_trainer: Any = None
    """The trainer that modules and callbacks see."""
    began = 0
    """The batches that were trained on before the last fit."""
    is_tuned = False
    """Whether a tuner has ended the current stage."""
    _around: Any = None
    """The run of another trainer inside which this one runs the loop again."""

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
        if shown is not None and (run.stage != "fit" or run.resume.path is None):
            run.module.zero_grad()  # a stage begins without gradients, but for those of a checkpoint
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
        run = super()._start(stage, *given, **named)
        if self._around is not None:
            self._continue(run, self._around)
        if isinstance(self.rules, LightningRules):
            self.rules.loaded_at.clear()
        counts = run.state.counts
        if self._fitted is not None:
            counts.load_state_dict(self._fitted.state.counts.state_dict(), resumed=False)
        if self._fitted is not None and stage == "fit":
            counts.epoch = counts.epochs_seen = self.lightning_trainer.current_epoch
        if stage == "fit":
            self.began = counts.batches_seen
        return run

    # ---- a run inside the run of another trainer -----------------------------------------------------------

    def run_inside(self, outer: Any, data: Any, given: dict[str, Any]) -> None:
        """Run the stage of another run with its module, data, optimizers, schedulers and counters."""
        stage, module = outer.stage, outer.module
        self._around = outer
        try:
            self._run_stage(stage, module, data, given)
        finally:  # the steps of a module of this dialect are the module itself
            for name in REPLACED:
                vars(self._last.steps if self._last is not None else module).pop(name, None)

    def _run_stage(self, stage: str, module: Any, data: Any, given: dict[str, Any]) -> None:
        if stage == "fit":
            self.fit(module, given["train"], given["val"], datamodule=data)
        elif stage == "predict":
            self.predict(module, given["predict"], datamodule=data)
        else:
            run = self.validate if stage == "validate" else self.test
            run(module, given["val" if stage == "validate" else "test"], datamodule=data)

    def _continue(self, run: Run, outer: Any) -> None:
        """Give a run the optimizers, the loaders and the counters of the run around it."""
        steps: Any = run.steps
        steps.configure_hooks = _no_hooks
        steps.configure_model = lambda: None  # it is complete
        steps.configure_optimizers = lambda: (list(outer.state.optimizers), list(outer.schedules))
        if "train" in outer.data.loaders:  # for estimated_stepping_batches: it is opened already
            loaders = outer.data.loaders["train"]
            use_training_loaders(run, loaders, loaders[0].sharding)
        if not outer.trainer.__dict__.pop("counts_anew", False):
            run.state.counts.load_state_dict(outer.state.counts.state_dict(), resumed=False)


def _no_hooks() -> list[Any]:
    """Return no hooks: those of the module are already hooks of the outer run."""
    return []
