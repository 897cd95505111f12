"""`self.save_hyperparameters()` and `self.hparams`: the arguments of a module or data module, as Lightning
keeps them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from hookline.engine.init_arguments import cannot_keep, record_init, running_arguments
from hookline.hooks.hparams import HParams
from hookline.util.errors import OptionError

__all__ = ["AttributeDict", "HyperParameters", "KeptHParams"]


class AttributeDict(dict[str, Any]):
    """A dictionary whose entries are attributes as well: `self.hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"hparams has no {name!r}. It has: {', '.join(self) or 'nothing'}.")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperParameters:
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
        record_init(cls)

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
        made_with = running_arguments(self)
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
        self.__dict__["_hparams_initial"] = {name: _copied(value) for name, value in self.hparams.items()}
        self._log_hyperparams = logger


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
        kept, whole = _plain(module.hparams), module._hparams_name
        super().__init__(kept if whole in (None, "kwargs") else {whole: kept})
        self.logged: dict[str, Any] = {}
        for each in (module, data):
            if getattr(each, "_log_hyperparams", False):
                self.logged |= _plain(each.hparams_initial)

    def setup(self, stage: str, module: Any, logger: Any, rank: int = 0) -> None:
        """Log them."""
        if stage == "fit" and self.logged:
            logger.log_hyperparams(self.logged)


def _plain(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a checkpoint and a log can hold."""
    return {str(name): value for name, value in hparams.items() if not cannot_keep(value)}


# ---- The hooks of a module


log = logging.getLogger("hookline")


def module_hooks(run: Any, module: Any, returned: Any) -> list[Any]:
    """Return the hooks of a module; `returned` is the result of `configure_callbacks`."""
    callbacks = (
        list(returned) if isinstance(returned, list | tuple) else [returned] if returned is not None else []
    )
    hooks = run.state.hooks
    kinds = {type(each) for each in callbacks}
    displaced = [entry for entry in hooks.entries() if type(entry.given) in kinds]
    for entry in displaced:
        log.warning(
            "%s.configure_callbacks returns a %s, which replaces hook %r in this run.",
            type(module).__name__,
            type(entry.given).__name__,
            entry.name,
        )
    if displaced:
        run.participants.on_close.append(hooks.set_aside(displaced))
    data = getattr(run.datamodule, "original", run.datamodule)
    has_some = any(getattr(each, "hparams", None) for each in (module, data))
    is_kept = any(isinstance(each, HParams) for each in hooks)
    return [*callbacks, KeptHParams(module, data)] if has_some and not is_kept else callbacks


def wrap_configure_callbacks(cls: type) -> None:
    """Wrap the class's own `configure_callbacks`, if it has one, so that its hooks are added as in
    Lightning.
    """
    ask: Callable[[Any], Any] | None = vars(cls).get("configure_callbacks")
    if ask is None:
        return

    @functools.wraps(ask)
    def configure_callbacks(self: Any) -> Any:
        return module_hooks(self._run, self, ask(self))

    cls.configure_callbacks = configure_callbacks  # type: ignore[attr-defined]
