"""`Trainer`: Lightning's trainer on Hookline's loop, with Lightning's arguments, methods and attributes."""

from __future__ import annotations

import copy
import functools
import operator
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from hookline.interop.lightning.adopted_callback import LightningCallback
from hookline.interop.lightning.arguments import (
    BAREBONES,
    as_list,
    from_environment,
    log_meaning,
    native_options,
    refuse_manual,
    root_directory,
    seconds_between_validations,
    set_torch_flags,
    with_plugins,
)
from hookline.interop.lightning.callback_list import complete, native_max_time, ordered, replaced_by
from hookline.interop.lightning.checkpoints import CHOSEN, choose_path, complete_io, read_here
from hookline.interop.lightning.connector import LoggerConnector
from hookline.interop.lightning.logged_values import LoggedValues, number_of
from hookline.interop.lightning.loggers import default_logger, directory_of_logs, split
from hookline.interop.lightning.loop_trainer import LoopTrainer
from hookline.interop.lightning.package import (
    find,
    is_a,
    is_lightning_module,
    is_lightnings,
    misconfiguration,
    possible,
    refusal,
    root,
    warn,
)
from hookline.interop.lightning.profiling import make_profiler
from hookline.interop.lightning.rules import LightningRules
from hookline.interop.lightning.trainer_parts import Part
from hookline.interop.lightning.trainer_settings import TrainerSettings
from hookline.interop.lightning.trainer_view import TrainerView
from hookline.interop.lightning.tuning import CheckpointConnector, Snapshot, is_tuner, run_loop
from hookline.loggers.build import make_loggers
from hookline.loggers.jsonl import JSONLines
from hookline.run.module import Module
from hookline.run.option_tables import OLD_NAMES, OLD_SAVING
from hookline.run.options import ARGUMENT_NAMES
from hookline.run.state_parts import fact
from hookline.util.errors import Preempted, closest

T = TypeVar("T")


