"""Rejects configuration keys that do not exist, or that Hookline replaces, with the right ones; none is
ignored.
"""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass
from typing import Any, Self

from hookline.util.errors import OptionError, closest


class Settings:
    """The base of the configuration's data classes: an unknown key is an error with the nearest right one."""

    __slots__ = ()

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Check the keys before the data class does."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        for key in given:
            if key not in known:
                raise OptionError(
                    f"{cls.__name__} has no {key!r}.{closest(key, known)} It has: {', '.join(known)}."
                )
        return super().__new__(cls)


def replaced(instead: str) -> Any:
    """Return a field that must keep its default; the error for any other value names the alternative."""
    return field(default=None, metadata={"instead": instead})


def refuse_replaced(config: Any, where: str = "") -> None:
    """Reject such fields in the whole configuration."""
    for each in fields(config):
        value, key = getattr(config, each.name), f"{where}{each.name}"
        if is_dataclass(value):
            refuse_replaced(value, f"{key}.")
        elif value is not None and "instead" in each.metadata:
            raise OptionError(
                f"{key}={value!r} is not taken here: {each.metadata['instead']}.", option=key, value=value
            )
