"""The progress of Lightning's loops (`trainer.fit_loop.epoch_progress` and so on), read from the counters of
Hookline's run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hookline.interop.lightning.binder import NAME_OF_HOOK
from hookline.interop.lightning.trainer_parts import Part

BEFORE_STEP = ("on_train_batch_start",)
IN_STEP = (
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
)
AT_END = ("on_train_batch_end",)
"""Hooks of a training batch, by where they are in it."""


@dataclass
class Tracker:
    """How many are ready, started, processed and completed."""

    ready: int = 0
    started: int = 0
    processed: int = 0
    completed: int = 0


class Resettable(Part):
    """Counts that a tuner resets before it runs a loop again."""

    def reset(self) -> None:
        """Let the next `run` of the loop count from zero."""
        self._own.__dict__["counts_anew"] = True


def _hook_of(own: Any) -> str:
    """Return the name of the hook of the module or a callback that is running."""
    return str(getattr(own.state.module, "__dict__", {}).get(NAME_OF_HOOK) or "")


def _tracker(done: int, hook: str) -> Tracker:
    """Return the counts in a hook, if so many batches are counted."""
    if hook in BEFORE_STEP:
        return Tracker(done + 1, done, done, done)
    if hook in IN_STEP:
        return Tracker(done + 1, done + 1, done, done)
    if hook in AT_END:
        return Tracker(done, done, done, max(0, done - 1))
    return Tracker(done, done, done, done)


class BatchProgress(Part):
    """`trainer.fit_loop.epoch_loop.batch_progress`."""

    path = "fit_loop.epoch_loop.batch_progress"

    @property
    def is_last_batch(self) -> bool:
        """Return whether this is the epoch's last batch."""
        return self._view.is_last_batch  # type: ignore[no-any-return]

    @property
    def total(self) -> Tracker:
        """Return the batches of all epochs."""
        state = _fit_state(self._own)
        return _tracker(int(state.batches_seen), self._hook) if state is not None else Tracker()

    @property
    def current(self) -> Tracker:
        """Return the batches of this epoch; between two epochs, of the last one."""
        run = fit_of(self._own)
        if run is None:
            return Tracker()
        done = run.progress.position
        if done == 0 and self._hook not in (*BEFORE_STEP, *IN_STEP) and run.state.batches_seen:
            is_new = run.state.batches_seen > getattr(self._own, "began", 0)
            done = run.state.batch_idx + 1 if is_new else self._length
        return _tracker(done, self._hook)

    @property
    def _length(self) -> int:
        length = self._own.num_training_batches
        return int(length or 0)

    @property
    def _hook(self) -> str:
        own = self._own
        is_training = own._run is not None and own._run is fit_of(own) and not own.state.modes
        return _hook_of(own) if is_training else ""


def fit_of(own: Any) -> Any:
    """Return the last fit; a `hookline.Line` has one run only."""
    return own._fitted if hasattr(own, "_fitted") else own._last


def _fit_state(own: Any) -> Any:
    fitted = fit_of(own)
    return fitted.state if fitted is not None else None


class EpochProgress(Resettable):
    """`trainer.fit_loop.epoch_progress`."""

    path = "fit_loop.epoch_progress"

    @property
    def current(self) -> Tracker:
        """Return the epochs."""
        state = _fit_state(self._own)
        if state is None or not (state.batches_seen or self._own._run is not None):
            return Tracker()
        hook = _hook_of(self._own) if self._own._run is not None else ""
        done, epoch = int(state.epochs_seen), int(self._view.current_epoch)
        if self._own._run is None:
            return _tracker(epoch, "")
        if hook == "on_train_epoch_start":
            return Tracker(epoch + 1, epoch, epoch, epoch)
        if hook in ("setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_end"):
            return _tracker(done, "")
        processed = epoch + 1 if hook == "on_train_epoch_end" else max(done, epoch)
        return Tracker(epoch + 1, epoch + 1, processed, epoch)

    @property
    def total(self) -> Tracker:
        """Return the same: a fit continues to count."""
        return self.current


class EvaluationBatches(Part):
    """`batch_progress` of a validation, test or prediction."""

    path = "validate_loop.batch_progress"

    @property
    def is_last_batch(self) -> bool:
        """Return whether all batches of the pass were read."""
        return bool(self.current.ready >= sum(self._view._lengths(self._kind)))

    @property
    def current(self) -> Tracker:
        """Return the batches of the newest pass, over all loaders."""
        own = self._own
        run = own._last
        if run is None or not run.data.loaders.get(self._kind) or getattr(own, "is_tuned", False):
            return Tracker()
        if own._run is None:
            lengths = [length for length in own.num_batches(self._kind).values() if length is not None]
            return _tracker(sum(lengths), "")
        before = list(own.num_batches(self._kind).values())[: own.state.dataloader_idx]
        return _tracker(sum(length or 0 for length in before) + int(own.state.batch_idx), "training_step")

    @property
    def total(self) -> Tracker:
        """Return the batches of all passes of this trainer."""
        own = self._own
        shown, current = getattr(own, "lightning_trainer", None), self.current
        before = 0 if shown is None else shown._logger_connector.batches_before(own.state.stage)
        return Tracker(*(before + count for count in vars(current).values()))

    @property
    def _kind(self) -> str:
        return {"test": "test", "predict": "predict"}.get(self._own.state.stage, "val")


class OptimizerSteps(Resettable):
    """`optim_progress` and `optim_step_progress`: the updates."""

    path = "fit_loop.epoch_loop.automatic_optimization.optim_progress"

    is_automatic: ClassVar[bool] = True

    @property
    def optimizer_steps(self) -> int:
        """Return the number of updates in this mode of optimization."""
        module = self._view.lightning_module
        is_own = module is None or module.automatic_optimization == self.is_automatic
        return int(self._view.global_step) if is_own else 0

    @property
    def total(self) -> Tracker:
        """Return the number of updates as counts."""
        return _tracker(self.optimizer_steps, "")


class Automatic(Part):
    """`trainer.fit_loop.epoch_loop.automatic_optimization`."""

    path = "fit_loop.epoch_loop.automatic_optimization"
    PARTS: ClassVar[Mapping[str, type[Part]]] = {"optim_progress": OptimizerSteps}


class ManualUpdates(OptimizerSteps):
    """`optim_step_progress` of manual optimization."""

    path = "fit_loop.epoch_loop.manual_optimization.optim_step_progress"
    is_automatic = False


class ManualSteps(Part):
    """`trainer.fit_loop.epoch_loop.manual_optimization`."""

    path = "fit_loop.epoch_loop.manual_optimization"
    PARTS: ClassVar[Mapping[str, type[Part]]] = {"optim_step_progress": ManualUpdates}
