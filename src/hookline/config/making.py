"""Hooks from their class paths."""

from __future__ import annotations

from typing import Any

from hookline.config.files import Source
from hookline.config.parts import Part, Place, check, make, parameters, resolve
from hookline.config.permissions import Permissions
from hookline.config.problems import nearest
from hookline.foreign import adopt, is_hook_class
from hookline.hook import FunctionHook, Hook
from hookline.registry import offered_hooks

SETTINGS = ("enabled", "on_error", "order", "ranks", "after_module", "budget", "over_budget")
"""What can be set of any hook, whatever its own parameters."""
HOOK = Place("a hook", (Hook,), home="hookline.hooks", settings=SETTINGS, adopts=is_hook_class)


def find_by_name(source: Source, part: Part) -> None:
    """A name instead of a class path becomes the path it stands for."""
    name, offered = part.class_path, offered_hooks()
    if "." in name or ":" in name:
        return
    paths = {
        **{path.partition(":")[2]: path for path in offered.values()},
        **offered,
    }  # `EarlyStopping` is clear as well
    if name not in paths:
        raise source.wrong(
            f"{part.key}.class_path",
            f"there is no hook called {name!r}.{nearest(name, offered, 'There are')} "
            "Or write a class path: 'package.module.Class'.",
            name,
        )
    part.class_path = paths[name].replace(":", ".")


def make_hooks(source: Source, parts: list[tuple[str, Part]], permissions: Permissions) -> dict[str, Any]:
    """Look up, check and make every hook; names that come twice are numbered."""
    made: dict[str, Any] = {}
    for wanted, part in parts:
        find_by_name(source, part)
        hook = _make(source, part, resolve(source, part, HOOK, permissions), permissions)
        if "name" in part.init_args and isinstance(vars(hook).get("name"), str):
            wanted = hook.name  # its class was told one
        name, number = wanted, 2
        while name in made:
            name, number = f"{wanted}_{number}", number + 1
        made[name] = hook
    return made


def _make(source: Source, part: Part, cls: Any, permissions: Permissions) -> Any:
    if not isinstance(cls, type):
        return FunctionHook(cls, cls.__hookline_on__)
    own = parameters(cls)
    for setting in SETTINGS:
        if setting in part.init_args and setting not in own:
            del part.init_args[setting]
    arguments = check(source, part, cls, HOOK, permissions)
    hook = make(
        source, part, lambda **given: adopt(cls(**given)), arguments
    )  # one of another package may be refused
    for setting, value in part.settings.items():
        if setting not in own and setting != "enabled":
            setattr(hook, setting, value)
    if not isinstance(part.settings.get("enabled", True), bool):
        raise source.wrong(f"{part.key}.enabled", "must be true or false.", part.settings["enabled"])
    return hook
