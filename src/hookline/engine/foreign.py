"""Hooks, modules and data modules of other packages: recognised by their class, without importing the
package, and adapted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hookline.engine.events import EventTable
from hookline.engine.listener import Listener


@runtime_checkable
class Adapter(Protocol):
    """Stands for one object of another package."""

    original: Any
    """The object that the user added."""
    kind: str
    """What it is, for people: `Lightning callback`."""

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """One listener for each event that the original's class listens to; what cannot be honoured is an
        error.
        """
        ...


@runtime_checkable
class HookAdapter(Adapter, Protocol):
    """Stands for a hook, so it has the attributes of one too (`tier`, `ranks`, ...)."""

    def begin_run(self, state: Any) -> None:
        """A run begins; set-up comes later."""
        ...

    def before_optimizers(self) -> None:
        """A run goes on from a checkpoint, whose optimizers are put back next."""
        ...


class RunAware:
    """A hook, of a dialect say, that has to know its run before it hears the first event."""

    def begin_run(self, state: Any) -> None:
        """A run begins; set-up comes later."""


class DataLike(Protocol):
    """What a data module, Hookline's or another package's, looks like to a type checker."""

    def prepare_data(self) -> Any:
        """Download or write data to disk."""

    def setup(self, stage: str, /) -> Any:
        """Make the datasets."""

    def train_dataloader(self) -> Any:
        """The training loader."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A base class of another package, and who adapts what derives from it."""

    packages: tuple[str, ...]
    base: str
    adapter: str


_LIGHTNING = ("lightning", "pytorch_lightning")
KINDS = (
    Kind(_LIGHTNING, "Callback", "hookline.interop.lightning.callbacks:LightningCallback"),
    Kind(
        ("transformers",), "TrainerCallback", "hookline.interop.transformers.callbacks:TransformersCallback"
    ),
    Kind(("keras",), "Callback", "hookline.interop.keras:KerasCallback"),
)
MODULES = (Kind(_LIGHTNING, "LightningModule", "hookline.interop.lightning.adopted_module:steps_of"),)
DATA = (Kind(_LIGHTNING, "LightningDataModule", "hookline.interop.lightning.adopted_module:data_of"),)


def adopt(hook: Any) -> Any:
    """The adapter of a hook of another package; any other object as it is."""
    make = _adapter_of(hook, KINDS)
    return hook if make is None else make(hook)


def adopt_steps(module: Any) -> Any:
    """The steps and hooks of another package's module; None for any other."""
    make = _adapter_of(module, MODULES)
    return None if make is None else make(module)


def adopt_data(given: Any) -> Any:
    """The adapter of another package's data module; any other object as it is."""
    make = _adapter_of(given, DATA)
    return given if make is None else make(given)


def is_hook_class(cls: type) -> bool:
    """Whether its objects are hooks of another package that can be adapted."""
    return _adapter_for(cls, KINDS) is not None


def is_data_class(cls: type) -> bool:
    """Whether its objects are data modules of another package that can be adapted."""
    return _adapter_for(cls, DATA) is not None


def _adapter_of(given: Any, kinds: tuple[Kind, ...]) -> Callable[[Any], Any] | None:
    return _adapter_for(type(given), kinds)


def _adapter_for(kind_of: type, kinds: tuple[Kind, ...]) -> Callable[[Any], Any] | None:
    for cls in kind_of.__mro__:
        package = cls.__module__.partition(".")[0]
        for kind in kinds:
            if cls.__name__ == kind.base and package in kind.packages:
                module, _, adapter = kind.adapter.partition(":")
                return getattr(importlib.import_module(module), adapter)  # type: ignore[no-any-return]
    return None
