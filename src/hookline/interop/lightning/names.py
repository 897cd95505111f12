"""The names under which Lightning's trainer shows a run, read from Hookline's trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.engine.listener import overrides
from hookline.interop.lightning.loaders import has_source
from hookline.interop.lightning.package import is_a
from hookline.metrics.accumulator import REDUCTIONS
from hookline.metrics.metric_log import Metrics, with_ending
from hookline.run.optimizers import Schedule
from hookline.run.state_parts import fact
from hookline.training.composition import set_accumulation
from hookline.util.errors import OptionError, closest


class MetricTensors(dict[str, Tensor]):
    """Metrics as tensors, as callbacks read them; an entry that is set becomes a metric of the run."""

    def __init__(self, newest: Metrics) -> None:
        super().__init__({name: _tensor(value) for name, value in newest.raw().items()})
        self._newest = newest

    def __setitem__(self, name: str, value: Any) -> None:
        self._newest[name] = value.detach() if isinstance(value, Tensor) else float(value)
        super().__setitem__(name, _tensor(value))

    update = MutableMapping.update  # calls `__setitem__`, which that of `dict` does not

    def __deepcopy__(self, memo: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.items()}  # a copy does not change the run

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Schedules(list[Any]):
    """The schedulers of a run, as callbacks read and replace them; entries may be Lightning's."""

    def __init__(self, run: Any) -> None:
        super().__init__(run.schedules)
        self._run = run

    def __setitem__(self, where: Any, given: Any) -> None:
        super().__setitem__(
            where,
            [lightning_schedule(each) for each in given]
            if isinstance(where, slice)
            else lightning_schedule(given),
        )
        self._write()

    def append(self, given: Any) -> None:
        """Add a scheduler."""
        super().append(lightning_schedule(given))
        self._write()

    def _write(self) -> None:
        self._run.schedules[:] = self
        self._run.state.setup.schedulers = [each.scheduler for each in self]


SETTINGS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
"""What Lightning's configuration of a scheduler holds."""


@dataclass(slots=True, eq=False)
class LightningSchedule(Schedule):
    """A scheduler with the settings of Lightning's own configuration, which Lightning has checked."""

    reduce_on_plateau: bool = False

    def __post_init__(self) -> None:
        """Do nothing: in manual optimization Lightning takes any object."""

    needs_metric: ClassVar[Any] = fact("reduce_on_plateau", "Whether it needs a metric to advance.")

    def __eq__(self, other: object) -> bool:
        """Compare with Lightning's configuration, or with another one of these."""
        return all(hasattr(other, name) and getattr(other, name) == getattr(self, name) for name in SETTINGS)

    __hash__ = None  # type: ignore[assignment]


def lightning_schedule(given: Any) -> Schedule:
    """Return a scheduler with its settings, which Lightning stores under the same names."""
    if isinstance(given, Schedule):
        return given
    return LightningSchedule(**{name: getattr(given, name) for name in SETTINGS})


def _option(name: str, doc: str) -> Any:
    """Return a property that reads an option of Hookline's trainer."""
    return fact(f"_own.options.{name}", doc)


def _result(method: str, argument: str, doc: str) -> Any:
    """Return a property that is what a method returns for an argument: a kind of loaders, or a stage."""
    return property(methodcaller(method, argument), doc=doc)


def first_of(several: str, doc: str) -> Any:
    """Return a property that is the first object of a list of this name, or None."""
    return property(lambda owner: next(iter(getattr(owner, several)), None), doc=doc)


def epoch_of(state: Any) -> int:
    """Return the current epoch, from 0; after the training, the number of epochs that were started, as
    Lightning counts.
    """
    run = getattr(state.trainer, "_run", None)
    if run is not None and run.state is state and run.step is None and state.epochs_seen > state.epoch:
        return int(state.epochs_seen)  # resumed between two epochs, and the next one has not started
    is_over = state.stage != "fit" or state.status in ("completed", "stopped", "pruned", "preempted")
    return int(state.epoch + (is_over and state.batches_seen > 0))


def directory_of(trainer: Any) -> Path:
    """Return the run's directory. Outside of fit it is not created by tests for it."""
    return trainer.run_dir if trainer.state.stage == "fit" else trainer._directory.intended()  # type: ignore[no-any-return]


