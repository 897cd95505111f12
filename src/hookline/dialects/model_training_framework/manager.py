"""`trainer.hook_manager`: the trainer's hooks under the names of the Model Training Framework."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from hookline.errors import HookError
from hookline.hooklist import Handle, HookList


class HookManager:
    """A view of the trainer's hooks: the user's run in the order they came, before the built-in ones, however
    late they come.
    """

    def __init__(self, hooks: HookList, on_error: str | None = None) -> None:
        self._hooks = hooks
        self._on_error = on_error
        """What the configuration says about failing hooks; None leaves each hook its own."""

    @property
    def hooks(self) -> list[Any]:
        """All hooks, in the order they were registered."""
        return list(self._hooks)

    def register_hook(self, hook: Any) -> Handle:
        """Add an instance, or a class that can be made without arguments; a hook of Hookline's own kind as
        well.
        """
        if isinstance(hook, str):
            raise HookError(
                f"register_hook({hook!r}) takes a hook. For a class path: "
                f"HooksConfig(hook_classes=[{hook!r}])."
            )
        if self._on_error is not None:
            hook = hook() if inspect.isclass(hook) else hook
            hook.on_error = self._on_error
        return self._hooks.add(hook)

    def register_hooks(self, hooks: Iterable[Any]) -> list[Handle]:
        """Add several."""
        return [self.register_hook(each) for each in hooks]

    def unregister_hook(self, hook: Any) -> None:
        """Take out a hook: the instance itself, or its name."""
        for entry in self._hooks.entries():
            if entry.given is hook or entry.name == hook:
                self._hooks.discard(entry)
                return
        known = ", ".join(each.name for each in self._hooks.entries()) or "none"
        raise HookError(f"unregister_hook({hook!r}): it is not registered. Registered: {known}.")

    def clear_hooks(self) -> None:
        """Take out all of them."""
        for entry in self._hooks.entries():
            self._hooks.discard(entry)
