"""What belongs to a module for a while, and not to copies of it."""

from __future__ import annotations

from typing import Any


class Uncopied:
    """Keeps something for a module that copies and pickles of the module do not take along: its run, say."""

    __slots__ = ("made", "value")

    def __init__(self, value: Any = None, made: Any = None) -> None:
        self.value = value
        self.made = made
        """When the module was made (`seeding.Creation`); not known of a copy."""

    def __deepcopy__(self, memo: Any) -> Uncopied:
        return Uncopied()

    def __reduce__(self) -> tuple[type[Uncopied], tuple[()]]:
        return Uncopied, ()
