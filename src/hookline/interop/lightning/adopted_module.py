"""Lightning's modules and data modules in Hookline's loop, unchanged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline.engine.events import EVENTS, SIGNAL, EventTable
from hookline.engine.listener import Listener, overrides, refuse_misspelled
from hookline.interop.adapter import Row
from hookline.interop.lightning.binder import BETWEEN_HOOKS, NAME_OF_HOOK, RETURNED, bind, recording_name
from hookline.interop.lightning.checkpoint_file import LIGHTNING
from hookline.interop.lightning.checkpoint_path import refuse_start
from hookline.interop.lightning.hparams import module_hooks
from hookline.interop.lightning.loaders import convert_given, converting_loaders, outside_turns, with_iterator
from hookline.interop.lightning.package import is_lightnings, refusal, warn
from hookline.interop.lightning.table import (
    DATA_ACTIONS,
    DATA_ROWS,
    MODULE_ACTIONS,
    MODULE_ROWS,
    ROWS_OF_2019,
    refuse_lightning_1,
)
from hookline.interop.lightning.trainer_view import Experiment, TrainerView
from hookline.run.module import Actions, DataModule
from hookline.run.optimizers import parse_optimizers
from hookline.util.errors import HookError, OptionError

HOOK_CLASSES = ("ModelHooks", "DataHooks", "CheckpointHooks")
"""The classes in which Lightning declares the hooks of a module."""
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that a module and a data module can both have."""
ZERO_GRAD = "on_validation_model_zero_grad"
"""A hook of Lightning that is called before the module is put into eval mode."""


def steps_of(module: Any) -> LightningSteps:
    """Return the steps and hooks of a Lightning module, for Hookline's loop."""
    base = next(cls for cls in type(module).__mro__ if is_lightnings(cls, "LightningModule"))
    _check(module)
    if not hasattr(base, "experiment"):
        base.experiment = ExperimentOf2019()  # type: ignore[attr-defined]
    view = TrainerView(base.__module__.removesuffix(".core.module"))
    own: dict[str, Any] = {name: getattr(module, name) for name in MODULE_ACTIONS if _is_own(module, name)}
    if module.predict_step is not None:
        own["predict_step"] = module.predict_step
    if "configure_optimizers" in own:
        ask = module.configure_optimizers
        checked: Any = functools.wraps(ask)(lambda: _checked(_asked(ask, module), type(module).__name__))
        checked.__signature__ = inspect.Signature()  # LightningCLI's wraps a function with other parameters
        own["configure_optimizers"] = checked
    own |= {name: converting_loaders(own[name], name, view) for name in own if name.endswith("_dataloader")}
    if _is_own(module, ZERO_GRAD):
        own["on_validation_model_eval"] = _clearing_first(
            module, own.get("on_validation_model_eval", module.eval)
        )
    own |= {name: with_iterator(own[name]) for name in own if name.endswith("_step")}
    if TRANSFER[1] in own:
        own[TRANSFER[1]] = outside_turns(own[TRANSFER[1]])
    actions = {name: staticmethod(recording_name(each, name, module.__dict__)) for name, each in own.items()}
    # create a class, because the loop looks at the methods that a class overrides
    return type(type(module).__name__, (LightningSteps,), actions)(module, view)  # type: ignore[no-any-return]


class ExperimentOf2019:
    """`self.experiment` of the first Lightning's modules: the loggers, with add_scalar, add_histogram, ...

    A module's own attribute of this name comes first.
    """

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        trainer = getattr(module._trainer, "_own", None)
        if trainer is None or "experiment" in module._modules:
            raise AttributeError("experiment")  # torch.nn.Module looks further
        return Experiment(trainer.loggers)


def _check(module: Any) -> None:
    """Reject what Hookline's loop does not support, before anything runs."""
    refuse_lightning_1(module)
    refuse_misspelled(module, _called_with(MODULE_ACTIONS, MODULE_ROWS))
    who, known = type(module).__name__, {*MODULE_ROWS, *MODULE_ACTIONS, ZERO_GRAD}
    for declared in [
        cls for cls in type(module).__mro__ if cls.__name__ in HOOK_CLASSES and is_lightnings(cls)
    ]:
        for method in vars(declared):
            if not method.startswith("_") and method not in known and _is_own(module, method):
                raise HookError(
                    f"{who}.{method} is a hook of Lightning that Hookline does not have. It has: "
                    f"{', '.join(known)}."
                )


