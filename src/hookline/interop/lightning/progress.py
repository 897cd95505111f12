"""The progress of Lightning's loops (`trainer.fit_loop.epoch_progress` and so on), read from the counters of
Hookline's run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hookline.interop.lightning.binder import NAME_OF_HOOK
from hookline.interop.lightning.trainer_parts import Part
from hookline.run.run import Run
from hookline.run.state_parts import fact

BATCH_ENDS = ("on_train_batch_end", "on_step_end")

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


class SavedProgress(Part):
    """Counts that are read from the state of the loops, as a checkpoint contains it."""

    key: ClassVar[str] = ""
    """The entry of the state; further names lead into it."""
    within: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as a dictionary."""
        found = self._view.fit_loop.state_dict().get(self.key, _no_batches())
        for name in self.within:
            found = found[name]
        return dict(found)

    @property
    def total(self) -> Tracker:
        """Return the counts of the run."""
        return Tracker(**self.state_dict()["total"])

    @property
    def current(self) -> Tracker:
        """Return the counts of the epoch."""
        return Tracker(**self.state_dict()["current"])


class SchedulerSteps(SavedProgress):
    """`trainer.fit_loop.epoch_loop.scheduler_progress`."""

    key = "epoch_loop.scheduler_progress"


class OptimizerUpdates(SavedProgress):
    """`optim_progress.optimizer.step`."""

    key = "epoch_loop.automatic_optimization.optim_progress"
    within = ("optimizer", "step")


class GradientClears(OptimizerUpdates):
    """`optim_progress.optimizer.zero_grad`."""

    within = ("optimizer", "zero_grad")


class OptimizerProgress(Part):
    """`optim_progress.optimizer`."""

    PARTS: ClassVar[Mapping[str, type[Part]]] = {"step": OptimizerUpdates, "zero_grad": GradientClears}


class ValidationBatches(SavedProgress):
    """`trainer.fit_loop.epoch_loop.val_loop.batch_progress`."""

    key = "epoch_loop.val_loop.batch_progress"

    @property
    def is_last_batch(self) -> bool:
        """Return whether all batches of the validation were read."""
        return bool(self.state_dict()["is_last_batch"])


class Resettable(Part):
    """Counts that a tuner resets before it runs a loop again."""

    def reset(self) -> None:
        """Let the next `run` of the loop count from zero."""
        self._own.__dict__["counts_anew"] = True


def _hook_of(own: Any) -> str:
    """Return the name of the hook of the module or a callback that is running.

    A module of this dialect does not record it: then it is the event, or the step inside a batch.
    """
    if name := getattr(own.state.module, "__dict__", {}).get(NAME_OF_HOOK):
        return str(name)
    if own._run is None:
        return ""
    shown = getattr(own, "lightning_trainer", None)
    is_in_step = shown is not None and shown._logger_connector.counts.in_batch
    return current_event(own._run) or ("training_step" if is_in_step else "")


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

    is_last_batch: bool = fact("_view.is_last_batch", "Return whether this is the epoch's last batch.")

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
            done = run.state.batch_idx + 1 if is_new else int(self._own.num_training_batches or 0)
        return _tracker(done, self._hook)

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

    total: Tracker = fact("current", "Return the same: a fit continues to count.")


class EvaluationBatches(Part):
    """`batch_progress` of a validation, test or prediction."""

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
            return _tracker(sum(length or 0 for length in own.num_batches(self._kind).values()), "")
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

    PARTS: ClassVar[Mapping[str, type[Part]]] = {"optimizer": OptimizerProgress}

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

    PARTS: ClassVar[Mapping[str, type[Part]]] = {"optim_progress": OptimizerSteps}


class ManualUpdates(OptimizerSteps):
    """`optim_step_progress` of manual optimization."""

    is_automatic = False


class ManualSteps(Part):
    """`trainer.fit_loop.epoch_loop.manual_optimization`."""

    PARTS: ClassVar[Mapping[str, type[Part]]] = {"optim_step_progress": ManualUpdates}


