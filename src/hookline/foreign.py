"""Hooks of other packages: recognised by their class, without importing the package, and heard through an adapter."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hookline.events import EventTable
from hookline.listener import Listener


@runtime_checkable
class Adapter(Protocol):
    """Stands for one object of another package among the hooks; it has the attributes of a hook (`tier`, `ranks`, ...) too."""

    original: Any
    """The object that the user added."""
    kind: str
    """What it is, for people: `Lightning callback`."""

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """One listener for each event that the original's class listens to; what cannot be honoured is an error."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A base class of another package, and who adapts what derives from it."""

    packages: tuple[str, ...]
    base: str
    adapter: str


KINDS = (
    Kind(("lightning", "pytorch_lightning"), "Callback", "hookline.dialects.adopted.lightning:LightningCallback"),
    Kind(("transformers",), "TrainerCallback", "hookline.dialects.adopted.transformers:TransformersCallback"),
    Kind(("keras",), "Callback", "hookline.dialects.adopted.keras:KerasCallback"),
)


def adopt(hook: Any) -> Any:
    """The adapter of a hook of another package; any other object as it is."""
    for cls in type(hook).__mro__:
        package = cls.__module__.partition(".")[0]
        for kind in KINDS:
            if cls.__name__ == kind.base and package in kind.packages:
                module, _, adapter = kind.adapter.partition(":")
                return getattr(importlib.import_module(module), adapter)(hook)
    return hook
