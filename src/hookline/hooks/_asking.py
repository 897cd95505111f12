"""Functions that ask for facts by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from hookline.errors import OptionError, closest


def facts_asked(function: Callable[..., Any], what: str, facts: Collection[str]) -> list[str]:
    """The names of the facts it asks for. A parameter that is none of them keeps its default, and without one
    is refused.
    """
    parameters = inspect.signature(function).parameters.values()
    asked = [each.name for each in parameters if each.name in facts or each.default is each.empty]
    for name in asked:
        if name not in facts:
            raise OptionError(
                f"{what} asks for {name!r}.{closest(name, facts)} It may ask for {', '.join(facts)}."
            )
    return asked
