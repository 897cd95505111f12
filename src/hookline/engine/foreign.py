"""Adapt hooks, modules, data modules and loggers of other packages. They are recognised by their class,
without an import.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hookline.engine.events import EventTable
from hookline.engine.listener import Listener


@runtime_checkable
class Adapter(Protocol):
    """Represents one object of another package."""

    original: Any
    """The object that the user added."""
    kind: str
    """Its kind, as shown to users: `Lightning callback`."""

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """Return one listener for each event of the original's class; raise if one cannot be supported."""
        ...


@runtime_checkable
class HookAdapter(Adapter, Protocol):
    """Represents a hook, so it also has a hook's attributes (`tier`, `ranks`, ...)."""

    def begin_run(self, state: Any) -> None:
        """Prepare for a run, before `setup`."""

    def before_optimizers(self) -> None:
        """Prepare for a resume, before the optimizers are restored."""


class RunAware:
    """A hook that needs its run before the first event, such as a hook of a dialect."""

    def begin_run(self, state: Any) -> None:
        """Prepare for a run, before `setup`."""


@runtime_checkable
class KeyedState(Protocol):
    """A hook whose state another package stores under a key of its own."""

    def find_state(self, states: dict[str, Any], name: str) -> Any:
        """Return its state among those of all hooks in a checkpoint, or None."""


class DataLike(Protocol):
    """The methods of a data module, Hookline's or another package's, for type checkers."""

    def prepare_data(self) -> Any:
        """Download or write data to disk."""

    def setup(self, stage: str, /) -> Any:
        """Create the datasets."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""


class LoggerLike(Protocol):
    """The methods of another package's logger, for type checkers."""

    @property
    def name(self) -> Any:
        """Return the name of the experiment."""

    @property
    def version(self) -> Any:
        """Return the version of the experiment."""

    def finalize(self, status: str, /) -> Any:
        """End the log."""


@dataclass(frozen=True, slots=True)
class ForeignBase:
    """A base class of another package, and the adapter for its subclasses."""

    packages: tuple[str, ...]
    name: str
    adapter: str


_LIGHTNING = ("lightning", "pytorch_lightning")
HOOK_BASES = (
    ForeignBase(_LIGHTNING, "Callback", "hookline.interop.lightning.adopted_callback:LightningCallback"),
    ForeignBase(
        ("transformers",), "TrainerCallback", "hookline.interop.transformers.callbacks:TransformersCallback"
    ),
    ForeignBase(("keras",), "Callback", "hookline.interop.keras:KerasCallback"),
)
MODULE_BASES = (
    ForeignBase(_LIGHTNING, "LightningModule", "hookline.interop.lightning.adopted_module:steps_of"),
)
DATA_BASES = (
    ForeignBase(_LIGHTNING, "LightningDataModule", "hookline.interop.lightning.adopted_module:data_of"),
)
LOGGER_BASES = (ForeignBase(_LIGHTNING, "Logger", "hookline.interop.lightning.loggers:AdoptedLogger"),)
FILE_READER = "hookline.interop.lightning.checkpoint_file:read_file"
"""Reads a checkpoint that is one file."""


def read_foreign_checkpoint(path: Any, rank: int, world_size: int) -> dict[str, Any]:
    """Return the contents of a checkpoint in another package's format, for one rank."""
    return pkgutil.resolve_name(FILE_READER)(path, rank, world_size)  # type: ignore[no-any-return]


def adopt(hook: Any) -> Any:
    """Return the adapter of another package's hook; any other object unchanged."""
    return _adapt(hook, HOOK_BASES, hook)


def adopt_steps(module: Any) -> Any:
    """Return the steps and hooks of another package's module; None for any other."""
    return _adapt(module, MODULE_BASES, None)


def adopt_data(given: Any) -> Any:
    """Return the adapter of another package's data module; any other object unchanged."""
    return _adapt(given, DATA_BASES, given)


def adopt_logger(given: Any) -> Any:
    """Return the adapter of another package's logger; any other object unchanged."""
    return _adapt(given, LOGGER_BASES, given)


def is_logger_class(cls: type) -> bool:
    """Return whether its instances are loggers of another package that can be adapted."""
    return _adapter_for(cls, LOGGER_BASES) is not None


def is_hook_class(cls: type) -> bool:
    """Return whether its instances are hooks of another package that can be adapted."""
    return _adapter_for(cls, HOOK_BASES) is not None


def is_module_class(cls: type) -> bool:
    """Return whether its instances are modules of another package, with steps and optimizers of their own."""
    return _adapter_for(cls, MODULE_BASES) is not None


def is_data_class(cls: type) -> bool:
    """Return whether its instances are data modules of another package that can be adapted."""
    return _adapter_for(cls, DATA_BASES) is not None


def _adapt(given: Any, bases: tuple[ForeignBase, ...], otherwise: Any) -> Any:
    make = _adapter_for(type(given), bases)
    return otherwise if make is None else make(given)


def _adapter_for(cls: type, bases: tuple[ForeignBase, ...]) -> Callable[..., Any] | None:
    for ancestor in cls.__mro__:
        package = ancestor.__module__.partition(".")[0]
        for base in bases:
            if ancestor.__name__ == base.name and package in base.packages:
                return pkgutil.resolve_name(base.adapter)  # type: ignore[no-any-return]
    return None