def _clearing_first(module: Any, to_eval: Callable[[], Any]) -> Callable[[], None]:
    """Return the change to eval mode with the module's own clearing of gradients before it, in a fit outside
    an accumulation window. Lightning's trainer clears them itself (`LightningRules.begin_validation`).
    """

    def clear_and_to_eval() -> None:
        run = module.trainer._own._run
        in_fit = run.stage == "fit" and not run.state.sanity_checking and run.window.batches == 0
        if in_fit and not hasattr(run.trainer, "lightning_trainer"):
            recording_name(getattr(module, ZERO_GRAD), ZERO_GRAD, module.__dict__)()
        to_eval()

    return clear_and_to_eval


def _called_with(actions: Iterable[str], rows: Mapping[str, Row]) -> dict[str, int]:
    """Return how many arguments each method gets."""
    return {
        **{name: len(EVENTS[name].facts) for name in actions},
        **{name: len(row.arguments) for name, row in rows.items()},
    }


class LightningSteps(Actions):
    """The object that the loop calls for a Lightning module. A subclass has the actions that the module
    overrides.
    """

    __hookline_base__: ClassVar[bool] = True
    kind = "Lightning module"

    def __init__(self, original: Any, view: TrainerView) -> None:
        self.original, self.view = original, view
        self.automatic_optimization = original.automatic_optimization
        self.strict_loading = original.strict_loading
        self.run: Any = None

    def configure_hooks(self) -> Any:
        """Return the hooks of the module, which has what the stage needs."""
        self._verify()
        configure = self.original.configure_callbacks
        named = recording_name(configure, "configure_callbacks", self.original.__dict__)
        return module_hooks(self.run, self.original, named())

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """Return one listener for each hook that the module overrides."""
        return _listeners(self, "M", {**MODULE_ROWS, **ROWS_OF_2019}, name, table)

    def _attach(self, run: Any) -> None:
        self.run = run
        if run is None:
            self.original.__dict__[NAME_OF_HOOK] = None
        else:  # it stays attached after the run, as in Lightning
            refuse_start(run)
            self.view.attach(run.trainer, self.original, self.original.__dict__)
            self.original.trainer = self.view.moment.trainer
            self.original.__dict__[NAME_OF_HOOK] = BETWEEN_HOOKS.get(run.stage, f"{run.stage}_step")
            if self.view.moment.is_native:
                is_mixed = run.data.mixture is not None
                run.data.given |= convert_given(run.data.given, self.view.of_lightning, is_mixed)
            if run.stage == "fit" and not overrides(self, "validation_step"):
                run.data.loaders["val"] = []  # as Lightning, which then ignores validation loaders

    def _verify(self) -> None:
        """Let Lightning's own check refuse a module without the methods of the stage, and warn about data
        without a step.
        """
        check = self.view.of_lightning("trainer.configuration_validator", "_verify_loop_configurations")
        trainer = self.run.trainer
        shown = getattr(trainer, "lightning_trainer", None)
        if check is not None and shown is not None and trainer._run is self.run:
            check(shown)


class NoOptimizer(Optimizer):
    """Updates nothing: Lightning trains without an optimizer if `configure_optimizers` returns None."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> Any:
        """Compute the loss if there is a closure, and update nothing."""
        return closure() if closure is not None else None


def data_of(datamodule: Any) -> LightningData:
    """Return a Lightning data module for Hookline's loop."""
    base = next(cls for cls in type(datamodule).__mro__ if is_lightnings(cls, "LightningDataModule"))
    refuse_misspelled(datamodule, _called_with(DATA_ACTIONS, DATA_ROWS))
    view = TrainerView(base.__module__.removesuffix(".core.datamodule"))
    own: dict[str, Any] = {
        name: getattr(datamodule, name) for name in DATA_ACTIONS if _is_own(datamodule, name)
    }
    own |= {name: converting_loaders(own[name], name, view) for name in own if name.endswith("_dataloader")}
    actions = {name: staticmethod(each) for name, each in own.items()}
    return type(type(datamodule).__name__, (LightningData,), actions)(datamodule, view)  # type: ignore[no-any-return]


