"""Hookline's trainer and modules as Lightning's callbacks see them: live, and limited to the names that are
listed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from hookline.engine.init_arguments import init_arguments
from hookline.engine.listener import overrides
from hookline.engine.source_text import parse_source, words_of
from hookline.interop.lightning.binder import NAME_OF_HOOK
from hookline.interop.lightning.checkpoints import save_file
from hookline.interop.lightning.hparams import AttributeDict
from hookline.interop.lightning.loggers import AdoptedLogger
from hookline.interop.lightning.loop_parts import EvaluationLoop, FitLoop, PredictionLoop, TestLoop
from hookline.interop.lightning.names import LightningNames, directory_of, first_of, log_as_lightning
from hookline.interop.lightning.package import find, is_lightning_module
from hookline.interop.lightning.table import MODULE_ACTIONS
from hookline.interop.lightning.trainer_parts import (
    Connector,
    DataConnector,
    Distributed,
    NotInView,
    Part,
    PrecisionView,
    Results,
    RunState,
    StrategyView,
    missing,
)
from hookline.run.module import Module
from hookline.run.save_request import SaveRequest
from hookline.run.state_parts import fact
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
    def _directory(self) -> Path:
        return directory_of(self._trainer).absolute()

    @property
    def save_dir(self) -> str:
        """Return the directory that contains `name`/`version`, which is the run's directory."""
        return str(self._directory.parent.parent)

    name: str = fact("_directory.parent.name", "Return the name of the folder that contains the run.")
    version: str = fact("_directory.name", "Return the name of the run's own folder.")

    @property
    def root_dir(self) -> str:
        """Return the directory that contains `version`."""
        return str(self._directory.parent)

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

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Hookline's loggers write and receive checkpoints without a call, are closed when the
        run is over, and do not draw a graph of the model.
        """

    log_graph = finalize = after_save_checkpoint = save


def _not_there(path: str, why: str, owner: type) -> NotInView:
    has = [name for name in dir(owner) if not name.startswith("_")]
    return NotInView(
        f"{path}: {why}.{closest(path.rpartition('.')[2], has)} There are: {', '.join(has)}. "
        "For a logger's own interface use the object passed as hookline.Trainer(logger=...)."
    )


def _place(path: str | Path) -> str:
    """Return a URL, or the one absolute path of a checkpoint that may not exist yet."""
    return str(path) if "://" in str(path) else str(Path(path).parent.resolve() / Path(path).name)


def _monitor_of(callback: Any) -> dict[str, Any] | None:
    """Return the metric that a checkpoint callback keeps a checkpoint for."""
    name, score = getattr(callback, "monitor", None), getattr(callback, "current_score", None)
    if name is None or score is None:
        return None
    return {"name": name, "mode": getattr(callback, "mode", "min"), "score": float(score)}


USER_ATTRIBUTES = "_of_lightning_users"
"""The attribute of a Hookline trainer that stores what callbacks set on theirs."""


@functools.cache
def _names_of_trainer(package: str) -> set[str]:
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(f"{package}.trainer") and module is not None
    ]
    names = {word for tree in filter(None, map(parse_source, modules)) for word in words_of(tree)}
    return names | set(dir(sys.modules[f"{package}.trainer.trainer"].Trainer))


def is_of_trainer(package: str, name: str) -> bool:
    """Return whether Lightning's own trainer has or sets an attribute of this name, so that it is not the
    user's.
    """
    return name in _names_of_trainer(package)


class Moment:
    """What every call of a hook needs, in slots: attribute access on the view itself is slower."""

    __slots__ = ("caller", "is_native", "names", "proxy", "trainer")

    def __init__(self, trainer: Any, caller: Any) -> None:
        self.caller = caller
        """The callback, or None for a module."""
        self.is_native = True
        """Whether `hookline.Trainer` runs it, and not Lightning's trainer."""
        self.trainer = trainer
        """The trainer as a callback sees it."""
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
        "validate_loop": EvaluationLoop,
        "test_loop": TestLoop,
        "predict_loop": PredictionLoop,
        "_logger_connector": Connector,
        "_results": Results,
        "precision_plugin": PrecisionView,
        "_accelerator_connector": Distributed,
        "_data_connector": DataConnector,
    }
    """Attributes that have attributes of their own."""

    def __init__(self, package: str, caller: Any = None) -> None:
        own = self.__dict__
        own["_package"], own["_caller"] = package, caller
        own["_trainer"], own["moment"] = None, Moment(self, caller)
        own["requested"], own["_checkpoint_io"] = {}, None
        own.update({name: part(self, name) for name, part in self.PARTS.items()})

    def attach(self, trainer: Any, proxy: Any, names: dict[str, Any]) -> None:
        """Attach the view to a run."""
        self.__dict__.update(_trainer=trainer, requested={})
        self.moment.is_native = not hasattr(trainer, "lightning_trainer")
        self.moment.trainer = getattr(trainer, "lightning_trainer", self)
        names.setdefault(NAME_OF_HOOK, None)
        self.moment.proxy, self.moment.names = proxy, names

    @property
    def _own(self) -> Any:
        if self._trainer is None:
            raise HookError("This view of the trainer is not in a run yet.")
        return self._trainer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that a user has set; raise an error for other names."""
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

    def __deepcopy__(self, memo: Any) -> Any:
        return None  # copies of a module do not copy the run

    def __reduce__(self) -> Any:
        return type(None), ()

    def of_lightning(self, module: str, name: str) -> Any:
        """Return an object of the package, which is imported already: its enumerations, its wrappers."""
        found = find(module, name, self._package)
        return str if found is None and module == "trainer.states" else found

    # ---- progress ------------------------------------------------------------------------------------------

    @property
    def barebones(self) -> bool:
        """Return whether everything that costs time is switched off."""
        return False

    @property
    def should_stop(self) -> bool:
        """Return whether a stop was requested; set it to True to end the run at the next batch boundary."""
        return bool(self._own.should_stop)

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            who = self._own.state.module if self._caller is None else self._caller
            self._own.stop(f"{type(who).__name__} set trainer.should_stop")

    global_step = fact(
        "_own.global_step",
        "Return the number of updates so far: one per window, however many optimizers took part.",
    )

    @property
    def num_training_batches(self) -> int | float:
        """Return the batches per training epoch; infinite if the loader has no length."""
        length = self._own.num_training_batches
        return float("inf") if length is None else int(length)

    def set_limit(self, name: str, value: Any) -> None:
        """Change max_epochs, min_epochs, max_steps or min_steps of the run."""
        setattr(self._own.options, name, value)

    @property
    def _evaluation_loop(self) -> Any:
        """Return the loop of the stage's evaluation."""
        stage = self._own.state.stage
        if stage in ("validate", "test"):
            return self.validate_loop if stage == "validate" else self.test_loop
        return self.fit_loop.epoch_loop.val_loop

    @property
    def _active_loop(self) -> Any:
        """Return the loop that is running; None outside of a run."""
        if self.training:
            return self.fit_loop
        if self.evaluating:
            return self._evaluation_loop
        return self.predict_loop if self.predicting else None

    estimated_stepping_batches = fact(
        "_own.estimated_stepping_batches", "Return the number of updates that the run will make."
    )

    @property
    def received_sigterm(self) -> bool:
        """Return whether a signal has requested the end of the run."""
        run = self._own._last
        return bool(run is not None and run.signals.number)

    # ---- model, optimizers, loggers ------------------------------------------------------------------------

    model: Any = fact(
        "_own.state.wrapped_model",
        "Return the model that the strategy runs: the module, or its compiled or distributed wrapper.",
    )

    optimizers: list[Any] = fact("_own.optimizers", "Return the optimizers of the run.")

    @property
    def loggers(self) -> list[Any]:
        """Return Lightning's loggers as they were passed, then all of Hookline's as one."""
        own = self._own.loggers
        passed = [each.original for each in own.members if isinstance(each, AdoptedLogger)]
        return [*passed, LoggerView(self)] if len(passed) < len(own.members) else passed

    logger = first_of("loggers", "Return the first logger, or None.")

    @property
    def log_dir(self) -> str | None:
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
        """Save a checkpoint. In Lightning's trainer it is a file in Lightning's format, which exists when
        this returns; with weights_only without optimizers and callbacks.

        In `hookline.Trainer` it is Hookline's directory, written at the next save point of the run, with or
        without `weights_only`: `hookline.load_weights` reads the weights from it.
        """
        if storage_options is not None and self._checkpoint_io is None:
            raise TypeError(
                "save_checkpoint(storage_options=...) is for a CheckpointIO of your own that is passed as "
                "plugins=[...]. Without one, pass an fsspec URL."
            )
        caller = self._caller
        is_last = str(filepath) == getattr(caller, "last_model_path", None)
        monitor = None if is_last else _monitor_of(caller)
        failed = self._own.state.exception is not None
        reason = "exception" if failed else "last" if is_last else "best" if monitor else "interval"
        request = SaveRequest(None, reason if caller is not None else "manual", monitor)
        if self.writes_files:
            save_file(self, filepath, bool(weights_only), request, storage_options)
            return
        if "://" not in str(filepath):
            Path(filepath).absolute().parent.mkdir(
                parents=True, exist_ok=True
            )  # a link may be put beside it at once
        place = _place(filepath)
        self.requested[place] = self.requested.pop(place, [])
        self._own.save_checkpoint(str(filepath), request.reason, monitor)

    @property
    def writes_files(self) -> bool:
        """Return whether checkpoints are files in Lightning's format, written at once."""
        return hasattr(self._own, "lightning_trainer")

    def remove_later(self, filepath: str | Path) -> None:
        """Delete a checkpoint once its replacement is written: after a kill there may be one too many, never
        one too few.
        """
        if self.requested:
            next(reversed(self.requested.values())).append(filepath)
        else:
            self._remove(filepath)

    def remove_replaced(self, path: Any) -> None:
        """Delete the checkpoints that this complete one replaces."""
        for old in self.requested.pop(_place(path), []):
            self._remove(old)

    def will_exist(self, path: str | Path, exists: bool) -> bool:
        """Return whether a checkpoint exists once all requested ones are written.

        exists: whether it does now.
        """
        hooks = [entry.hook for entry in self._own.state.hooks.entries()]
        requested = [
            each.view.requested for each in hooks if isinstance(getattr(each, "view", None), TrainerView)
        ]
        replaced = {_place(old) for each in requested for old in itertools.chain(*each.values())}
        place = _place(path)
        return any(place in each for each in requested) or (exists and place not in replaced)

    def _remove(self, path: str | Path) -> None:
        if not self.is_global_zero:
            return
        if self._checkpoint_io is not None:
            self._checkpoint_io.remove_checkpoint(path)
            return
        if "://" not in str(path) and (Path(path).is_file() or Path(path).is_symlink()):
            Path(path).unlink()
        elif "://" in str(path) or Path(path).exists():
            self._own.remove_checkpoint(path)

    # ---- validation by hand --------------------------------------------------------------------------------

    def validate(self, *args: Any, **kwargs: Any) -> list[dict[str, float]]:
        """Validate inside the run, where Hookline allows it: at the end of a batch, step or epoch."""
        return [dict(self._own.validate(*args, **kwargs).read())]


