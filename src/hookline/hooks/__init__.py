"""Built-in hooks, one per file.

`from hookline.hooks import EarlyStopping` loads only that one. May import: util, engine, metrics, loggers,
distributed, data, run.
"""

from __future__ import annotations

from typing import Any

from hookline.engine.registry import BUILTIN_HOOKS, hook_class, import_instead

_NAMES = {path.partition(":")[2]: name for name, path in BUILTIN_HOOKS.items()}

__all__ = sorted(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll] - the registry lists them, `__getattr__` loads them


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(
            f"module 'hookline.hooks' has no attribute {name!r}{import_instead(__name__, name)}"
        )
    return hook_class(_NAMES[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
