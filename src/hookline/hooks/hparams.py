"""Keeps and logs what a module was made with, so that it can be made again."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from hookline.errors import OptionError
from hookline.hook import Hook
from hookline.options import members

log = logging.getLogger("hookline")

MISSING = object()


class HParams(Hook):
    """Hyper-parameters: in every checkpoint, in the log, and used by `Module.load_from_checkpoint`.

    Without `params` they are the arguments of the module's `__init__` that it keeps under their own names
    (`self.width = width`). Numbers, text, None, and lists, tuples and dictionaries of them can be kept.
    """

    tier = "builtin"
    name = "hparams"

    def __init__(
        self, params: Mapping[str, Any] | argparse.Namespace | Any = None, ignore: tuple[str, ...] = (), name: str | None = None
    ) -> None:
        """Give them, as a mapping, a dataclass or a namespace, or leave them to the module.

        ignore: arguments of the module's `__init__` to leave out.
        """
        super().__init__(name)
        self._given = None if params is None else _as_dict(params)
        for key, value in (self._given or {}).items():
            if why := cannot_keep(value):
                raise OptionError(f"HParams: {key!r} is {why}, which a checkpoint cannot hold: pass numbers, text, None, and "
                                  "lists, tuples and dictionaries of them.")  # fmt: skip
        if isinstance(ignore, str):
            raise OptionError(f"HParams: ignore={ignore!r} must be a tuple of names, such as ({ignore!r},).")
        self.ignore = members("HParams: ignore", ignore, "names")
        self.params: dict[str, Any] = dict(self._given or {})

    def setup(self, stage: str, module: Any, logger: Any) -> None:
        if stage != "fit":
            return
        if self._given is None:
            self.params = self._from_module(module)
        logger.log_hyperparams(dict(self.params))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hparams"] = dict(self.params)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        before = checkpoint.get("hparams", {})
        changed = [f"{key}: {before.get(key, 'none')!r} -> {self.params.get(key, 'none')!r}" for key in {**before, **self.params}
                   if before.get(key, MISSING) != self.params.get(key, MISSING)]  # fmt: skip
        if before and changed:
            log.warning("HParams: the resumed run has other hyper-parameters than its checkpoint: %s.", "; ".join(changed))

    def _from_module(self, module: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        left_out: list[str] = []
        for each in list(inspect.signature(type(module).__init__).parameters.values())[1:]:
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or each.name in self.ignore:
                continue
            value = getattr(module, each.name, MISSING)
            if value is MISSING or cannot_keep(value):
                left_out.append(each.name)
            else:
                found[each.name] = value
        if left_out:
            log.info("HParams: %s of %s.__init__ cannot be kept: no attribute of that name, or none a checkpoint can hold.",
                     ", ".join(left_out), type(module).__name__)  # fmt: skip
        return found


def _as_dict(params: Any) -> dict[str, Any]:
    if isinstance(params, argparse.Namespace):
        params = vars(params)
    elif dataclasses.is_dataclass(params) and not isinstance(params, type):
        params = dataclasses.asdict(params)
    if not isinstance(params, Mapping) or not all(isinstance(key, str) for key in params):
        raise OptionError(f"HParams: params={params!r} must be a mapping with names as keys, a dataclass or a namespace.")
    return dict(params)


def cannot_keep(value: Any) -> str:
    """What stands in the way, or an empty string. Exact types: a subclass would come back as something else."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return ""
    if kind in (list, tuple):
        return next((why for each in value if (why := cannot_keep(each))), "")
    if kind is dict:
        return next((why for pair in value.items() for each in pair if (why := cannot_keep(each))), "")
    return f"a {kind.__module__}.{kind.__qualname__}"
