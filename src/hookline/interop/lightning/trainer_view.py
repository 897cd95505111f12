"""Hookline's trainer as Lightning's callbacks and modules see it: live, and limited to the names that are
listed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hookline.engine.source_text import parsed, words_of
from hookline.interop.lightning.binder import NAME_OF_HOOK
from hookline.interop.lightning.names import LightningNames, directory_of
from hookline.interop.lightning.trainer_parts import (
    Connector,
    DataConnector,
    Distributed,
    FitLoop,
    NotInView,
    Part,
    PrecisionView,
    Results,
    RunState,
    StrategyView,
    missing,
)
from hookline.util.errors import HookError, closest

# ---- Hookline's loggers as Lightning's callbacks and modules expect a logger


class Experiment:
    """`trainer.logger.experiment`: add_scalar, add_histogram, ... call all loggers; other names are the
    client's own.
    """

    def __init__(self, loggers: Any) -> None:
        self._loggers = loggers

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._loggers, name):
            return getattr(self._loggers, name)
        client = self._loggers.client
        if hasattr(client, name):
            return getattr(client, name)
        whose = (
            f"{type(client).__name__} does not have it"
            if client is not None
            else "no logger has a client of its own"
        )
        raise _not_there(f"trainer.logger.experiment.{name}", whose, type(self._loggers))


class LoggerView:
    """All of Hookline's loggers as one of Lightning's."""

    group_separator = "/"

    def __init__(self, view: Any) -> None:
        self._trainer = view._own

    def __getattr__(self, name: str) -> Any:
        """Raise an error that lists the attributes there are."""
        raise _not_there(f"trainer.logger.{name}", "Hookline's loggers do not have it", type(self))

    @property
    def experiment(self) -> Experiment:
        """Return the object with add_scalar, add_histogram, add_text, ... and the client of the first logger
        that has one.
        """
        return Experiment(self._trainer.loggers)

    @property
    def save_dir(self) -> str:
        """Return the directory that contains `name`/`version`, which is the run's directory."""
        return str(directory_of(self._trainer).absolute().parent.parent)

    @property
    def name(self) -> str:
        """Return the name of the folder that contains the run."""
        return str(directory_of(self._trainer).absolute().parent.name)

    @property
    def version(self) -> str:
        """Return the name of the run's own folder."""
        return str(directory_of(self._trainer).absolute().name)

    @property
    def root_dir(self) -> str:
        """Return the directory that contains `version`."""
        return str(directory_of(self._trainer).absolute().parent)

    @property
    def log_dir(self) -> str:
        """Return the run's directory."""
        return str(directory_of(self._trainer))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row of numbers."""
        state = self._trainer.state
        values = {name: float(value) for name, value in metrics.items()}
        self._trainer.loggers.log_metrics(values, state.step if step is None else step, state.epoch)

    def log_hyperparams(
        self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Write the hyper-parameters of the run."""
        self._trainer.loggers.log_hyperparams(
            dict(vars(params) if isinstance(params, argparse.Namespace) else params)
        )

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Hookline's loggers do not draw a graph of the model."""

    def save(self) -> None:
        """Do nothing: Hookline's loggers write without this call."""

    def finalize(self, status: str) -> None:
        """Do nothing: Hookline closes its loggers when the run is over."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Do nothing: Hookline's loggers receive checkpoints without this call."""


def _not_there(path: str, why: str, owner: type) -> NotInView:
    has = [name for name in dir(owner) if not name.startswith("_")]
    return NotInView(
        f"{path}: {why}.{closest(path.rpartition('.')[2], has)} There are: {', '.join(has)}. "
        "For a logger's own interface use the object passed as hookline.Trainer(logger=...)."
    )


PACKAGES = ("lightning", "pytorch_lightning")


def is_lightnings(what: Any, name: str = "") -> bool:
    """Return whether a class or function is one of Lightning's, of this name if one is given."""
    return what.__module__.partition(".")[0] in PACKAGES and name in ("", what.__name__)


