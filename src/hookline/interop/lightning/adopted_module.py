"""Lightning's modules and data modules in Hookline's loop, unchanged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from hookline.engine.events import EVENTS, SIGNAL, EventTable
from hookline.engine.listener import Listener, overrides, refuse_misspelled
from hookline.interop.adapter import Row
from hookline.interop.lightning.binder import BETWEEN_HOOKS, NAME_OF_HOOK, RETURNED, bind, recording_name
from hookline.interop.lightning.checkpoint_file import LIGHTNING
from hookline.interop.lightning.checkpoints import refuse_start
from hookline.interop.lightning.hparams import module_hooks
from hookline.interop.lightning.loaders import convert_given, converting_loaders, outside_turns, with_iterator
from hookline.interop.lightning.names import lightning_schedule
from hookline.interop.lightning.package import is_lightnings, refusal, warn
from hookline.interop.lightning.rules import ZERO_GRAD, clears_before_eval
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
ONLY_OVERRIDES = {"prepare_data", *(f"on_{kind}_model_train" for kind in ("validation", "test", "predict"))}
"""Methods that Lightning calls only if they are overridden, also where a wrapper is set on the object."""
ONLY_OVERRIDES_OF_DATA = {"prepare_data", *TRANSFER}
"""The same for data modules."""


def steps_of(module: Any) -> LightningSteps:
    """Return the steps and hooks of a Lightning module, for Hookline's loop."""
    base = next(cls for cls in type(module).__mro__ if is_lightnings(cls, "LightningModule"))
    _check_module(module)
    if not hasattr(base, "experiment"):
        base.experiment = ExperimentOf2019()  # type: ignore[attr-defined]
    view = TrainerView(base.__module__.removesuffix(".core.module"))
    own: dict[str, Any] = {name: getattr(module, name) for name in MODULE_ACTIONS if _is_own(module, name)}
    if module.predict_step is not None:
        own["predict_step"] = module.predict_step
    if "configure_optimizers" in own:
        ask = module.configure_optimizers
        checked: Any = functools.wraps(ask)(lambda: _configured(ask(), module, view))
        checked.__signature__ = inspect.Signature()  # LightningCLI's wraps a function with other parameters
        own["configure_optimizers"] = checked
    for name, wrap in {"configure_gradient_clipping": _clipping, "optimizer_step": _wrapping}.items():
        if name in own:
            own[name] = wrap(own[name], view)
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


def _check_module(module: Any) -> None:
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
    """Return the change to eval mode with the module's own clearing of gradients before it."""

    def clear_and_to_eval() -> None:
        if clears_before_eval(module.trainer._own._run):
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
            self.original._metric_attributes = None  # the next stage may have other metrics
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
        only = ONLY_OVERRIDES if isinstance(owner, nn.Module) else ONLY_OVERRIDES_OF_DATA
        return method not in only or not _is_theirs(inspect.unwrap(vars(owner)[method]))
    written = next((cls for cls in type(owner).__mro__ if method in vars(cls)), object)
    return written is not object and not _is_theirs(written)


def _is_theirs(written: Any) -> bool:
    """Return whether a class or a function is Lightning's own, and not that of a demo model."""
    return is_lightnings(written) and ".demos." not in written.__module__


# ---- optimizers --------------------------------------------------------------------------------------------


def _configured(returned: Any, module: Any, view: TrainerView) -> Any:
    """Return the result of `configure_optimizers` in Hookline's form, after Lightning's own functions have
    read and checked it.
    """
    read = functools.partial(view.of_lightning, "core.optimizer")
    is_native = view.moment.is_native
    if returned is None and not is_native:
        warn(
            f"`{type(module).__name__}.configure_optimizers` returned `None`: this fit will run with no "
            "optimizer."
        )
        returned = NoOptimizer(module)
    if returned is None:
        return None
    try:
        optimizers, schedulers, monitor = read("_configure_optimizers")(returned)
        configs = (
            read("_configure_schedulers_automatic_opt")(schedulers, monitor)
            if module.automatic_optimization
            else read("_configure_schedulers_manual_opt")(schedulers)
        )
        if not is_native and module.training_step is not None:
            read("_validate_multiple_optimizers_support")(optimizers, module)
        read("_validate_optimizers_attached")(optimizers, configs)
        read("_validate_scheduler_api")(configs, module)
        schedules = [lightning_schedule(each) for each in configs]
        parse_optimizers((optimizers, schedules), type(module).__name__)
    except (OptionError, view.of_lightning("utilities.exceptions", "MisconfigurationException")) as error:
        raise refusal(str(error), "configure_optimizers", None) from None
    return list(optimizers), schedules


class NoOptimizer(Optimizer):
    """Takes the place of an optimizer if there is none: gradients are computed, and no weight changes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(list(module.parameters()) or [torch.zeros(1)], {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Compute the loss, if it is not known yet."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no step has used the gradients."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Do nothing: it has no state."""


def _clipping(configure: Callable[..., Any], view: TrainerView) -> Callable[..., Any]:
    """Return a module's own clipping, which Lightning calls with names, and with an algorithm only if the
    user has chosen one.
    """

    def clip(optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> Any:
        if not view.moment.is_native:
            gradient_clip_algorithm = view.moment.trainer.gradient_clip_algorithm
        return configure(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    return clip


def _wrapping(update: Callable[..., Any], view: TrainerView) -> Callable[..., Any]:
    """Return a module's own `optimizer_step`, which Lightning's trainer calls with Lightning's wrapper of
    the optimizer: its `step` emits the events around the update.
    """

    @functools.wraps(update)
    def wrapped(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> Any:
        if not view.moment.is_native:
            wrapper = view.of_lightning("core.optimizer", "LightningOptimizer")
            optimizer = wrapper._to_lightning_optimizer(optimizer, view.moment.trainer.strategy)
        return update(epoch, batch_idx, optimizer, optimizer_closure)

    return wrapped
