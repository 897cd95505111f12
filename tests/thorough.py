"""Combinations that a change rarely tells apart: `python3 dev.py thorough` tries all of them, the default suite some."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
THOROUGH = "HOOKLINE_TEST_THOROUGH" in os.environ


def some(few: Iterable[Case], more: Iterable[Case]) -> list[Case]:
    """Return the first cases, and in a thorough run also the others."""
    return [*few, *(more if THOROUGH else ())]