class LightningData(DataModule):
    """The object from which the loop gets its data."""

    __hookline_base__: ClassVar[bool] = True
    kind = "Lightning data module"

    def __init__(self, original: Any, view: TrainerView) -> None:
        self.original, self.view = original, view

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """Return one listener for each hook that the data module overrides."""
        return _listeners(self, "D", DATA_ROWS, name, table)

    def _attach(self, run: Any) -> None:
        if run is not None:
            self.view.attach(run.trainer, run.module, {})
            self.original.trainer = self.view.moment.trainer
            if not self.view.moment.is_native:
                selector = self.view.of_lightning("trainer.connectors.data_connector", "_DataHookSelector")
                for hook in TRANSFER:  # it warns of one that has no effect
                    selector(run.module, self.original).get_instance(hook)

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's own state."""
        return self.original.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the data module's state, in a file of Lightning under the name of its class."""
        entries = (self.view._own.state.checkpoint or {}).get(LIGHTNING, {})
        state = entries.get(type(self.original).__qualname__, state)
        if state:
            self.original.load_state_dict(state)


def _listeners(
    owner: Any, receiver: str, rows: Mapping[str, Row], name: str, table: EventTable
) -> list[Listener]:
    found = []
    for method, row in rows.items():
        if _is_own(owner.original, method):
            function = getattr(owner.original, method)
            if method in TRANSFER:
                function = outside_turns(function)
            binding = bind(function, method, row, table, owner.view, answers=method in RETURNED)
            steers = method in RETURNED and table[row.event].returns == SIGNAL
            found.append(
                Listener(
                    receiver, name, owner, table[row.event], function, binding, [], declares_steering=steers
                )
            )
    return found


def _is_own(owner: Any, method: str) -> bool:
    """Return whether the user's class, and not Lightning's, has this method. Lightning's demo models count as
    the user's.
    """
    if getattr(owner, method, None) is None:
        return False  # `model.validation_step = None` switches it off
    if method in vars(owner):
        return True
    written = next((cls for cls in type(owner).__mro__ if method in vars(cls)), object)
    return written is not object and (not is_lightnings(written) or ".demos." in written.__module__)


# ---- results of configure_optimizers -----------------------------------------------------------------------


def _asked(ask: Callable[[], Any], module: Any) -> Any:
    """Return what `configure_optimizers` returns; without anything, an optimizer that updates nothing."""
    returned = ask()
    if returned is None and module.automatic_optimization:
        warn("`LightningModule.configure_optimizers` returned `None`: this fit has no optimizer.")
        return NoOptimizer(module.parameters())
    return returned


def _checked(returned: Any, module: str) -> Any:
    """Convert what a module returned; raise what is wrong with it as Lightning's own error, too."""
    try:
        converted = _converted(returned)
        parse_optimizers(converted, module)
    except OptionError as error:
        raise refusal(str(error), "configure_optimizers", None) from None
    return converted


def _converted(returned: Any) -> Any:
    """Convert forms that Hookline does not have: a monitor beside the scheduler, one scheduler beside a list
    of optimizers.
    """
    if isinstance(returned, dict):
        given = dict(returned)
        monitor, scheduler = given.pop("monitor", None), given.pop("lr_scheduler", None)
        if scheduler is not None:
            given["lr_scheduler"] = _schedule(scheduler, monitor)
        return given
    if isinstance(returned, list | tuple) and len(returned) == 2 and isinstance(returned[0], list | tuple):
        schedulers = returned[1] if isinstance(returned[1], list | tuple) else [returned[1]]
        return list(returned[0]), [_schedule(each, None) for each in schedulers]
    if isinstance(returned, list | tuple):
        return [_converted(each) if isinstance(each, dict) else each for each in returned]
    return returned


def _schedule(given: Any, monitor: str | None) -> Any:
    schedule = dict(given) if isinstance(given, dict) else {"scheduler": given}
    if schedule.pop("reduce_on_plateau", False) and not isinstance(schedule["scheduler"], ReduceLROnPlateau):
        raise OptionError(
            "lr_scheduler: reduce_on_plateau=True is for torch's ReduceLROnPlateau; another scheduler that "
            "needs a metric must be advanced in an override of lr_scheduler_step."
        )
    if isinstance(schedule["scheduler"], ReduceLROnPlateau) and monitor is not None:
        schedule.setdefault("monitor", monitor)
    return schedule
