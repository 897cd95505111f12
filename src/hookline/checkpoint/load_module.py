"""Create a module from the hyper-parameters and weights in a checkpoint."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hookline.checkpoint.averages import check_weights, choose_weights
from hookline.checkpoint.weights import put_weights, read_checkpoint
from hookline.engine.events import EVENTS
from hookline.engine.foreign import adopt_steps
from hookline.engine.listener import find_listeners
from hookline.run.state import State
from hookline.util.errors import OptionError, closest
from hookline.util.urls import is_url

M = TypeVar("M", bound=nn.Module)
log = logging.getLogger("hookline")


def load_module(
    cls: type[M], path: str | os.PathLike[str], strict: bool = True, weights: Any = "scored", **overrides: Any
) -> M:
    """Create a `cls` with the arguments in the checkpoint, updated by `overrides`, and load its weights.

    weights: as for `load_weights`; if the class has an argument of this name, the value is for the class.
    """
    if "weights" in inspect.signature(cls.__init__).parameters:
        overrides, weights = overrides if weights == "scored" else {**overrides, "weights": weights}, "scored"
    check_weights(weights)
    read = read_checkpoint(path)
    where, contents = read.where, read.contents
    bound = _arguments(cls, contents, overrides, where)
    module: Any = cls(*bound.args, **bound.kwargs)
    if hasattr(module, "configure_model"):  # not a plain nn.Module
        module.configure_model()
        state = State(module=module, checkpoint=contents, path=where if is_url(where) else Path(where))
        foreign = adopt_steps(module)  # a module of another package has its own hooks
        listeners = (
            foreign.listeners(cls.__name__, EVENTS)
            if foreign
            else find_listeners(module, "M", cls.__name__, EVENTS)
        )
        for listener in listeners:
            if listener.event.name == "module_load_checkpoint":
                listener.binding.call(state)
    chosen = choose_weights(contents, weights, where)
    put_weights(module, chosen.weights, where, strict, read.step, chosen.kind)
    return module  # type: ignore[no-any-return]


def _arguments(
    cls: type[nn.Module], contents: dict[str, Any], overrides: dict[str, Any], where: str
) -> inspect.BoundArguments:
    """Bind saved and given arguments to `__init__`; ignore saved ones that it does not take."""
    saved, left_out = contents.get("hparams", {}), contents.get("hparams_left_out", {})
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    rest = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
    named = {each.name: each for each in parameters if each.kind is not each.VAR_KEYWORD}
    for name in overrides:
        if name not in named and rest is None:
            raise OptionError(
                f"{cls.__name__}.__init__ has no argument {name!r}.{closest(name, named)} "
                f"It has: {', '.join(named) or 'none'}."
            )
    known = {**saved, **overrides}
    missing = [
        name
        for name, each in named.items()
        if each.default is each.empty and each.kind is not each.VAR_POSITIONAL and name not in known
    ]
    if missing:
        listed = ", ".join(
            f"{name} ({left_out[name]}, which a checkpoint cannot hold)" if name in left_out else name
            for name in missing
        )
        hint = "" if saved or left_out else ", or train with hooks=[HParams()]"
        raise OptionError(
            f"{where} does not contain these arguments of {cls.__name__}: {listed}. Pass them "
            f"(load_from_checkpoint(path, {missing[0]}=...)){hint}."
        )
    for name in left_out.keys() & named.keys() - overrides.keys():
        log.warning(
            "%s was created with %s=%s, which a checkpoint cannot hold: the default is used instead. To set "
            "it: load_from_checkpoint(path, %s=...).",
            cls.__name__,
            name,
            left_out[name],
            name,
        )
    bound = inspect.Signature(parameters).bind_partial()
    bound.arguments = {name: known[name] for name in named if name in known}
    if rest is not None:
        bound.arguments[rest] = {name: value for name, value in known.items() if name not in named}
    return bound
