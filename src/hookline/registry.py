"""Built-in hooks by name. They are plug-ins: looked up when asked for, so that the trainer need not know them."""

from __future__ import annotations

import importlib
from typing import Any

from hookline.errors import HookError, closest

BUILTIN_HOOKS: dict[str, str] = {
    "progress_bar": "hookline.hooks.progress_bar:ProgressBar",
}


def builtin_hook(name: str) -> Any:
    """The class of a built-in hook."""
    if name not in BUILTIN_HOOKS:
        names = ", ".join(BUILTIN_HOOKS)
        raise HookError(f"There is no built-in hook {name!r}.{closest(name, BUILTIN_HOOKS)} There are: {names}.")
    module, _, attribute = BUILTIN_HOOKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
