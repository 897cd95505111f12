"""Choose names of parameters and modules by patterns."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from hookline.engine.checks import refused
from hookline.util.errors import HookError, closest


def as_patterns(what: str, given: Any) -> tuple[str, ...]:
    """Return one or several patterns as a tuple, or raise."""
    patterns = (
        (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple | set) else ()
    )
    if not patterns or not all(isinstance(each, str) and each for each in patterns):
        raise refused(
            what, given, "a name, a part of one, a pattern such as 'blocks.*.mlp', or a list of these"
        )
    return patterns


def is_match(name: str, pattern: str) -> bool:
    """Return whether a name matches: a pattern with `*`, `?` or `[` as a whole, plain text in any part."""
    return fnmatchcase(name, pattern) if any(each in pattern for each in "*?[") else pattern in name


def choose(what: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that match a pattern. Raise with the closest name if a pattern matches none."""
    names = list(names)
    for pattern in patterns:
        if not any(is_match(name, pattern) for name in names):
            raise HookError(
                f"{what}: {pattern!r} matches nothing.{closest(pattern, names)} Names: "
                f"{listed(names, 8) or 'none'}."
            )
    return [name for name in names if any(is_match(name, pattern) for pattern in patterns)]


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return `a, b and 3 more`."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