# ---- the state of the loops --------------------------------------------------------------------------------


class LoopCounts:
    """Counts that Lightning's loops have and a run of Hookline has not."""

    in_batch = False
    """Whether a training batch is under way."""
    of_epoch = -1
    """The epoch that the counts of `epoch` belong to."""

    def __init__(self) -> None:
        self.forget_validation()
        self.schedulers_before = 0
        """The steps of all schedulers before the epoch."""
        self.batches_that_stepped = 0
        """The step number that loggers get: batches after which an update was due."""
        self.seen: dict[int, int] = {}
        """The number of evaluation batches of each loader since it was made."""

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue the step number of loggers. saved: the progress of the training in a file of Lightning."""
        batches = (saved.get("epoch_loop.batch_progress") or {}).get("current") or {}
        at_end = batches.get("processed", 0) > batches.get("completed", 0)  # saved in on_train_batch_end
        counted = (saved.get("epoch_loop.state_dict") or {}).get("_batches_that_stepped", 0)
        self.batches_that_stepped = counted + at_end

    def begin_training(self, run: Run) -> None:
        """Set the step number of loggers, unless it counts batches because optimization is manual."""
        if getattr(run.module, "automatic_optimization", True):
            self.batches_that_stepped = run.state.step

    def begin_epoch(self, run: Run) -> None:
        """Record where the epoch begins."""
        self.in_batch, self.schedulers_before = False, scheduler_steps(run)

    def begin_validation(self, epoch: int) -> None:
        """Count the batches of a validation in a fit from zero."""
        self.started = self.ended = 0
        if epoch != self.of_epoch:
            self.of_epoch, self.all_started, self.all_ended = epoch, 0, 0

    def forget_validation(self) -> None:
        """Count from zero, as after a sanity check."""
        self.of_epoch, self.started, self.ended, self.all_started, self.all_ended = -1, 0, 0, 0, 0

    def start_validation_batch(self, stage: str) -> None:
        """Count a batch that is started, in a fit."""
        if stage == "fit":
            self.started += 1
            self.all_started += 1

    def end_validation_batch(self, stage: str) -> None:
        """Count a batch that is over, in a fit."""
        if stage == "fit":
            self.ended += 1
            self.all_ended += 1

    def validation(self, run: Run) -> dict[str, Any]:
        """Return the progress of the validation; the total is that of the epoch."""
        is_now = self.of_epoch == run.state.epoch
        length = sum(each.length or 0 for each in run.data.loaders.get("val", ()))
        return {
            "total": _batch_counts(self.all_started, self.all_ended) if is_now else _batch_counts(0, 0),
            "current": _batch_counts(self.started, self.ended),
            "is_last_batch": 0 < length <= self.started,
        }


def scheduler_steps(run: Run) -> int:
    """Return how often the schedulers were advanced, all together."""
    return sum(int(getattr(each.scheduler, "last_epoch", 0)) for each in run.schedules)


def _batch_counts(started: int, ended: int) -> dict[str, int]:
    return {"ready": started, "completed": ended, "started": started, "processed": ended}


def _update_counts(ready: int, completed: int, *names: str) -> dict[str, int]:
    return {"ready": ready, "completed": completed, **dict.fromkeys(names, ready)}


def loops(run: Run, counts: LoopCounts) -> dict[str, Any]:
    """Return the progress as Lightning's loops keep it, so that Lightning can resume from the file too."""
    s, event = run.state, current_event(run)
    is_ending = event == "on_train_epoch_end" and s.epochs_seen > s.epoch
    position = _batches_of_epoch(run) if is_ending or _is_over(run) else run.progress.position
    in_batch = counts.in_batch and event not in BATCH_ENDS and _is_open(run)
    length = None if run.data.train is None else run.data.train.length
    seen, ending = s.batches_seen, int(event in BATCH_ENDS)
    scheduled = scheduler_steps(run) - counts.schedulers_before
    is_inside = bool(position) or s.epochs_seen == s.epoch
    begun = s.epochs_seen + int(is_inside and not is_ending and _is_open(run))
    epochs = {
        "ready": begun,
        "completed": s.epochs_seen - int(is_ending),
        "started": begun,
        "processed": s.epochs_seen,
    }
    return {
        "fit_loop": {
            "state_dict": _loader_states(run),
            "epoch_loop.state_dict": {"_batches_that_stepped": counts.batches_that_stepped},
            "epoch_loop.batch_progress": {
                **{
                    name: _batch_counts(done + in_batch, done) | {"completed": done - ending}
                    for name, done in (("total", seen), ("current", position))
                },
                "is_last_batch": length is not None and position + in_batch == length,
            },
            "epoch_loop.scheduler_progress": {
                "total": _update_counts(scheduler_steps(run), scheduler_steps(run)),
                "current": _update_counts(scheduled, scheduled),
            },
            **_optimizations(run, position, in_batch),
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": counts.validation(run),
            "epoch_progress": {"total": epochs, "current": dict(epochs)},
        },
        "validate_loop": {"state_dict": {}, "batch_progress": _no_batches() | {"is_last_batch": False}},
        "test_loop": {"state_dict": {}, "batch_progress": _no_batches() | {"is_last_batch": False}},
        "predict_loop": {"state_dict": {}, "batch_progress": _no_batches()},
    }


