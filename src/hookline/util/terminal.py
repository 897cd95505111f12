"""rich, imported without a trace in the random numbers of a run."""

from __future__ import annotations

import random
import sys


def load_rich() -> None:
    """Import rich before its first use. Its import draws from Python's random stream, which is restored."""
    if "rich.style" not in sys.modules:
        state = random.getstate()
        import rich.style  # noqa: F401

        random.setstate(state)
