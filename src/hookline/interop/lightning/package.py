"""The installed Lightning package, if the program has imported it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

from hookline.util.errors import LossError, OptionError

E = TypeVar("E", bound=Exception)

PACKAGES = ("lightning", "pytorch_lightning")
ROOTS = ("lightning.pytorch", "pytorch_lightning")


def root() -> str:
    """Return the name of the imported package; empty without one."""
    return next((name for name in ROOTS if f"{name}.trainer.trainer" in sys.modules), "")


def is_lightnings(what: Any, name: str = "") -> bool:
    """Return whether a class or function is one of Lightning's, of this name if one is given."""
    return what.__module__.partition(".")[0] in PACKAGES and name in ("", what.__name__)


def is_a(what: Any, *names: str) -> bool:
    """Return whether one of the classes of an object has one of these names."""
    return any(cls.__name__ in names for cls in what.__class__.__mro__)


def is_lightning_module(module: Any) -> bool:
    """Return whether it derives from Lightning's own class."""
    return any(is_lightnings(cls, "LightningModule") for cls in type(module).__mro__)


def find(module: str, name: str, package: str = "") -> Any:
    """Return an object of the imported package, or None: `find("callbacks", "ModelCheckpoint")`.

    module: empty for the package itself.
    """
    found = sys.modules.get(f"{package or root()}.{module}".rstrip("."))
    return getattr(found, name, None)


def installed(module: str, name: str) -> Any:
    """Return an object of the package, which is imported if it is installed; None without it."""
    for package in [root()] if root() else ROOTS:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return getattr(importlib.import_module(f"{package}.{module}"), name, None)
    return None


def missing(name: str, instead: str) -> ImportError:
    """Return the error for a class that only the package has. `from ... import` shows an `ImportError` as it
    is; for an `AttributeError` it would say no more than that it cannot import the name.
    """
    return ImportError(f"{name} needs the package lightning; without it use {instead}.", name=name)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn on the first rank, where users see it and may filter it."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, category, stacklevel=3)


def possible() -> type[Warning]:
    """Return the category of advice that may not apply: Lightning's own if the package is imported."""
    found: type[Warning] = find("utilities.warnings", "PossibleUserWarning") or UserWarning
    return found


def refusal(message: str, option: str, value: Any) -> OptionError:
    """Return the error for an option, which is also Lightning's own error if the package is imported."""
    base = find("utilities.exceptions", "MisconfigurationException")
    made: type[OptionError] = OptionError if base is None else _combined(OptionError, base)
    return made(message, option=option, value=value)


@contextlib.contextmanager
def misconfiguration() -> Iterator[None]:
    """Let errors about options and losses be Lightning's own as well, if the package is imported."""
    try:
        yield
    except (OptionError, LossError) as error:
        kind: Any = type(error)
        base = find("utilities.exceptions", "MisconfigurationException")
        if base is not None and not isinstance(error, base):
            error.__class__ = _combined(kind, base)  # the same error, with its notes and attributes
        raise


@functools.cache
def _combined(kind: type[E], base: type[Exception]) -> type[E]:
    made: Any = type(kind.__name__, (kind, base), {"__module__": kind.__module__})
    return made  # type: ignore[no-any-return]
