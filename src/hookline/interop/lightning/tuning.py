"""`Tuner`, and what Lightning's LearningRateFinder and BatchSizeFinder do with a trainer: run its loop inside
a hook, and restore the run afterwards.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from hookline.engine.events import EVENTS
from hookline.engine.hook_list import HookList
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.hooks.lr_finder import LRFinder
from hookline.interop.lightning.binder import NAME_OF_HOOK
from hookline.interop.lightning.callback_list import FIRST
from hookline.interop.lightning.checkpoints import choose_path
from hookline.interop.lightning.hparams import HyperParameters
from hookline.interop.lightning.package import installed, is_a, is_lightning_module, refusal
from hookline.interop.lightning.trainer_parts import Part
from hookline.training.trainer import Trainer as HooklineTrainer

AROUND = {
    "prepare_data",
    "setup",
    "on_fit_start",
    "on_fit_end",
    "on_exception",
    "teardown",
    "strategy_setup",
    "strategy_teardown",
}
"""Events around the loop, which are not emitted when only the loop runs again."""
UNCHANGED = {
    "checkpoint": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
    "control": False,
    "digest": False,
}
"""Options of the run inside the run, which leaves no files."""


def is_tuner(callback: Any) -> bool:
    """Return whether a callback runs the loop inside its hooks."""
    return callback is not None and is_a(callback, *FIRST)


def ends_tuning(error: BaseException) -> bool:
    """Return whether an error is the request of a tuner to end the stage without training."""
    return type(error).__name__ == "_TunerExitException"


class LoopPlan(Plan):
    """A plan without the events around the loop."""

    def add(self, listeners: Iterable[Listener]) -> None:
        """Add listeners to their events, if the loop emits these."""
        super().add([each for each in listeners if each.event.name not in AROUND])


class Snapshot:
    """The state of a run that a tuner changes: weights, optimizers, schedulers, modes of submodules."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.parts = [run.module, *run.state.optimizers, *(each.scheduler for each in run.schedules)]
        self.states = [copy.deepcopy(each.state_dict()) for each in self.parts]
        self.modes = [(each, each.training) for each in run.module.modules()]

    def restore(self) -> None:
        """Restore everything."""
        for part, state in zip(self.parts, self.states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        for module, mode in self.modes:
            module.training = mode
        for parameter in self.run.module.parameters():
            parameter.grad = None


class CheckpointConnector(Part):
    """`trainer._checkpoint_connector`: chooses checkpoints, and restores what a tuner has saved."""

    def restore(self, path: str) -> None:
        """Restore the run inside which a tuner has saved this."""
        self._view.snapshots[str(path)].restore()

    def _parse_ckpt_path(
        self, state_fn: Any, ckpt_path: Any, model_provided: bool, model_connected: bool
    ) -> Any:
        stage = str(getattr(state_fn, "value", state_fn))
        return choose_path(self._view, stage, ckpt_path, model_provided, model_connected)


def run_loop(front: Any, outer: Any, make_hook: Callable[[Any], Any]) -> Any:
    """Run the loop of the current stage once more, as a run of its own inside the current one.

    Return the state of that run.

    front: the trainer that modules and callbacks see. outer: Hookline's trainer that runs the stage.
    """
    run = outer._run
    names = run.module.__dict__
    current, asked = names.get(NAME_OF_HOOK), front.__dict__["_caller"]
    with tempfile.TemporaryDirectory() as directory:
        inner = _like(outer, directory)
        for callback in front.callbacks:
            inner.hooks.add(make_hook(callback))
        given = {kind: run.data.given.get(kind) for kind in ("train", "val", "test", "predict")}
        data = getattr(run.datamodule, "original", run.datamodule)
        front.__dict__["_trainer"] = inner
        try:
            inner.run_inside(run, data, given)
        finally:
            front.__dict__["_trainer"] = outer
            names[NAME_OF_HOOK], front.__dict__["_caller"] = current, asked
            if run.datamodule is not None:
                run.datamodule._attach(run)
            run.steps._attach(run)
            names[NAME_OF_HOOK] = current
    return inner.state


def _like(outer: Any, directory: str) -> Any:
    """Return a trainer with the options of another, which emits only the events of its loop."""
    options = {**asdict(outer.options), **UNCHANGED, "run_dir": directory, "fast_dev_run": False}
    inner = type(outer)(**options, strategy=outer.strategy, logger=False)
    inner.plan = LoopPlan(EVENTS)
    inner.hooks = HookList(inner.plan, EVENTS, inner.strategy.rank)
    inner.lightning_trainer, inner.rules = outer.lightning_trainer, outer.rules
    inner.shows_model = False
    return inner


NAMES = ("lr", "learning_rate")
"""Attributes of a module, or of its hyper-parameters, that hold the learning rate."""


class FoundRate:
    """The result of a learning-rate test, with Lightning's names."""

    def __init__(self, finder: LRFinder) -> None:
        self.finder = finder
        self.lr_min, self.lr_max, self.num_training = finder.min_lr, finder.max_lr, finder.steps
        self.mode = "exponential"

    @property
    def results(self) -> dict[str, list[float]]:
        """Return the rates, and the loss at each."""
        return {"lr": self.finder.lrs, "loss": self.finder.losses}

    def suggestion(self) -> float | None:
        """Return the rate to begin with; None if the test shows no decrease."""
        return self.finder.suggestion

    def plot(self, suggest: bool = False, show: bool = False) -> Any:
        """Return a figure of loss over rate."""
        return self.finder.figure()


class Tuner:
    """Finds a learning rate or a batch size before training.

    >>> Tuner(trainer).lr_find(model, train_loader)
    """

    def __init__(self, trainer: Any) -> None:
        """Take a trainer. trainer: its options are those of a search."""
        self._trainer = trainer

    def lr_find(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        *,
        datamodule: Any = None,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        **others: Any,
    ) -> Any:
        """Search a learning rate: with Lightning's own search, or Hookline's LRFinder without the package.

        update_attr: set the attribute of the model, and of its hparams, that holds it.
        """
        if is_lightning_module(model) or self._has_theirs(model):
            return self._theirs("lr_find").lr_find(
                model,
                train_dataloaders,
                val_dataloaders,
                datamodule=datamodule,
                min_lr=min_lr,
                max_lr=max_lr,
                num_training=num_training,
                early_stop_threshold=early_stop_threshold,
                update_attr=update_attr,
                attr_name=attr_name,
                **others,
            )
        if others.get("mode", "exponential") != "exponential":
            raise refusal(
                f"mode={others['mode']!r}: rates of this test grow by the same factor, mode='exponential'.",
                "mode",
                others["mode"],
            )
        owners, name = _rate_of(model, attr_name) if update_attr else ([], "")
        divergence = float("inf") if early_stop_threshold is None else early_stop_threshold
        finder = LRFinder(min_lr, float(max_lr), num_training, divergence, plot=False)
        own = getattr(self._trainer, "_own", self._trainer)  # hookline.Trainer itself
        finder.find(own, model, train_dataloaders, datamodule=datamodule)
        for owner in owners if finder.suggestion is not None else ():
            setattr(owner, name, finder.suggestion)
        return FoundRate(finder)

    def scale_batch_size(self, model: Any, *arguments: Any, **options: Any) -> int | None:
        """Search the largest batch size that fits into memory, with Lightning's own search."""
        return self._theirs("scale_batch_size").scale_batch_size(model, *arguments, **options)  # type: ignore[no-any-return]

    def _has_theirs(self, model: Any) -> bool:
        """Return whether Lightning's search can run a module of this dialect."""
        return (
            isinstance(model, HyperParameters)
            and not isinstance(self._trainer, HooklineTrainer)
            and bool(installed("tuner.tuning", "Tuner"))
        )

    def _theirs(self, method: str) -> Any:
        if isinstance(self._trainer, HooklineTrainer):
            ours = {"lr_find": "LRFinder", "scale_batch_size": "BatchSizeFinder"}[method]
            raise refusal(
                f"Tuner.{method} needs the Trainer of hookline.interop.lightning. For a hookline.Trainer use "
                f"hookline.hooks.{ours}().find(trainer, module, loader).",
                method,
                None,
            )
        tuner = installed("tuner.tuning", "Tuner")
        if tuner is None:
            raise refusal(
                f"Tuner.{method} needs the package lightning; try batch sizes with "
                "Trainer(max_steps=3, limit_val_batches=3).",
                method,
                None,
            )
        return tuner(self._trainer)


def _rate_of(model: Any, attr_name: str) -> tuple[list[Any], str]:
    """Return the objects that have the learning rate, and the name of its attribute."""
    names = (attr_name,) if attr_name else NAMES
    for name in names:
        owners = [each for each in (model, getattr(model, "hparams", None)) if hasattr(each, name)]
        if owners:
            return owners, name
    raise AttributeError(
        f"{type(model).__name__} and its hparams should have one of these fields: {', '.join(names)}; or "
        "pass attr_name= or update_attr=False."
    )
