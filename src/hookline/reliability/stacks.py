"""The stack of a thread as lines of text, and whether it waits for other ranks."""

from __future__ import annotations

import os
import sys

import torch

import hookline.distributed.comm
from hookline.distributed.comm import Answer

StackLine = tuple[str, int, str]
"""File, line number and the name of a function."""

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WAITING = tuple(
    _TORCH + os.path.join(*each) + os.sep for each in (("distributed",), ("autograd",), ("nn", "parallel"))
)
_RANKS = os.path.abspath(hookline.distributed.comm.__file__)
_WAIT = Answer.wait.__code__.co_qualname


def stack_of(thread: int) -> list[StackLine]:
    """Return the stack of a thread, innermost first. Frames are not kept, because they keep tensors alive."""
    lines: list[StackLine] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return lines


def waits_for_ranks(stack: list[StackLine], backward: bool = True) -> bool:
    """Return whether torch or Hookline communicates with other ranks at the top of a stack.

    A backward averages gradients; `backward=False` leaves it out. The stack is the only sign, because
    collectives of torch and of the user publish nothing when they begin. `Answer.wait` may be anywhere on the
    stack, because it calls a function of its caller that reports the wait.
    """
    if any(name == _WAIT and file == _RANKS for file, _, name in stack):
        return True
    waiting = (*_WAITING, _RANKS) if backward else (_WAITING[0], _RANKS)
    # below the frames of other parts of torch
    tops = (
        file for file, _, _ in stack if file.startswith(waiting) or not file.startswith((_TORCH, "<frozen"))
    )
    return next(tops, "").startswith(waiting)
