"""Save and log the arguments of a module, so that it can be made again."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from hookline.engine.checks import as_tuple, refused
from hookline.engine.hook import Hook
from hookline.engine.init_arguments import InitArguments, cannot_keep, init_arguments
from hookline.run.module import Module
from hookline.util.errors import OptionError

log = logging.getLogger("hookline")

MISSING = object()


class HParams(Hook):
    """Hyper-parameters: in every checkpoint, in the log, and used by `Module.load_from_checkpoint`.

    Without `params` they are the arguments that the module was made with, defaults included. A checkpoint
    holds numbers, text, None, and lists, tuples and dictionaries of them. For other values it holds the type,
    and `load_from_checkpoint` requires them. Only a `hookline.Module` records its arguments. For a plain
    nn.Module they are the attributes with the names of its arguments.
    """

    tier = "builtin"
    observes = True
    name = "hparams"

    def __init__(
        self,
        params: Mapping[str, Any] | argparse.Namespace | Any = None,
        ignore: tuple[str, ...] = (),
        name: str | None = None,
    ) -> None:
        """Take hyper-parameters, or read them from the module.

        params: a mapping, a dataclass or a namespace; None: the arguments of the module. ignore: arguments of
        the module's `__init__` to leave out.
        """
        super().__init__(name)
        self._given = None if params is None else _params_dict(params)
        for key, value in (self._given or {}).items():
            if why := cannot_keep(value):
                raise OptionError(
                    f"HParams: {key!r} is {why}, which a checkpoint cannot hold: pass numbers, text, None, "
                    "and lists, tuples and dictionaries of them.",
                    option="params",
                    value=value,
                )
        if isinstance(ignore, str):
            raise refused("HParams: ignore", ignore, f"a tuple of names, such as ({ignore!r},)")
        self.ignore = as_tuple("HParams: ignore", ignore, "names")
        self.params: dict[str, Any] = dict(self._given or {})
        self.left_out: dict[str, str] = {}
        """Arguments that a checkpoint cannot hold, each with its type."""

    def setup(self, stage: str, module: Any, logger: Any, rank: int = 0) -> None:
        if stage != "fit":
            return
        if self._given is None:
            self._read(module, is_first=rank == 0)
        logger.log_hyperparams(dict(self.params))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hparams"], checkpoint["hparams_left_out"] = dict(self.params), dict(self.left_out)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        before = checkpoint.get("hparams", {})
        keys = {**before, **self.params} if self._given is not None else before.keys() & self.params
        changed = [
            f"{key}: {before.get(key, 'none')!r} -> {self.params.get(key, 'none')!r}"
            for key in keys
            if before.get(key, MISSING) != self.params.get(key, MISSING)
        ]
        if before and changed:
            log.warning(
                "HParams: the resumed run has other hyper-parameters than its checkpoint: %s.",
                "; ".join(changed),
            )

    def _read(self, module: Any, is_first: bool) -> None:
        made, who = init_arguments(module), type(module).__name__
        if made is None:
            made, unknown = _guess_arguments(module)
            is_sure = isinstance(module, Module) or getattr(module, "hparams", None)
            if is_first and not is_sure and (made.recorded or unknown):
                log.warning(
                    "HParams: %s does not record its arguments, as only a hookline.Module does. "
                    "Saved are its attributes with the names of its arguments: %s.%s Derive it "
                    "from hookline.Module, or pass them: HParams({...}).",
                    who,
                    ", ".join(made.recorded) or "none",
                    f" Not known: {', '.join(unknown)}." if unknown else "",
                )
        self.params = {name: value for name, value in made.recorded.items() if name not in self.ignore}
        self.left_out = {name: why for name, why in made.left_out.items() if name not in self.ignore}
        if is_first and self.left_out and isinstance(module, Module):
            log.warning(
                "HParams: a checkpoint cannot hold %s, which %s was made with: pass %s to "
                "load_from_checkpoint.",
                ", ".join(f"{name} ({why})" for name, why in self.left_out.items()),
                who,
                "it" if len(self.left_out) == 1 else "them",
            )


def _guess_arguments(module: Any) -> tuple[InitArguments, list[str]]:
    """Return the arguments found in Lightning's `hparams` or as attributes, and the names of the others."""
    kept = getattr(module, "hparams", None)
    known = dict(kept) if isinstance(kept, Mapping) else {}
    made, unknown = InitArguments({name: each for name, each in known.items() if not cannot_keep(each)}), []
    for parameter in list(inspect.signature(type(module).__init__).parameters.values())[1:]:
        if parameter.name in made.recorded:
            continue
        value = (
            getattr(module, parameter.name, MISSING)
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            else MISSING
        )
        if value is MISSING:
            unknown.append(parameter.name)
        elif why := cannot_keep(value):
            made.left_out[parameter.name] = why
            unknown.append(parameter.name)
        else:
            made.recorded[parameter.name] = value
    return made, unknown


def _params_dict(params: Any) -> dict[str, Any]:
    if isinstance(params, argparse.Namespace):
        params = vars(params)
    elif dataclasses.is_dataclass(params) and not isinstance(params, type):
        params = dataclasses.asdict(params)
    if not isinstance(params, Mapping) or not all(isinstance(key, str) for key in params):
        raise refused("HParams: params", params, "a mapping with names as keys, a dataclass or a namespace")
    return dict(params)
