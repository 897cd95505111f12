"""Where a run prints: a terminal or a notebook; rich, imported without a trace in the random numbers of a
run.
"""

from __future__ import annotations

import builtins
import logging
import random
import sys
from typing import TextIO


def load_rich() -> None:
    """Import rich before its first use. Its import draws from Python's random stream, which is restored."""
    if "rich.style" not in sys.modules:
        state = random.getstate()
        import rich.style  # noqa: F401

        random.setstate(state)


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this code."""
    shell = getattr(builtins, "get_ipython", None)  # IPython provides it while it runs code
    return shell is not None and type(shell()).__name__ != "TerminalInteractiveShell"


def place(file: str, line: int) -> str:
    """Return where code is: `file.py:12`, or for code that was entered in IPython the cell, as in its
    tracebacks: `Cell In[3], line 12`.
    """
    shell = getattr(builtins, "get_ipython", object)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = name_of(file) if name_of is not None else None
    return f"{file}:{line}" if cell is None else f"{' '.join(cell)}, line {line}"


def notice_file() -> TextIO:
    """Return the file for lines about a run that is well: stderr, or in a notebook stdout, because notebooks
    mark what is on stderr as an error.
    """
    return sys.stdout if in_notebook() else sys.stderr


def log_notice(log: logging.Logger, message: str, *args: object) -> None:
    """Log at level WARNING what a user should see and is not a problem.

    Without handlers Python prints it on stderr, which a notebook marks as an error, so it is printed here.
    """
    if in_notebook() and log.isEnabledFor(logging.WARNING) and not log.hasHandlers():
        print(message % args, flush=True)
    else:
        log.warning(message, *args, stacklevel=2)
