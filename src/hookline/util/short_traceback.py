"""Tracebacks in a notebook without the frames of Hookline, so that the message is in view.

IPython shows an error by its method `_render_traceback_` if it has one. The traceback is shortened only while
it is shown: it stays complete for `%debug`, and for programs and terminals, which do not call this method.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from hookline.util.terminal import in_notebook

OWN = (str(Path(__file__).parents[1]) + os.sep, "<hookline ")
"""How the file names of Hookline's frames begin, generated code included."""
GLUE = tuple(f"{os.sep}{name}.py" for name in ("contextlib", "functools"))
"""Files of Python whose frames are left out between frames of Hookline."""
LIBRARY, SHELL = (f"{os.sep}{name}{os.sep}" for name in ("torch", "IPython"))
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
    notes: list[str] = getattr(error, "__notes__", [])
    once = [note.replace(f"Failed: {type(error).__name__}: {error}, ", "Failed ", 1) for note in notes]
    full = list(notes)
    with contextlib.ExitStack() as links:
        for cause in _causes(error):
            links.enter_context(_shortened(cause, is_own=True))
        links.enter_context(_shortened(error, is_own))
        try:
            notes[:] = once
            return list(show(type(error), error, error.__traceback__, tb_offset=0))
        finally:
            notes[:] = full


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    while (error := error.__cause__ or error.__context__) is not None and id(error) not in seen:  # type: ignore[assignment]
        seen.add(id(error))
        yield error


@contextlib.contextmanager
def _shortened(error: BaseException, is_own: bool) -> Iterator[None]:
    """Link the traceback of an error past the frames of Hookline, until the block ends."""
    trace = error.__traceback__
    frames = list(_frames(trace))
    kept = _choose(frames, [each.filename for each in traceback.extract_tb(trace)], is_own)
    try:
        for each, after in itertools.zip_longest(kept, kept[1:]):
            each.tb_next = after
        error.__traceback__ = kept[0] if kept else None
        yield
    finally:
        for each in frames:
            each.tb_next = None
        for each, after in itertools.pairwise(frames):
            each.tb_next = after
        error.__traceback__ = trace


def _choose(frames: list[TracebackType], files: list[str], is_own: bool) -> list[TracebackType]:
    """Return the frames to show: not those of Hookline and IPython, and of libraries between them.

    files: the file of each frame. The frame of Hookline that raised the error stays if it is the last one,
    except for an own error.
    """
    kept: list[TracebackType] = []
    between: list[TracebackType] = []  # frames of libraries that Hookline has called
    last: TracebackType | None = None
    for each, file in zip(frames, files, strict=True):
        if file.startswith(OWN) or SHELL in file:
            between, last = [], each
        elif last is not None and (file.endswith(GLUE) or LIBRARY in file):
            between.append(each)
        else:
            kept, between, last = [*kept, *between, each], [], None
    raised = [last] if last is not None and not is_own else []
    return [*kept, *raised, *between]


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