def _optimizations(run: Run, position: int, in_batch: bool) -> dict[str, Any]:
    """Return the progress of the updates: Lightning's update encloses the step of its last batch, and a
    window begins with clearing the gradients.
    """
    s, is_manual = run.state, run.traits.is_manual
    steps, first = s.step, max(0, run.progress.epoch_began[0])
    length = None if run.data.train is None else run.data.train.length
    is_update = in_batch and ((position + 1) % run.traits.accumulate == 0 or position + 1 == length)
    clears = int(run.window.batches > 0)
    own: dict[str, Any] = {}
    for name, done in (("total", steps), ("current", max(0, steps - first))):
        updates, manual = (0, done) if is_manual else (done, 0)
        starting, clearing = (0, 0) if is_manual else (int(is_update), clears)
        own[name] = (
            _update_counts(updates + starting, updates),
            _update_counts(updates + clearing, updates + clearing, "started"),
            _update_counts(manual, manual),
        )
    kinds = [{name: own[name][index] for name in ("total", "current")} for index in range(3)]
    return {
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": kinds[0], "zero_grad": kinds[1]}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": kinds[2],
    }


def _loader_states(run: Run) -> dict[str, Any]:
    """Return the states of training loaders that have one, where Lightning looks for them."""
    made = getattr(run.traits.rules, "made", {}).get("train")
    states = None if made is None else made.combined._state_dicts()
    return {"combined_loader": states} if states else {}


def _no_batches() -> dict[str, Any]:
    return {"total": _batch_counts(0, 0), "current": _batch_counts(0, 0)}


def _batches_of_epoch(run: Run) -> int:
    """Return the batches of the epoch that has ended; a resumed run may have read none of them."""
    if run.state.batches_seen > getattr(run.trainer, "began", 0) or run.data.train is None:
        return run.state.batch_idx + 1
    return int(run.data.train.length or 0)


def _is_open(run: Run) -> bool:
    """Return whether the run is under way, or has failed in what it was doing."""
    return run.trainer._run is run or run.state.status in ("error", "interrupted")


def _is_over(run: Run) -> bool:
    """Return whether the run has ended after whole epochs; its position is then that of the next one."""
    return not _is_open(run) and run.progress.position == 0 and run.state.batches_seen > 0


def current_event(run: Run) -> str:
    """Return the innermost event that is being emitted; empty between events."""
    running = run.state.running if run.trainer._run is run else None
    while running is not None:
        what, running = running
        event = getattr(what, "event", None)
        if event is not None:
            return str(event.name)
    return ""
