"""A value that belongs to a module for a while, and not to copies of it."""

from __future__ import annotations

from typing import Any


class Uncopied:
    """Holds a value, such as its run, for a module; copies and pickles of the module do not get it."""

    __slots__ = ("made", "value")

    def __init__(self, value: Any = None, made: Any = None) -> None:
        self.value = value
        self.made = made
        """When the module was created (`seeding.Creation`); not known for a copy."""

    def __deepcopy__(self, memo: Any) -> Uncopied:
        return Uncopied()

    def __reduce__(self) -> tuple[type[Uncopied], tuple[()]]:
        return Uncopied, ()
