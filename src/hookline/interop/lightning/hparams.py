"""`self.save_hyperparameters()` and `self.hparams`: the arguments of a module or data module, as Lightning
keeps them.
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from hookline.engine.init_arguments import RecordsInit, Wrapped, cannot_keep, record_calls, running_arguments
from hookline.hooks.hparams import HParams
from hookline.interop.lightning.arguments import as_list, literal
from hookline.interop.lightning.closure_step import LoopEvents, with_closure
from hookline.util.errors import OptionError, described


class AttributeDict(dict[str, Any]):
    """A dictionary whose entries are attributes as well: `self.hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"hparams has no {name!r}. It has: {', '.join(self) or 'nothing'}.")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperParameters(RecordsInit):
    """The hyper-parameter methods of Lightning's modules and data modules."""

    _log_hyperparams = False
    _hparams_name: str | None = None
    """The argument of `__init__` that all hyper-parameters were passed in."""

    @property
    def hparams(self) -> AttributeDict:
        """Return the hyper-parameters that `save_hyperparameters` has kept."""
        return self.__dict__.setdefault("_hparams", AttributeDict())  # type: ignore[no-any-return]

    @property
    def hparams_initial(self) -> AttributeDict:
        """Return a copy of their initial values."""
        return AttributeDict(copy.deepcopy(self.__dict__.get("_hparams_initial", {})))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        record_calls(cls)

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of `__init__`: all, the named ones, or the entries of one mapping or namespace.

        logger: whether they are logged as well. frame: not needed, because every call of `__init__` records
        its arguments.
        """
        if len(args) == 1 and not args[0]:
            return  # an empty mapping, as in Lightning
        made_with = _init_arguments(self)
        objects = [each for each in args if not isinstance(each, str)]
        if objects:
            kept = _as_dict(objects[0])
            self._hparams_name = next(
                (name for name, value in made_with.items() if value is objects[0]), None
            )
        elif unknown := [name for name in args if name not in made_with]:
            raise OptionError(
                f"save_hyperparameters({unknown[0]!r}): {type(self).__name__}.__init__ has no such argument. "
                f"It has: {', '.join(made_with) or 'none'}."
            )
        else:
            kept = {name: made_with[name] for name in args or made_with}
        left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
        self.hparams.update({name: value for name, value in kept.items() if name not in left_out})
        self.remove_ignored_hparams(left_out)
        self.__dict__["_hparams_initial"] = {name: _copied(value) for name, value in self.hparams.items()}
        self._log_hyperparams = logger

    def remove_ignored_hparams(self, ignore_list: Iterable[str]) -> None:
        """Remove hyper-parameters that a base class has kept."""
        for name in ignore_list:
            self.hparams.pop(name, None)


def _init_arguments(made: Any) -> dict[str, Any]:
    """Return the arguments of the `__init__` that is running; those of a dataclass are its fields."""
    if not dataclasses.is_dataclass(made):
        return running_arguments(made)
    return {each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.init}


def _as_dict(given: Any) -> dict[str, Any]:
    if isinstance(given, argparse.Namespace):
        return dict(vars(given))
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dataclasses.asdict(given)
    if isinstance(given, Mapping):
        return dict(given)
    raise OptionError(
        f"save_hyperparameters takes names, a mapping, a namespace or a dataclass, not "
        f"{type(given).__name__}."
    )


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file or a lock cannot be copied
        return value


class KeptHParams(HParams):
    """Saves the hyper-parameters of a module in every checkpoint, for `load_from_checkpoint`, and logs them
    with the data module's.
    """

    name = "hparams"

    def __init__(self, module: Any, data: Any = None) -> None:
        kept, whole = _plain(module.hparams), getattr(module, "_hparams_name", None)
        super().__init__(kept if whole in (None, "kwargs") else {whole: kept})
        self.left_out = {
            str(name): why for name, value in module.hparams.items() if (why := cannot_keep(_as_plain(value)))
        }
        self.of_data = _plain(getattr(data, "hparams", {}))
        self.initial = initial_hparams(module, data)

    def setup(self, stage: str, module: Any, logger: Any, rank: int = 0) -> None:
        """Log them. An object is logged as text."""
        if stage != "fit" or not self.initial or not logger:
            return
        logger.log_hyperparams(
            {
                name: str(value) if cannot_keep(_as_plain(value)) else _as_plain(value)
                for name, value in merge_hyperparameters(self.initial).items()
            }
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the data module's to the module's."""
        super().on_save_checkpoint(checkpoint)
        if self.of_data:
            checkpoint.setdefault("lightning", {})[DATA_HPARAMS] = dict(self.of_data)


OF_CLI = "_class_path"
"""An entry that Lightning's command line adds for itself."""
DATA_HPARAMS = "datamodule_hyper_parameters"
"""Lightning's key of a checkpoint for the data module's hyper-parameters."""


class HParamsConflict(OptionError, RuntimeError):
    """A module and its data module have different values of one hyper-parameter."""


Initial = list[tuple[Any, Mapping[str, Any]]]
"""Objects with the initial values of their hyper-parameters."""


def initial_hparams(*owners: Any) -> Initial:
    """Return the hyper-parameters of those objects that have saved some to be logged."""
    return [(each, each.hparams_initial) for each in owners if getattr(each, "_log_hyperparams", False)]


def merge_hyperparameters(initial: Initial) -> dict[str, Any]:
    """Return the hyper-parameters to log; raise if two objects have different values of one name, which a
    log could not tell apart.
    """
    merged: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for owner, hparams in initial:
        who = type(owner).__name__
        for name, value in hparams.items():
            if name in merged and not _is_equal(merged[name], value):
                raise HParamsConflict(
                    f"Error while merging hparams: {name!r} is {described(merged[name])} in {owners[name]} "
                    f"and {described(value)} in {who}. Give both the same value or different names, or call "
                    "save_hyperparameters(logger=False) in one of them."
                )
            if name != OF_CLI:
                merged[name], owners[name] = value, who
    return merged


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return one is other if isinstance(one, Tensor) else bool(one == other)


def _plain(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a checkpoint can hold."""
    plain = {str(name): _as_plain(value) for name, value in hparams.items()}
    return {name: value for name, value in plain.items() if not cannot_keep(value)}


def _as_plain(value: Any) -> Any:
    """Return a namespace or another mapping as a dictionary; any other value unchanged."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    return {key: _as_plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def hparams_of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the hyper-parameters in a .yaml file, or in a .csv file with the columns key and value."""
    file = Path(path)
    text = file.read_text()
    if file.suffix == ".csv":
        return {row["key"]: literal(row["value"]) for row in csv.DictReader(text.splitlines())}
    if file.suffix not in (".yaml", ".yml"):
        raise OptionError(f"hparams_file={str(path)!r}: a .yaml, .yml or .csv file is required.")
    import yaml  # type: ignore[import-untyped]

    return dict(yaml.safe_load(text) or {})


# ---- The hooks of a module


log = logging.getLogger("hookline")


def module_hooks(run: Any, module: Any, returned: Any) -> list[Any]:
    """Return the hooks of a module; `returned` is the result of `configure_callbacks`."""
    callbacks = as_list(returned)
    hooks = run.state.hooks
    kinds = {type(each) for each in callbacks}
    if (shown := getattr(run.trainer, "lightning_trainer", None)) is not None:
        kinds, callbacks = shown.take_module_callbacks(callbacks)
    displaced = [entry for entry in hooks.entries() if type(entry.given) in kinds]
    if displaced:
        log.warning(
            "%s.configure_callbacks replaces existing callbacks passed to Trainer: %s.",
            type(module).__name__,
            ", ".join(sorted({type(entry.given).__name__ for entry in displaced})),
        )
        run.participants.on_close.append(hooks.set_aside(displaced))
    if shown is not None:
        callbacks = [*callbacks, LoopEvents(run)]
        run.traits.step_choices = (with_closure,)
    data = getattr(run.datamodule, "original", run.datamodule)
    has_some = any(getattr(each, "hparams", None) for each in (module, data))
    is_kept = any(isinstance(each, HParams) for each in hooks)
    return [*callbacks, KeptHParams(module, data)] if has_some and not is_kept else callbacks


def wrap_configure_callbacks(cls: type) -> None:
    """Wrap the class's own `configure_callbacks`, if it has one, so that its hooks are added as in
    Lightning.
    """
    ask: Callable[[Any], Any] | None = vars(cls).get("configure_callbacks")
    if ask is not None:
        cls.configure_callbacks = Wrapped(ask, _adding_hooks)  # type: ignore[attr-defined]


def _adding_hooks(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return functools.wraps(ask)(lambda self: module_hooks(self._run, self, ask(self)))
