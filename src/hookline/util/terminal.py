"""Where a run prints: a terminal or a notebook; rich, imported without a trace in the random numbers of a
run.
"""

from __future__ import annotations

import builtins
import random
import sys
from typing import TextIO


def load_rich() -> None:
    """Import rich before its first use. Its import draws from Python's random stream, which is restored."""
    if "rich.style" not in sys.modules:
        state = random.getstate()
        import rich.style  # noqa: F401

        random.setstate(state)


def is_notebook() -> bool:
    """Return whether the program runs in a notebook, and not in a terminal."""
    shell = getattr(builtins, "get_ipython", None)  # IPython provides it while it runs code
    return shell is not None and type(shell()).__name__ != "TerminalInteractiveShell"


def notice_file() -> TextIO:
    """Return the file for lines about a run that is well: stderr, or in a notebook stdout, because notebooks
    mark what is on stderr as an error.
    """
    return sys.stdout if is_notebook() else sys.stderr
