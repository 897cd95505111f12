"""The hooks of a configuration: a mapping of names, so that one can be overridden from the command line."""

from __future__ import annotations

from typing import Any

from hookline.config.files import Source, named
from hookline.config.hooks_config import HooksConfig, switch_names
from hookline.config.making import HOOK, SETTINGS, find_by_name
from hookline.config.parts import Part, read_part
from hookline.config.problems import ConfigError, Override, below, nearest, plain
from hookline.errors import OptionError, closest
from hookline.registry import offered_hooks


def read_hooks(source: Source, given: Any) -> list[tuple[str, Part]]:
    """From a mapping of names, a list of class paths, the switches of `HooksConfig`, or a mixture; nothing is
    imported.
    """
    given = named(given.guess if isinstance(given, Override) else given)
    if given is None or given is False:
        return []
    if not isinstance(given, dict):
        raise source.wrong("hooks", "must be a table of named hooks, or a list of class paths.", given)
    found: list[tuple[str, Part]] = []
    switches: dict[str, Any] = {}
    for name, value in given.items():
        if name in switch_names():
            switches[name] = plain(value)
        elif not _is_off(value):
            found.append((name, _read(source, name, value)))
    return [*found, *_switched(source, switches)]


def _is_off(value: Any) -> bool:
    return (value.guess if isinstance(value, Override) else value) is False


def _read(source: Source, name: str, value: Any) -> Part:
    key, offered = f"hooks.{name}", offered_hooks()
    guess = value.guess if isinstance(value, Override) else value
    if guess is True and name in offered:
        value = {}
    elif not isinstance(guess, str | dict):
        known = [*switch_names(), *offered]
        raise source.wrong(
            key,
            "must be a class path, a hook's name, a table with class_path, or false to leave it out."
            f"{closest(name, known)}",
            value,
        )
    only_typed = isinstance(value, dict) and all(
        each in source.typed for each in (f"{key}.{inner}" for inner in value)
    )
    if only_typed and value and "class_path" not in value:
        there = [each for each in source.values.get("hooks", {}) if each != name]
        raise source.wrong(
            key,
            f"there is no hook of this name in {source.name}.{nearest(name, there, 'Hooks')} "
            f"To add one: --hook NAME, or --{key}.class_path PATH.",
        )
    part = read_part(source, key, value, HOOK, default_path=name if name in offered else "")
    find_by_name(source, part)
    for setting in SETTINGS:
        if setting in part.init_args:
            part.settings[setting] = plain(part.init_args[setting])
    return part


def _switched(source: Source, switches: dict[str, Any]) -> list[tuple[str, Part]]:
    if not switches:
        return []
    try:
        return HooksConfig(**switches).parts()
    except ConfigError:
        raise
    except OptionError as error:
        raise source.refused(below("hooks", error), error) from None
