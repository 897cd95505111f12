"""Processes for these tests, which begin with the packages of `packages.py` imported."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]

IMPORTED = {"PRELOAD": "interop.packages", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
"""Variables of a process. Processes that have the same values get the same server (`preloaded.py`)."""


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a process that also finds what is in the folder of the tests."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **IMPORTED, **more}
