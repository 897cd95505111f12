"""A module made again from a checkpoint: its hyper-parameters, then its weights."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hookline.checkpoint.averages import check_weights, choose_weights
from hookline.checkpoint.weights import put_weights, read_checkpoint
from hookline.errors import OptionError, closest
from hookline.events import EVENTS
from hookline.foreign import adopt_steps
from hookline.listener import find_listeners
from hookline.state import State
from hookline.urls import is_url

M = TypeVar("M", bound=nn.Module)


def load_module(
    cls: type[M], path: str | os.PathLike[str], strict: bool = True, weights: Any = "scored", **overrides: Any
) -> M:
    """Make a `cls` with the arguments that `HParams` kept, or these instead, and give it the weights of a checkpoint.

    weights: as for `load_weights`, unless the class has an argument of that name itself: then it is that.
    """
    if "weights" in inspect.signature(cls.__init__).parameters:
        overrides, weights = overrides if weights == "scored" else {**overrides, "weights": weights}, "scored"
    check_weights(weights)
    read = read_checkpoint(path)
    where, contents = read.where, read.contents
    module: Any = cls(**_arguments(cls, contents.get("hparams", {}), overrides, where))
    if hasattr(module, "configure_model"):  # not a plain nn.Module
        module.configure_model()
        state = State(module=module, checkpoint=contents, path=where if is_url(where) else Path(where))
        foreign = adopt_steps(module)  # one of another package has its own hooks
        listeners = foreign.listeners(cls.__name__, EVENTS) if foreign else find_listeners(module, "M", cls.__name__, EVENTS)
        for listener in listeners:
            if listener.event.name == "module_load_checkpoint":
                listener.binding.call(state)
    chosen = choose_weights(contents, weights, where)
    put_weights(module, chosen.weights, where, strict, read.step, chosen.kind)
    return module  # type: ignore[no-any-return]


def _arguments(cls: type[nn.Module], kept: dict[str, Any], overrides: dict[str, Any], where: str) -> dict[str, Any]:
    """What `__init__` takes of them; kept ones that it does not take are there for the log only."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    for name in overrides:
        if name not in named and not anything:
            raise OptionError(f"{cls.__name__}.__init__ has no argument {name!r}.{closest(name, named)} "
                              f"It has: {', '.join(named) or 'none'}.")  # fmt: skip
    known = {**kept, **overrides}
    missing = [name for name, each in named.items() if each.default is each.empty and name not in known]
    if missing:
        raise OptionError(f"{where} does not say what {cls.__name__} was made with: {', '.join(missing)}. Pass it "
                          f"(load_from_checkpoint(path, {missing[0]}=...)), or train with hooks=[HParams()].")  # fmt: skip
    return {name: value for name, value in known.items() if name in named or anything}
