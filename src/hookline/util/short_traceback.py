"""Tracebacks in a notebook without the frames of Hookline, so that the message is in view.

IPython shows an error by its method `_render_traceback_` if it has one. The traceback of the error itself
stays complete: for `%debug`, and for programs and terminals, which do not call this method.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from hookline.util.terminal import in_notebook
from hookline.util.text import linked_errors

OWN = (str(Path(__file__).parents[1]) + os.sep, "<hookline ")
"""How the file names of Hookline's frames begin, generated code included."""
GLUE = tuple(f"{os.sep}{name}.py" for name in ("contextlib", "functools"))
"""Files of Python whose frames are left out between frames of Hookline."""
OF_DATACLASS = ("<string>", "__init__")
"""The file and the name of the method that `dataclass` generates."""
IPYTHON, TORCH = (f"{os.sep}{name}{os.sep}" for name in ("IPython", "torch"))
"""Folders in the file names of IPython's and torch's frames."""
KEEP_ALL = "HOOKLINE_FULL_TRACEBACK"


def shorten_in_notebook(error: BaseException) -> None:
    """Make a notebook show an error of the user's code, or an interrupt, without the frames of Hookline."""
    if in_notebook() and not hasattr(error, "_render_traceback_"):
        with contextlib.suppress(AttributeError):  # an exception with slots
            # of an interrupt, the line of Hookline that it hit says nothing
            is_own = isinstance(error, KeyboardInterrupt)
            error._render_traceback_ = lambda: render(error, is_own)  # type: ignore[attr-defined]


def keeps_all() -> bool:
    """Return whether the user wants all tracebacks, and all of each."""
    return os.environ.get(KEEP_ALL, "0") not in ("", "0")


def render(error: BaseException, is_own: bool = False) -> list[str]:
    """Return the text that IPython shows for an error. is_own: whether Hookline raises it about itself."""
    show = builtins.get_ipython().InteractiveTB.structured_traceback  # type: ignore[attr-defined]
    if not in_notebook() or keeps_all():
        return list(show(type(error), error, error.__traceback__, tb_offset=1))
    notes: list[str] = getattr(error, "__notes__", [])
    full = list(notes)
    with contextlib.ExitStack() as restored:
        for each in linked_errors(error, "__cause__", "__context__"):
            restored.enter_context(_shortened(each, is_own or each is not error))
        notes[:] = [_without_message(note, error) for note in full]
        try:
            return list(show(type(error), error, error.__traceback__, tb_offset=0))
        finally:
            notes[:] = full


def _without_message(note: str, error: BaseException) -> str:
    """Return the summary of a failed run without the message of the error, which is shown right above it."""
    kind, message = f"Failed: {type(error).__name__}: ", " ".join(str(error).split())
    text = note.removeprefix(kind)
    # the place follows a comma; the message may have commas, too
    ends = [each.end() for each in re.finditer("…?, ", text) if message.startswith(text[: each.start()])]
    return f"Failed {text[ends[-1] :]}" if text != note and ends else note


@contextlib.contextmanager
def _shortened(error: BaseException, is_own: bool) -> Iterator[None]:
    """Leave frames of Hookline and IPython, and those of libraries between them, out of an error's traceback.

    The frame of Hookline that raised the error stays if it is the last one, except for an own error.
    """
    trace = error.__traceback__
    frames = list(_frames(trace))
    kept: list[TracebackType] = []
    between: list[TracebackType] = []  # frames of libraries that Hookline has called
    last: TracebackType | None = None
    for each, entry in zip(frames, traceback.extract_tb(trace), strict=False):
        if entry.filename.startswith(OWN) or IPYTHON in entry.filename:
            between, last = [], each
        elif last is not None and (
            entry.filename.endswith(GLUE)
            or TORCH in entry.filename
            or (entry.filename, entry.name) == OF_DATACLASS
        ):
            between.append(each)
        else:
            kept, between, last = [*kept, *between, each], [], None
    kept += [*([last] if last is not None and not is_own else []), *between]
    _link(kept)
    error.__traceback__ = kept[0] if kept else None
    try:
        yield
    finally:
        _link(frames)
        error.__traceback__ = trace


def _link(frames: list[TracebackType]) -> None:
    """Make a traceback of these frames."""
    for each in frames:
        each.tb_next = None
    for each, following in itertools.pairwise(frames):
        each.tb_next = following


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