class LightningNames:
    """Facts of a run under Lightning's names. `_own` is Hookline's trainer."""

    _own: Any

    # ---- progress ------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Return the current epoch, from 0; after the training, the number of epochs."""
        return epoch_of(self._own.state)

    @property
    def callback_metrics(self) -> MetricTensors:
        """Return the newest logged values, and Hookline's own `train/loss`, `val/loss`."""
        return MetricTensors(self._own.state.log.newest)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the same, because Hookline sends the newest values to the loggers."""
        return dict(self.callback_metrics)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the values that were logged with `prog_bar=True`."""
        return Metrics(self._own.state.log.bar).read()

    sanity_checking: bool = fact(
        "_own.state.sanity_checking", "Return whether the current validation is the one before training."
    )

    @property
    def training(self) -> bool:
        """Return whether a fit is running and no validation inside it."""
        return self._in("fit") and not self._evaluating and not self.sanity_checking

    @property
    def validating(self) -> bool:
        """Return whether a validation is running, in a fit or by itself; not in the sanity check."""
        in_fit = self._own.state.stage == "fit" and self._evaluating and not self.sanity_checking
        return self._in("validate") or in_fit

    def _in(self, stage: str) -> bool:
        return self._own._run is not None and bool(self._own.state.stage == stage)

    testing = _result("_in", "test", "Return whether this is a test.")
    predicting = _result("_in", "predict", "Return whether this is a prediction.")

    @property
    def evaluating(self) -> bool:
        """Return whether this is a validation, the sanity check or a test."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def _evaluating(self) -> bool:
        """Return whether an evaluation is running in a fit: the modes of all submodules are saved
        meanwhile.
        """
        return bool(self._own.state.modes)

    @property
    def is_last_batch(self) -> bool:
        """Return whether this is the epoch's last training batch."""
        run, length = self._own._last, self._own.num_training_batches
        if run is None or length is None:
            return False
        # in a validation, batch_idx is its own
        begun = run.progress.position if self._evaluating else self._own.state.batch_idx + 1
        return bool(begun >= length)

    @property
    def interrupted(self) -> bool:
        """Return whether a signal, Ctrl-C or an error has ended the run."""
        return self._own.status in ("interrupted", "preempted", "error")

    # ---- options -------------------------------------------------------------------------------------------

    max_epochs = _option("max_epochs", "Epochs to train; None or -1: no limit.")
    max_steps = _option("max_steps", "Updates to make; -1: no limit.")
    val_check_interval = _option(
        "val_check_interval", "Batches, or the fraction of an epoch, between validations."
    )
    check_val_every_n_epoch = _option("check_val_every_n_epoch", "Epochs between validations.")
    limit_train_batches = _option(
        "limit_train_batches", "Batches of an epoch that are used, or the fraction of them."
    )
    limit_val_batches = _option(
        "limit_val_batches", "Batches of a validation that are used, or the fraction of them."
    )
    limit_test_batches = _option(
        "limit_test_batches", "Batches of a test that are used, or the fraction of them."
    )
    limit_predict_batches = _option(
        "limit_predict_batches", "Batches that are predicted on, or the fraction of them."
    )
    overfit_batches = _option("overfit_batches", "Training batches that are used again and again; 0: no.")
    log_every_n_steps = _option("log_every_n_steps", "Updates between rows of the log.")
    fast_dev_run = _option("fast_dev_run", "Whether this only tries out whether everything works.")
    gradient_clip_val = _option("gradient_clip_val", "The largest norm or value of gradients.")
    min_epochs = _option("min_epochs", "Epochs to train at least.")
    min_steps = _option("min_steps", "Updates to make at least.")

    @property
    def accumulate_grad_batches(self) -> int:
        """Return the batches that make one update. A callback may set it at the start of an epoch."""
        run = self._own._run
        return int(self._own.options.accumulate_grad_batches if run is None else run.traits.accumulate)

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        run = self._own._run
        if run is None:
            self._own.options.accumulate_grad_batches = batches
            return
        set_accumulation(run, batches)

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Return the validation batches before training."""
        steps = self._own.options.num_sanity_val_steps
        return float("inf") if steps < 0 else int(steps)

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """Return 'norm' or 'value'; None without clipping."""
        options = self._own.options
        return options.gradient_clip_algorithm if options.gradient_clip_val is not None else None

    @property
    def precision(self) -> str:
        """Return the precision under Lightning's name: '32-true', '16-mixed' and so on."""
        name = str(self._own.strategy.precision.name)
        return f"{name}-true" if name.isdigit() else name

    @property
    def default_root_dir(self) -> str:
        """Return the default directory for files of callbacks: the run's directory."""
        return str(directory_of(self._own).absolute())

    @property
    def ckpt_path(self) -> str | None:
        """Return the checkpoint that the run continued from."""
        run = self._own._last
        return str(run.resume.path) if run is not None and run.resume.path is not None else None

    # ---- hooks, module and data ----------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Any]:
        """Return the hooks as they were passed; after a run those that took part in it, with its module's."""
        module_hooks = (
            [entry.given for entry in self._own._last.participants.module_hooks]
            if self._own._last is not None
            else []
        )
        kinds = {type(each) for each in module_hooks}
        return [*(each for each in self._own.hooks if type(each) not in kinds), *module_hooks]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Return the hooks that save checkpoints."""
        return [each for each in self.callbacks if hasattr(each, "best_model_path")]

    checkpoint_callback = first_of(
        "checkpoint_callbacks", "Return the first hook that saves checkpoints, or None."
    )

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Return the hooks that stop early."""
        return [each for each in self.callbacks if is_a(each, "EarlyStopping")]

    early_stopping_callback = first_of(
        "early_stopping_callbacks", "Return the first hook that stops early, or None."
    )

    @property
    def progress_bar_callback(self) -> Any:
        """Return the progress bar among the hooks, or None; Hookline's own has another interface."""
        bars = (each for each in self.callbacks if isinstance(getattr(each, "get_metrics", None), MethodType))
        return next(bars, None)

    lightning_module: Any = fact("_own.state.module", "Return the user's module.")

    @property
    def datamodule(self) -> Any:
        """Return the data module, as it was passed."""
        run = self._own._last
        return getattr(run.datamodule, "original", run.datamodule) if run is not None else None

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Return the schedulers with `scheduler`, `interval`, `frequency`, `monitor`, `name`."""
        run = self._own._last
        return [] if run is None else Schedules(run)

    train_dataloader = _result(
        "_shown_loaders", "train", "Return the training loader as it was passed, or a list of them."
    )
    val_dataloaders = _result(
        "_shown_loaders", "val", "Return the validation loader as it was passed, or a list of them."
    )
    test_dataloaders = _result(
        "_shown_loaders", "test", "Return the test loader as it was passed, or a list of them."
    )
    predict_dataloaders = _result(
        "_shown_loaders", "predict", "Return the prediction loader as it was passed, or a list of them."
    )
    num_val_batches = _result("_lengths", "val", "Return the number of batches of each validation loader.")
    num_test_batches = _result("_lengths", "test", "Return the number of batches of each test loader.")
    num_predict_batches = _result(
        "_lengths", "predict", "Return the number of batches of each prediction loader."
    )

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Return the number of batches of each validation loader in the sanity check."""
        most = self._own.options.num_sanity_val_steps
        return [each if most < 0 else min(each, most) for each in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        """Return whether a fit validates; before its loaders are made, whether there is what it needs."""
        run = self._own._last
        if run is None or "val" in run.data.loaders:
            return bool(self._loaders("val"))
        has_step = overrides(run.steps, "validation_step") and self.limit_val_batches != 0
        return has_step and has_source(run, "val")

    def _shown_loaders(self, kind: str) -> Any:
        loaders = self._loaders(kind)
        return loaders[0] if len(loaders) == 1 else loaders or None

    def _loaders(self, kind: str) -> list[Any]:
        run = self._own._last
        return [each.source for each in run.data.loaders.get(kind, ())] if run is not None else []

    def _lengths(self, kind: str) -> list[int | float]:
        known: Mapping[str, int | None] = self._own.num_batches(kind)
        return [float("inf") if length is None else length for length in known.values()]

    # ---- processes -----------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is the process that writes."""
        return bool(self._own.strategy.rank == 0)

    global_rank: int = fact("_own.strategy.rank", "Return this process's rank.")

    local_rank: int = fact("_own.strategy.local_rank", "Return this process's rank on its machine.")

    world_size: int = fact("_own.strategy.world_size", "Return the number of processes.")

    @property
    def node_rank(self) -> int:
        """Return this machine's rank."""
        return (self.global_rank - self.local_rank) // max(
            1, int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        )

    @property
    def num_nodes(self) -> int:
        """Return the number of machines."""
        return max(1, self.world_size // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))))

    num_devices: int = fact("world_size", "Return the number of devices, one for each process.")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank zero only."""
        if self.is_global_zero:
            print(*args, **kwargs)


def _tensor(value: Any) -> Tensor:
    return (
        value.detach().to(torch.get_default_dtype())
        if isinstance(value, Tensor)
        else torch.tensor(float(value))
    )


# ---- `self.log(...)` with Lightning's arguments, as Hookline's log takes it


Reduction = str | Callable[..., Any]


def log_value(
    run: Any,
    name: str,
    value: Any,
    *,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Reduction = "mean",
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    **others: Any,
) -> None:
    """Log one value. With several evaluation loaders its name ends in `/dataloader_idx_N`, unless
    `add_dataloader_idx` is False.

    others: arguments that have an effect in Lightning's trainer only.
    """
    log, state = run.state.log, run.state
    if (shown := getattr(run.trainer, "lightning_trainer", None)) is not None:
        shown._logger_connector.log(
            name,
            value,
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            **others,
        )
        return
    loaders = run.data.loaders.get("test" if state.stage == "test" else "val", ())
    if log.mode == "eval" and add_dataloader_idx and len(loaders) > 1:
        name = f"{name}/dataloader_idx_{state.dataloader_idx}"
    reduce, in_batches = reduction(name, reduce_fx), log.mode != "now"
    on_step = log.mode == "train" if on_step is None else on_step
    on_epoch = log.mode == "eval" if on_epoch is None else on_epoch
    if in_batches and on_step and hasattr(value, "compute") and hasattr(value, "reset"):
        if on_epoch:  # the epoch's value is the object's own, not the mean of the batches'
            log.log(with_ending(name, "_epoch"), value, False, True, prog_bar, reduce, batch_size)
        value = value._forward_cache
        if value is None:
            return  # it was only updated, so it has no value for this batch
    log.log(name, value, on_step, on_epoch, prog_bar, reduce, batch_size)
    if in_batches and on_step and on_epoch:
        log.newest.raw()[with_ending(name, "_step")] = log.batch_values[name]
    if logger is False:  # known to callbacks and the progress bar, but not in this step's row
        log.pending.pop(name, None)
        log.pending.pop(with_ending(name, "_step"), None)


LOG_ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""The arguments of Lightning's `log` after the name and the value, in their order."""


def log_as_lightning(run: Any, name: str, value: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Log one value, with any arguments of Lightning's `log`."""
    given = {**dict(zip(LOG_ARGUMENTS, args, strict=False)), **options}
    if unknown := [each for each in given if each not in LOG_ARGUMENTS]:
        raise OptionError(
            f"log({name!r}, {unknown[0]}=...): is not an option of log.{closest(unknown[0], LOG_ARGUMENTS)} "
            f"There are: {', '.join(LOG_ARGUMENTS)}."
        )
    log_value(run, name, value, **given)


def reduction(name: str, asked: Reduction) -> str:
    """Return 'mean', 'sum', 'min' or 'max', from its name or from torch's function."""
    word = asked.lower() if isinstance(asked, str) else getattr(asked, "__name__", repr(asked))
    word = {"amin": "min", "amax": "max", "avg": "mean"}.get(word, word)
    if word not in REDUCTIONS:
        raise OptionError(
            f"log({name!r}, reduce_fx={asked!r}): allowed are {', '.join(REDUCTIONS)} and torch's functions "
            "of these names. A torchmetrics.Metric can be logged as it is."
        )
    return word
