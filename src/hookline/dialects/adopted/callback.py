"""What the adapters of other packages' callbacks have in common."""

from __future__ import annotations

from typing import Any


class AdoptedCallback:
    """Stands for one callback among the hooks, with the attributes of a hook."""

    kind = ""
    name = ""
    tier = "user"
    order = after_module = None
    ranks = "all"
    on_error = "raise"

    def __init__(self, original: Any, packages: tuple[str, ...], base: str) -> None:
        self.original = original
        self.base = next(cls for cls in type(original).__mro__
                         if cls.__name__ == base and cls.__module__.partition(".")[0] in packages)  # fmt: skip

    def overrides(self, method: str) -> bool:
        """Whether the callback's class, or the instance itself (a LambdaCallback), has its own."""
        return method in vars(self.original) or getattr(type(self.original), method, None) is not getattr(self.base, method, None)
