"""Hookline's modules, and plain ones, with the attributes that Lightning's callbacks expect of a module."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from hookline.engine.init_arguments import init_arguments
from hookline.engine.listener import overrides
from hookline.interop.lightning.hparams import AttributeDict
from hookline.interop.lightning.names import log_as_lightning
from hookline.interop.lightning.package import is_lightnings
from hookline.interop.lightning.table import MODULE_ACTIONS
from hookline.interop.lightning.trainer_view import TrainerView
from hookline.run.module import Module
from hookline.run.state_parts import fact


def is_lightning_module(module: Any) -> bool:
    """Return whether it derives from Lightning's own class."""
    return any(is_lightnings(cls, "LightningModule") for cls in type(module).__mro__)


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

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank zero only."""
        self._view.print(*args, **kwargs)


def _both(own: type, base: type) -> type:
    """Return a class that is both, for isinstance only; the base alone if the classes cannot be combined."""
    if any("__init_subclass__" in vars(cls) for cls in own.__mro__ if cls not in (object, Module)):
        return base
    try:
        return type(own.__name__, (own, base), {})
    except TypeError:
        return base
