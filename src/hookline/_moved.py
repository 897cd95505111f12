"""Import lines that are not Hookline's own.

The old ones of modules that have moved still work. Those of classes of other systems raise an error that
names Hookline's: a message of a module's `__getattr__` would be lost, because `from ... import` replaces an
AttributeError by its own error, and an ImportError would end `hasattr(hookline, ...)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from hookline.engine.registry import import_instead

MOVED = {
    "hookline.demos": "hookline.interop.demo",
    "hookline.dialects": "hookline.interop",
    "hookline.events": "hookline.engine.events",
    "hookline.explain": "hookline.engine.explain",
    "hookline.hosts": "hookline.interop.hosts",
    "hookline.replay": "hookline.tracing.replay",
    "hookline.report.listing": "hookline.report.runs",
    "hookline.strategies": "hookline.distributed",
    "hookline.tracing.comparing": "hookline.tracing.report",
    "hookline.tracing.happened": "hookline.tracing.report",
    "hookline.tracing.reading": "hookline.tracing.reader",
}
"""Import lines that were documented, and where each module is now. Modules below a package moved with it."""


def new_name(name: str) -> str:
    """Return where a module is now, or "" if it has not moved."""
    head, tail = name, ""
    while head != "hookline":
        if head in MOVED:
            return MOVED[head] + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return ""


class MovedFinder:
    """Finds modules by the names that they had, and refuses names of other systems.

    Python asks for a module `hookline.X` if `from hookline import X` finds no attribute.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module that has moved; None for every other one."""
        if fullname.startswith("hookline.") and (now := new_name(fullname)):
            return ModuleSpec(fullname, MovedLoader(now))
        package, _, name = fullname.rpartition(".")
        if advice := import_instead(package, name):
            raise ImportError(f"cannot import name {name!r} from {package!r}{advice}", name=fullname)
        return None


class MovedLoader(Loader):
    """Gives a module under its old name too."""

    def __init__(self, now: str) -> None:
        self._now = now

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its new name."""
        module = importlib.import_module(self._now)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, in place of that of the old name."""
        module.__spec__ = self._spec