USER_ATTRIBUTES = "_of_lightning_users"
"""The attribute of a Hookline trainer that stores what callbacks set on theirs."""


@functools.cache
def _names_of_trainer(package: str) -> set[str]:
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(f"{package}.trainer") and module is not None
    ]
    names = {word for tree in filter(None, map(parsed, modules)) for word in words_of(tree)}
    return names | set(dir(sys.modules[f"{package}.trainer.trainer"].Trainer))


def is_of_trainer(package: str, name: str) -> bool:
    """Return whether Lightning's own trainer has or sets an attribute of this name, so that it is not the
    user's.
    """
    return name in _names_of_trainer(package)


class Moment:
    """What every call of a hook needs, in slots: attribute access on the view itself is slower."""

    __slots__ = ("names", "proxy")

    def __init__(self) -> None:
        self.proxy: Any = None
        """The module as a callback sees it."""
        self.names: dict[str, Any] = {NAME_OF_HOOK: None}
        """The dictionary that records the current hook."""


class TrainerView(LightningNames):
    """The trainer as Lightning's hooks see it. A name that is not here raises an error that lists those that
    are.
    """

    PARTS: ClassVar[dict[str, type[Part]]] = {
        "state": RunState,
        "strategy": StrategyView,
        "fit_loop": FitLoop,
        "_logger_connector": Connector,
        "_results": Results,
        "precision_plugin": PrecisionView,
        "_accelerator_connector": Distributed,
        "_data_connector": DataConnector,
    }
    """Attributes that have attributes of their own."""

    barebones: ClassVar[bool] = False

    def __init__(self, package: str, caller: Any = None) -> None:
        own = self.__dict__
        own["_package"], own["_caller"] = package, caller
        own["_trainer"], own["moment"] = None, Moment()
        own["asked"], own["removals"] = None, []
        own["_parts"] = {name: part(self) for name, part in self.PARTS.items()}

    def attach(self, trainer: Any, proxy: Any, names: dict[str, Any]) -> None:
        """Attach the view to a run."""
        self.__dict__["_trainer"] = trainer
        names.setdefault(NAME_OF_HOOK, None)
        self.moment.proxy, self.moment.names = proxy, names

    @property
    def _own(self) -> Any:
        if self._trainer is None:
            raise HookError("This view of the trainer is not in a run yet.")
        return self._trainer

    def __getattr__(self, name: str) -> Any:
        """Return a part or an attribute that a user has set; raise an error for other names."""
        if name in self.PARTS:
            return self.__dict__["_parts"][name]
        kept: dict[str, Any] = getattr(self._trainer, USER_ATTRIBUTES, {})
        if name in kept:
            return kept[name]
        raise missing(f"trainer.{name}", type(self))

    def __setattr__(self, name: str, value: Any) -> None:
        setter = getattr(getattr(type(self), name, None), "fset", None)
        if setter is not None:
            setter(self, value)
        elif hasattr(type(self), name) or is_of_trainer(self._package, name):
            raise missing(f"trainer.{name} = ...", type(self))
        else:  # the user's own: all callbacks and the module can read it, as in Lightning
            vars(self._own).setdefault(USER_ATTRIBUTES, {})[name] = value

    def __deepcopy__(self, memo: Any) -> None:
        return None  # copies of a module do not copy the run

    def __reduce__(self) -> Any:
        return type(None), ()

    def of_lightning(self, module: str, name: str) -> Any:
        """Return an object of the package, which is imported already: its enumerations, its wrappers."""
        return getattr(sys.modules[f"{self._package}.{module}"], name)

    # ---- progress ------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Return whether a stop was requested; set it to True to end the run at the next batch boundary."""
        return bool(self._own.should_stop)

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            who = self._own.state.module if self._caller is None else self._caller
            self._own.stop(f"{type(who).__name__} set trainer.should_stop")

    @property
    def global_step(self) -> int:
        """Return the number of updates so far: one per window, however many optimizers took part."""
        return int(self._own.global_step)

    @property
    def num_training_batches(self) -> int | float:
        """Return the batches per training epoch; infinite if the loader has no length."""
        length = self._own.num_training_batches
        return float("inf") if length is None else int(length)

    @property
    def estimated_stepping_batches(self) -> float:
        """Return the number of updates that the run will make."""
        return self._own.estimated_stepping_batches  # type: ignore[no-any-return]

    @property
    def received_sigterm(self) -> bool:
        """Return whether a signal has requested the end of the run."""
        run = self._own._run
        return bool(run is not None and run.signals.number)

    # ---- model, optimizers, loggers ------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """Return the model that the strategy runs: the module, or its compiled or distributed wrapper."""
        return self._own.state.wrapped_model

    @property
    def optimizers(self) -> list[Any]:
        """Return the optimizers of the run."""
        return self._own.optimizers  # type: ignore[no-any-return]

    @property
    def loggers(self) -> list[LoggerView]:
        """Return all loggers of Hookline as one, or an empty list."""
        return [LoggerView(self)] if self._own.loggers else []

    @property
    def logger(self) -> LoggerView | None:
        """Return all loggers of Hookline as one, or None."""
        return next(iter(self.loggers), None)

    @property
    def log_dir(self) -> str:
        """Return the run's directory."""
        return str(directory_of(self._own))

    @property
    def accelerator(self) -> Any:
        """Return Lightning's own accelerator for the device, which can measure it."""
        kind = {"cuda": "CUDAAccelerator", "mps": "MPSAccelerator"}.get(
            self._own.device.type, "CPUAccelerator"
        )
        return self.of_lightning("accelerators", kind)()

    @property
    def device_ids(self) -> list[int]:
        """Return this process's one device."""
        return [self._own.device.index or 0]

    @property
    def profiler(self) -> Any:
        """Return Lightning's own profiler that measures nothing; Hookline's Profiler is a hook."""
        return self.of_lightning("profilers", "PassThroughProfiler")()

    # ---- saving --------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Request a checkpoint of Hookline, a directory of this name; it is written at the next save point of
        the run.

        weights_only: the weights are in it either way; `hookline.load_weights` reads them from a whole
        checkpoint.
        """
        if "://" not in str(filepath):
            Path(filepath).absolute().parent.mkdir(
                parents=True, exist_ok=True
            )  # a link may be put beside it at once
        monitor, caller = None, self._caller
        if (
            getattr(caller, "monitor", None) is not None
            and getattr(caller, "current_score", None) is not None
        ):
            monitor = {
                "name": caller.monitor,
                "mode": getattr(caller, "mode", "min"),
                "score": float(caller.current_score),
            }
        self.__dict__["asked"] = str(filepath) if "://" in str(filepath) else str(Path(filepath))
        is_last = str(filepath) == getattr(caller, "last_model_path", None)
        failed = self._own.state.exception is not None
        reason = "exception" if failed else "last" if is_last else "best" if monitor else "interval"
        self._own.save_checkpoint(
            str(filepath), reason if caller is not None else "manual", None if is_last else monitor
        )

    def remove_later(self, filepath: str | Path) -> None:
        """Delete a checkpoint once its replacement is written: after a kill there may be one too many, never
        one too few.
        """
        if self._own._run is None or self.asked is None:
            self._remove(filepath)
        else:
            self.removals.append((filepath, self.asked))

    def remove_replaced(self, path: Any) -> None:
        """Delete the checkpoints that this complete one replaces."""
        for old, new in [each for each in self.removals if each[1] == str(path)]:
            self.removals.remove((old, new))
            self._remove(old)

    def _remove(self, path: str | Path) -> None:
        if self.is_global_zero and ("://" in str(path) or Path(path).exists()):
            self._own.remove_checkpoint(path)

    # ---- validation by hand --------------------------------------------------------------------------------

    def validate(self, *args: Any, **kwargs: Any) -> list[dict[str, float]]:
        """Validate inside the run, where Hookline allows it: at the end of a batch, step or epoch."""
        return [dict(self._own.validate(*args, **kwargs).read())]
