"""Choose layers of a model by a name pattern, a class name, a class, or a function of name and module.

FSDP chooses the layers that it gathers one at a time, activation checkpointing those that it recomputes, and
regional compile those that it compiles.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hookline.util.errors import OptionError, closest

LayerChoice = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A name pattern (`layers.*`), a class name, a class, or a function of name and module."""


def default_layers(module: nn.Module) -> list[nn.Module]:
    """Return the items of every ModuleList, where models keep their blocks, outermost first."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    return list(
        dict.fromkeys(item for each in lists for item in each if any(True for _ in item.parameters()))
    )


def choose_layers(option: str, choices: Sequence[Any], module: nn.Module) -> list[nn.Module]:
    """Return the submodules that match a choice, outermost first. Raise for a choice that matches none."""
    named = [(name, each) for name, each in module.named_modules() if name]
    found: dict[int, nn.Module] = {}
    for choice in choices:
        hits = [each for name, each in named if _is_chosen(choice, name, each)]
        if not hits:
            known = [*dict.fromkeys([name for name, _ in named] + [type(each).__name__ for _, each in named])]
            near = closest(choice, known) if isinstance(choice, str) else ""
            raise OptionError(
                f"{option}={choice!r} names no part of {type(module).__name__}.{near} "
                f"Its parts: {', '.join(name for name, _ in named[:12])}.",
                option=option.rpartition(": ")[2],
                value=choice,
            )
        found.update((id(each), each) for each in hits)
    return [each for _, each in named if id(each) in found]


def outermost(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that are not inside another one of them."""
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [each for each in layers if id(each) not in inner]


def _is_chosen(choice: Any, name: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        return fnmatch.fnmatchcase(name, choice) or type(module).__name__ == choice
    if isinstance(choice, type):
        return isinstance(module, choice)
    return bool(choice(name, module))