class Trainer(TrainerSettings):
    """Lightning's trainer on Hookline's loop. Attributes that Lightning does not have are Hookline's.

    >>> trainer = Trainer(callbacks=[MyCallback()], max_epochs=1)
    >>> trainer.fit(model, train_dataloaders=loader)
    """

    PARTS: ClassVar[dict[str, type[Part]]] = {
        **TrainerView.PARTS,
        "_checkpoint_connector": CheckpointConnector,
    }

    @from_environment
    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: Any = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
        deterministic: Any = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        **native: Any,
    ) -> None:
        """Take Lightning's arguments; `native` are further options of `hookline.Trainer`."""
        given = {
            name: value for name, value in locals().items() if name not in ("self", "native", "__class__")
        }
        super().__init__(root())
        for name in native:
            if name not in ARGUMENT_NAMES and name not in OLD_NAMES:
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}."
                    f"{closest(name, [*given, *ARGUMENT_NAMES])}"
                )
        values = self.__dict__
        values["snapshots"] = {}
        values["_arguments"] = {**given, **native}
        values["_given"] = given = with_plugins(_with_defaults(given))
        given["profiler"] = make_profiler(given["profiler"])
        values["_checkpoint_io"] = complete_io(given["checkpoint_io"])
        set_torch_flags(given["deterministic"], given["benchmark"])
        log_meaning(given)
        values["_callbacks"] = complete(given)
        if logger is True or logger is None:
            logger = default_logger(root_directory(default_root_dir)) if given["logger"] else []
        values["_loggers"], own_loggers = split(as_list(logger or None))
        if fast_dev_run and self._loggers:  # one that does nothing
            values["_loggers"] = [find("loggers.logger", "DummyLogger")()]
        values["_logger_connector"] = LoggerConnector(self)
        options = native_options(given)
        options["max_time"] = native_max_time(given["max_time"])
        if max_epochs is None and any(is_a(each, "Timer") for each in self._callbacks):
            options["max_epochs"] = -1
        has_bar = any(is_a(each, "ProgressBar") for each in self._callbacks)
        if not native.keys() & {"checkpoint", *OLD_SAVING}:
            options["checkpoint"] = False  # Lightning's checkpoint callback saves
        options = {
            "enable_progress_bar": given["enable_progress_bar"] and not has_bar,
            "logger": own_loggers,
            **options,
            **native,
        }
        with misconfiguration():
            own = LoopTrainer(**options)
        own.options.enable_progress_bar = bool(given["enable_progress_bar"])  # with any bar, show the costs
        given["val_check_seconds"] = None if fast_dev_run else seconds_between_validations(val_check_interval)
        own.rules = LightningRules(given, stops_at_nonfinite=native.get("nonfinite") == "stop")
        own.rules.unrecorded_options = () if "checkpoint" in native else ("checkpoint",)
        own.options.accumulate_grad_batches = accumulate_grad_batches
        own.lightning_trainer = own.state.setup.shown_trainer = self
        self.attach(own, None, {})
        self._logger_connector.listen(own.plan)
        values["_registered"] = []
        self._take_callbacks()

    # ---- stages --------------------------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        **native: Any,
    ) -> None:
        """Train. ckpt_path: a checkpoint to continue from, 'best' or 'last'. native: further arguments of
        `hookline.Trainer.fit`.
        """
        module = self._module("fit", model, is_plain="optimizer" in native)
        refuse_manual(module, self._given)
        train, datamodule = self._loaders_and_data(train_dataloaders, datamodule)
        if self._own.options.limit_train_batches == 0:
            train = []  # Lightning does not ask for the data
        if self._given["sync_batchnorm"] and self.world_size > 1:
            nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        if self.max_epochs is None and self._own.options.max_epochs == 1000:
            warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. Pass max_epochs=-1 to train without a "
                "limit.",
                possible(),
            )
        with self._stage("fit"):
            native.setdefault("resume", self._resolved("fit", ckpt_path, module, weights_only))
            self._own.fit(module, train, val_dataloaders, datamodule=datamodule, **native)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
        **native: Any,
    ) -> Any:
        """Measure on the validation data; return a list with a dictionary for each loader.

        Called by a hook inside a run, it validates the current run.
        """
        if self._own._run is not None:
            self._own.validate()
            return self._results_by_loader()
        return self._evaluate(
            "validate", model, dataloaders, ckpt_path, verbose, datamodule, weights_only, native
        )

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
        **native: Any,
    ) -> Any:
        """Measure on the test data; return a list with a dictionary for each loader."""
        return self._evaluate(
            "test", model, dataloaders, ckpt_path, verbose, datamodule, weights_only, native
        )

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Return the results of `predict_step`."""
        module = self._module("predict", model)
        loaders, datamodule = self._loaders_and_data(dataloaders, datamodule)
        keep = True if return_predictions is None else return_predictions
        with self._stage("predict"):
            predictions = self._own.predict(
                module,
                loaders,
                datamodule=datamodule,
                return_predictions=keep or self.predict_loop.writes_at_end,
                checkpoint=self._resolved("predict", ckpt_path, module, weights_only),
            )
        return predictions if keep else None

    def _evaluate(
        self,
        stage: str,
        model: Any,
        dataloaders: Any,
        ckpt_path: str | Path | None,
        verbose: bool,
        datamodule: Any,
        weights_only: bool | None,
        native: dict[str, Any],
    ) -> list[dict[str, float]]:
        module = self._module(stage, model, is_plain=bool(native))
        loaders, datamodule = self._loaders_and_data(dataloaders, datamodule)
        run = self._own.validate if stage == "validate" else self._own.test
        self._logger_connector.verbose = verbose
        with self._stage(stage):
            run(
                module,
                loaders,
                datamodule=datamodule,
                checkpoint=self._resolved(stage, ckpt_path, module, weights_only),
                **native,
            )
        return self._results_by_loader()

    def _results_by_loader(self) -> list[dict[str, float]]:
        """Return the results of the newest evaluation, a dictionary for each loader."""
        return [
            {name: number_of(value) for name, value in each.items()}
            for each in self._logger_connector.results
        ]

    def _module(self, stage: str, model: Any, is_plain: bool = False) -> Any:
        """Return the module of a stage; one that `torch.compile` has wrapped is unwrapped.

        is_plain: whether it may be any module, because its optimizer is given.
        """
        module = getattr(model, "_orig_mod", model)
        if module is None and stage != "fit":
            if self._own._last is None:
                raise TypeError(
                    f"`Trainer.{stage}()` requires a `LightningModule` if none was fitted before."
                )
            return None  # that of the last run
        if is_lightning_module(module) or isinstance(module, nn.Module if is_plain else Module):
            return module
        raise TypeError(
            f"The model of `.{stage}()` must be a `LightningModule`, got `{type(module).__qualname__}`."
        )

    @contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        """Prepare Hookline's trainer for a stage, and end an interrupted one as Lightning does."""
        self._take_callbacks()
        detects = self._given["detect_anomaly"] or torch.is_anomaly_enabled()
        try:
            with misconfiguration(), self._open_loggers(), torch.autograd.set_detect_anomaly(detects):
                yield
        except KeyboardInterrupt:
            sys.exit(1)
        except Preempted as ended:
            base = find("utilities.exceptions", "SIGTERMException")
            if base is None or ended.signal != signal.SIGTERM:
                raise
            terminated = base()
            terminated.code = ended.code
            raise terminated from ended
        finally:
            self._logger_connector.close()
            if self._checkpoint_io is not None:
                self._checkpoint_io.teardown()  # waits until everything is written

    @contextmanager
    def _open_loggers(self) -> Iterator[None]:
        """Create the clients of Lightning's loggers, and finalize the loggers when the stage is over.

        They are created first: a logger may refuse a directory in which Hookline has written files.
        """
        status = "failed"
        try:
            for logger in self.lightning_loggers:
                _ = getattr(logger, "experiment", None)
            directory = self._loggers_directory()
            if directory is not None:
                self._own.options.run_dir = directory
            yield
            status = "success"
        finally:
            status = "success" if self._own.status == "pruned" else status
            for logger in self.lightning_loggers:
                logger.finalize(status)

    def _loggers_directory(self) -> str | Path | None:
        """Return the directory of the loggers, in which Hookline writes its files too."""
        if self._own.options.fast_dev_run or "run_dir" in self._arguments:
            return None
        return directory_of_logs(self.lightning_loggers, self.default_root_dir)

    def _resolved(
        self, stage: str, ckpt_path: str | Path | None, model: Any, weights_only: bool | None
    ) -> Any:
        """Return the checkpoint of a stage: its path, or what the user's plugin has read."""
        path = choose_path(self, stage, ckpt_path, model is not None, self._own._last is not None)
        self.__dict__["_restored_from"] = path
        return read_here(self._checkpoint_io, path, weights_only, self._own.strategy.ranks)

    @property
    def ckpt_path(self) -> Any:
        """Return the checkpoint that the newest run was restored from; set it to restore the next runs."""
        chosen = self.__dict__.get(CHOSEN)
        return chosen if chosen is not None else self.__dict__.get("_restored_from")

    @ckpt_path.setter
    def ckpt_path(self, path: str | Path | None) -> None:
        self.__dict__[CHOSEN] = path

    def _loaders_and_data(self, loaders: Any, datamodule: Any) -> tuple[Any, Any]:
        """Return the loaders and the data module, which may be passed in the loaders' position, and set its
        trainer.
        """
        if hasattr(loaders, "train_dataloader") and hasattr(loaders, "prepare_data"):
            loaders, datamodule = None, loaders
        if datamodule is not None:
            datamodule.trainer = self
        return loaders, datamodule

    # ---- tuners --------------------------------------------------------------------------------------------

    def run_loop_again(self) -> Any:
        """Run the loop of the current stage inside a hook, for a tuner; return its state."""
        return run_loop(self, self._own, _adapted)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save a checkpoint. A tuner restores it soon, so its state is kept in memory."""
        if self._own._last is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached: call fit, validate, test or "
                "predict first."
            )
        if self._own._run is not None and is_tuner(self._caller):
            self.snapshots[str(filepath)] = Snapshot(self._own._run)
        else:
            super().save_checkpoint(filepath, weights_only, storage_options)

    def remove_later(self, filepath: str | Path) -> None:
        """Delete a checkpoint once its replacement is written; one of a tuner is in memory."""
        if self.snapshots.pop(str(filepath), None) is None:
            super().remove_later(filepath)

    # ---- callbacks and loggers -----------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Any]:
        """Return the callbacks. Changes of the list have an effect from the next stage on."""
        return self._callbacks  # type: ignore[no-any-return]

    @callbacks.setter
    def callbacks(self, callbacks: list[Any]) -> None:
        self.__dict__["_callbacks"] = list(callbacks)

    def _take_callbacks(self) -> None:
        """Register exactly the callbacks of the list, in its order. Hooks that were added otherwise stay."""
        hooks = self._own.hooks
        entries = [each for each in hooks.entries() if each in self._registered]
        given = [entry.given for entry in entries]
        if len(given) == len(self._callbacks) and all(map(operator.is_, given, self._callbacks)):
            return
        for entry in entries:
            hooks.discard(entry)
        self._registered.clear()
        for callback in self._callbacks:
            self._registered.append(hooks.add(_adapted(callback)).entry)

    def take_module_callbacks(self, callbacks: list[Any]) -> tuple[set[type], list[Any]]:
        """Replace callbacks by those of their class that a module has, for good as in Lightning.

        Return the replaced classes, and the module's callbacks as hooks of this trainer.
        """
        kinds = replaced_by(callbacks, self._callbacks)
        others = [each for each in self._callbacks if type(each) not in kinds]
        self.__dict__["_callbacks"] = ordered([*others, *callbacks])
        return kinds, [_adapted(each) for each in callbacks]

    lightning_loggers: list[Any] = fact(
        "_loggers", "Return the loggers that are not Hookline's own, as they were passed."
    )

    @property
    def loggers(self) -> list[Any]:
        """Return the loggers, as they were passed; with `fast_dev_run` one that does nothing.

        If all of them are Hookline's, they are shown as one.
        """
        return self._loggers or super().loggers

    @loggers.setter
    def loggers(self, loggers: Any) -> None:
        self.__dict__["_loggers"], own = split(as_list(loggers))
        self._own.loggers = make_loggers(own, JSONLines)

    @property
    def logger(self) -> Any:
        """Return the first logger, or None."""
        return next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = as_list(logger)

    @property
    def log_dir(self) -> str | None:
        """Return the directory of the first logger; without loggers `default_root_dir`."""
        first = self.logger
        if first is None:
            return self.default_root_dir
        directory: str | None = getattr(first, "log_dir", None)
        return directory if directory is not None else getattr(first, "save_dir", None)

    # ---- metrics -------------------------------------------------------------------------------------------

    callback_metrics: Any = fact(
        "_logger_connector.newest.callback",
        "Return the newest logged values, with those of this moment. Callbacks may add entries.",
    )
    logged_metrics: dict[str, Tensor] = fact(  # pyright: ignore[reportIncompatibleMethodOverride]
        "_logger_connector.newest.log", "Return the newest values that loggers get."
    )
    progress_bar_metrics: dict[str, float] = fact(  # pyright: ignore[reportIncompatibleMethodOverride]
        "_logger_connector.newest.bar", "Return the newest values that were logged with `prog_bar=True`."
    )

    _results: LoggedValues | None = fact(
        "_logger_connector.active", "Return what `self.log` adds values to; None in a prediction."
    )

    # ---- attributes ----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of Hookline's trainer."""
        own = self.__dict__.get("_trainer")
        if own is None or name.startswith("__") or not hasattr(own, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(type(self), name, None)
        if isinstance(found, property) and found.fset is None:
            if not hasattr(self._own.options, name):
                raise AttributeError(f"trainer.{name} cannot be set.")
            self._given[name] = value
            setattr(self._own.options, name, value)
        else:
            object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(**copy.deepcopy(self._arguments, memo))

    def __reduce__(self) -> Any:
        return functools.partial(type(self), **self._arguments), ()


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults that depend on `barebones`."""
    if given["barebones"]:
        for name, off in BAREBONES.items():
            if given[name] and given[name] != off:
                raise refusal(
                    f"`Trainer(barebones=True, {name}={given[name]!r})` was passed: barebones switches "
                    f"{name} off.",
                    name,
                    given[name],
                )
        return {**given, **BAREBONES}
    usual = {
        "enable_checkpointing": True,
        "logger": True,
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "log_every_n_steps": 50,
        "num_sanity_val_steps": 2,
    }
    return {**given, **{name: value for name, value in usual.items() if given[name] is None}}


def _adapted(callback: Any) -> Any:
    """Return a callback as a hook. The trainer here has all attributes of Lightning's that it can have, so
    one that is missing is an error when it is used.
    """
    is_one = any(is_lightnings(cls, "Callback") for cls in callback.__class__.__mro__)
    return LightningCallback(callback, checks=False) if is_one else callback
