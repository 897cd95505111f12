"""What the adapters of other packages' callbacks have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SETTINGS: Mapping[str, Callable[[Any], bool]] = {
    "name": lambda given: isinstance(given, str),
    "tier": lambda given: isinstance(given, str),
    "order": lambda given: isinstance(given, int) and not isinstance(given, bool),
    "ranks": lambda given: isinstance(given, str | set | frozenset),
    "on_error": lambda given: isinstance(given, str),
}
"""What hooks of Hookline are told about themselves; a callback may have something else of this name for its
own use.
"""


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
        self.base = next(
            cls
            for cls in type(original).__mro__
            if cls.__name__ == base and cls.__module__.partition(".")[0] in packages
        )
        self.tier = self.usual_tier()
        for setting, is_ours in SETTINGS.items():
            given = self._set_on_original(setting)
            if is_ours(given):
                setattr(self, setting, given)

    def usual_tier(self) -> str:
        """Whom it is called among, if nobody says otherwise."""
        return "user"

    def _set_on_original(self, name: str) -> Any:
        """What the instance has of this name, or its classes down to the package's base."""
        classes = type(self.original).__mro__
        spaces = [vars(self.original), *(vars(cls) for cls in classes[: classes.index(self.base)])]
        return next((each[name] for each in spaces if name in each), None)

    def overrides(self, method: str) -> bool:
        """Whether the callback's class, or the instance itself (a LambdaCallback), has its own."""
        return method in vars(self.original) or getattr(type(self.original), method, None) is not getattr(
            self.base, method, None
        )

    def before_optimizers(self) -> None:
        """A checkpoint's optimizers are put back next."""
