"""Hooks by name: the built-in ones, and those that installed packages offer. Looked up when asked for.

They are plug-ins, so that the trainer need not know them and nothing is imported that is not used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from hookline.errors import HookError, closest

GROUP = "hookline.hooks"
"""The entry-point group under which a package offers hooks. They are listed, never switched on by themselves."""

BUILTIN_HOOKS: dict[str, str] = {
    "progress_bar": "hookline.hooks.progress_bar:ProgressBar",
}


def offered_hooks() -> dict[str, str]:
    """Every hook that can be asked for by name, with the path of its class; built-in names cannot be taken over."""
    offered = {each.name: each.value for each in importlib.metadata.entry_points(group=GROUP)}
    return {**offered, **BUILTIN_HOOKS}


def hook_class(name: str) -> Any:
    """The class behind a name."""
    known = BUILTIN_HOOKS if name in BUILTIN_HOOKS else offered_hooks()
    if name not in known:
        raise HookError(f"There is no hook called {name!r}.{closest(name, known)} There are: {', '.join(known)}.")
    module, _, attribute = known[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
