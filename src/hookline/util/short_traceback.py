"""Tracebacks in a notebook without the frames of Hookline, so that the message is in view.

IPython shows an error by its method `_render_traceback_` if it has one. The traceback of the error itself
stays complete: for `%debug`, and for programs and terminals, which do not call this method.
"""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from hookline.util.terminal import in_notebook

OWN = (str(Path(__file__).parents[1]) + os.sep, "<hookline ")
"""How the file names of Hookline's frames begin, generated code included."""
GLUE = tuple(f"{os.sep}{name}.py" for name in ("contextlib", "functools"))
"""Files of Python whose frames are left out between frames of Hookline."""
KEEP_ALL = "HOOKLINE_FULL_TRACEBACK"


def shorten_in_notebook(error: BaseException) -> None:
    """Make a notebook show an error of the user's code without the frames of Hookline."""
    if in_notebook() and not hasattr(error, "_render_traceback_"):
        with contextlib.suppress(AttributeError):  # an exception with slots
            error._render_traceback_ = lambda: render(error)  # type: ignore[attr-defined]


def render(error: BaseException, is_own: bool = False) -> list[str]:
    """Return the text that IPython shows for an error. is_own: whether Hookline raises it about itself."""
    show = builtins.get_ipython().InteractiveTB.structured_traceback  # type: ignore[attr-defined]
    if not in_notebook() or os.environ.get(KEEP_ALL, "0") not in ("", "0"):
        return list(show(type(error), error, error.__traceback__, tb_offset=1))
    for cause in _causes(error):
        cause.__traceback__ = _shortened(cause.__traceback__, is_own=True)
    notes: list[str] = getattr(error, "__notes__", [])
    once = [note.replace(f"Failed: {type(error).__name__}: {error}, ", "Failed ", 1) for note in notes]
    full = list(notes)
    try:
        notes[:] = once
        return list(show(type(error), error, _shortened(error.__traceback__, is_own), tb_offset=0))
    finally:
        notes[:] = full


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    while (error := error.__cause__ or error.__context__) is not None and id(error) not in seen:  # type: ignore[assignment]
        seen.add(id(error))
        yield error


def _shortened(trace: TracebackType | None, is_own: bool) -> TracebackType | None:
    """Return a traceback without frames of Hookline and IPython, and those of libraries between them.

    The frame of Hookline that raised the error stays if it is the last one, except for an own error.
    """
    kept: list[TracebackType] = []
    between: list[TracebackType] = []  # frames of libraries that Hookline has called
    last: TracebackType | None = None
    for each in _frames(trace):
        file = each.tb_frame.f_code.co_filename
        if file.startswith(OWN) or _is_of(each, "IPython"):
            between, last = [], each
        elif last is not None and (file.endswith(GLUE) or _is_of(each, "torch")):
            between.append(each)
        else:
            kept, between, last = [*kept, *between, each], [], None
    if last is not None and not is_own:
        kept.append(last)
    shortened: TracebackType | None = None
    for each in reversed([*kept, *between]):
        shortened = TracebackType(shortened, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shortened


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_of(trace: TracebackType, package: str) -> bool:
    module: Any = trace.tb_frame.f_globals.get("__name__", "")
    return str(module).partition(".")[0] == package
