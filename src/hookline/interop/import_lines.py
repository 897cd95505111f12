"""Import lines of other systems that give Hookline's objects: everything that `hookline run` replaces.

`stand_in` is for packages of which Hookline has all names. `replace_lightning_trainer` replaces one class of
Lightning and keeps the rest of the package.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hookline.util.errors import HooklineError, closest

STAND_INS = {
    "trainers": "hookline.interop.trainers",
    "trainers.hooks": "hookline.interop.trainers.hooks",
    "model_training_framework": "hookline.interop.model_training_framework",
    "model_training_framework.config": "hookline.interop.model_training_framework",
    "model_training_framework.config.schemas": "hookline.interop.model_training_framework",
    "model_training_framework.trainer": "hookline.interop.model_training_framework",
    "model_training_framework.trainer.hooks": "hookline.interop.model_training_framework",
    "kempnerforge": "hookline.interop.kempnerforge",
    "kempnerforge.training": "hookline.interop.kempnerforge",
    "kempnerforge.training.hooks": "hookline.interop.kempnerforge",
}
"""Modules of other systems, and the module of Hookline that has their names."""
STAND_IN_PACKAGES = tuple(name for name in STAND_INS if "." not in name)
LIGHTNING_TRAINERS = {
    "lightning": "lightning.pytorch.trainer.trainer",
    "pytorch_lightning": "pytorch_lightning.trainer.trainer",
}
"""Lightning's packages, and the module that defines the `Trainer` of each; others import it from there."""

replaced: list[str] = []
"""What this process has replaced so far."""


def _report_replaced(what: str, by: str) -> None:
    replaced.append(what)
    if os.environ.get("RANK", "0") == "0":  # once, not on every rank
        print(f"hookline: replaced {what} with {by}", file=sys.stderr, flush=True)


# ---- packages of which Hookline has all names --------------------------------------------------------------


def stand_in(requested: Iterable[str] = ()) -> None:
    """Let Hookline's modules stand in for the packages that are not installed, and for the requested ones
    even if they are.
    """
    # the last finder is asked for what no other finder has found, the first one for everything
    sys.meta_path.append(StandInFinder(STAND_IN_PACKAGES))
    if chosen := [name for name in requested if name in STAND_IN_PACKAGES]:
        sys.meta_path.insert(0, StandInFinder(chosen))


class StandInFinder:
    """Finds the modules of Hookline that stand in for some packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to make the module; None for one of another package, or below an installed package."""
        package, dot, _ = fullname.partition(".")
        if package not in self.packages or (dot and not isinstance(sys.modules.get(package), StandIn)):
            return None
        if fullname not in STAND_INS:
            known = [name for name in STAND_INS if name.startswith(f"{package}.")]
            raise ModuleNotFoundError(
                f"Hookline stands in for {package} and has no module {fullname!r}."
                f"{closest(fullname, known)} There are: {', '.join([package, *known])}.",
                name=fullname,
            )
        return ModuleSpec(fullname, StandInLoader(), is_package=True)


class StandIn(ModuleType):
    """A module with the names of a module of Hookline. Names that a program assigns to it stay its own."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__file__"):  # those of the import system, which are not Hookline's
            raise AttributeError(name)
        return getattr(pkgutil.resolve_name(STAND_INS[self.__name__]), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(pkgutil.resolve_name(STAND_INS[self.__name__]))})


class StandInLoader(Loader):
    """Makes a `StandIn`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which is not filled yet."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import the module of Hookline, so that its errors appear here."""
        hooklines = pkgutil.resolve_name(STAND_INS[module.__name__])
        module.__doc__ = hooklines.__doc__
        if module.__name__ in STAND_IN_PACKAGES:
            _report_replaced(module.__name__, hooklines.__name__)


# ---- one class of Lightning --------------------------------------------------------------------------------


def replace_lightning_trainer() -> None:
    """Let Lightning's name `Trainer` give Hookline's class, in modules that are loaded and in those to come.

    Raise if Lightning is not installed, or if the program has imported Lightning's class already.
    """
    if any(isinstance(finder, TrainerFinder) for finder in sys.meta_path):
        return
    if not any(name in sys.modules or importlib.util.find_spec(name) for name in LIGHTNING_TRAINERS):
        raise HooklineError(
            "Lightning is not installed: run `pip install lightning`, or change the import line of the "
            "program to `from hookline.interop.lightning import Trainer`."
        )
    # first, because it must not be imported in the middle of an import of Lightning
    trainer = pkgutil.resolve_name("hookline.interop.lightning:Trainer")
    sys.meta_path.insert(0, TrainerFinder(trainer))
    for package, home in LIGHTNING_TRAINERS.items():
        if home not in sys.modules:
            continue
        original = sys.modules[home].__dict__["Trainer"]
        _type_as(original, trainer)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == package and vars(module).get("Trainer") is original:
                vars(module)["Trainer"] = trainer
        for name, value in vars(sys.modules["__main__"]).items():
            if value is original:
                raise HooklineError(
                    f"{name} is Lightning's Trainer already: import hookline.interop.run_as_lightning "
                    f"before {package}."
                )
        _report_trainer(package)


def _type_as(original: type, trainer: type) -> None:
    """Give the arguments the types of Lightning's, from which LightningCLI makes callbacks and loggers."""
    theirs, ours = (inspect.unwrap(vars(each)["__init__"]).__annotations__ for each in (original, trainer))
    ours.update({name: hint for name, hint in theirs.items() if name in ours})


def _report_trainer(package: str) -> None:
    public = "lightning.pytorch" if package == "lightning" else package
    _report_replaced(f"{public}.Trainer", "hookline.interop.lightning.Trainer")


class TrainerFinder:
    """Finds the modules that define Lightning's `Trainer`, and replaces the class when one is loaded."""

    def __init__(self, trainer: type) -> None:
        self.trainer = trainer

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders return, with a further step after the module's own code."""
        if fullname not in LIGHTNING_TRAINERS.values():
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        own = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            own(module)
            _type_as(vars(module)["Trainer"], self.trainer)
            vars(module)["Trainer"] = self.trainer
            _report_trainer(fullname.partition(".")[0])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