# ---- Hookline's modules, and plain ones, with the attributes that callbacks expect of a module


def shown_to_callbacks(module: Any, view: TrainerView) -> Any:
    """Return a Lightning module as it is, any other in a proxy for what callbacks use."""
    return module if module is None or is_lightning_module(module) else ModuleProxy(module, view)


class ModuleProxy:
    """A proxy for the user's module with `log`, `trainer` and other names of a LightningModule."""

    def __init__(self, module: nn.Module, view: TrainerView) -> None:
        base = view.of_lightning("core.module", "LightningModule")
        self.__dict__.update(_module=module, _view=view, _base=base, _class=_both(type(module), base))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore # what isinstance looks at: it is the user's class and a LightningModule
        return self._class

    def __getattr__(self, name: str) -> Any:
        if name in MODULE_ACTIONS and not overrides(self._module, name):
            return types.MethodType(
                getattr(self._base, name), self
            )  # Lightning checks by this that it is not overridden
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._module(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._module

    def __hash__(self) -> int:
        return hash(self._module)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._module.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._module)

    trainer: TrainerView = fact("_view", "Return the trainer as Lightning's hooks see it.")

    _trainer = trainer

    @property
    def automatic_optimization(self) -> bool:
        """Return whether the loop does the optimization."""
        return bool(getattr(self._module, "automatic_optimization", True))

    @property
    def hparams(self) -> Any:
        """Return the module's own `hparams`, or else the plain arguments that it was created with."""
        made, own = init_arguments(self._module), getattr(self._module, "hparams", None)
        return own if own is not None else AttributeDict({} if made is None else made.recorded)

    hparams_initial = hparams

    @property
    def example_input_array(self) -> Any:
        """Return the module's example input, or None."""
        return getattr(self._module, "example_input_array", None)

    current_epoch: int = fact("_view.current_epoch", "Return the current epoch, from 0.")

    global_step: int = fact("_view.global_step", "Return the number of updates so far.")

    logger: Any = fact("_view.logger", "Return the logger as Lightning's hooks see it.")

    device: Any = fact("_view._own.device", "Return the device of the module.")

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a number, with Lightning's arguments."""
        log_as_lightning(self._view._own._last, name, value, args, options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several numbers."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    print: Any = fact("_view.print", "Print, on rank zero only.")


def _both(own: type, base: type) -> type:
    """Return a class that is both, for isinstance only; the base alone if the classes cannot be combined."""
    if any("__init_subclass__" in vars(cls) for cls in own.__mro__ if cls not in (object, Module)):
        return base
    try:
        return type(own.__name__, (own, base), {})
    except TypeError:
        return base
