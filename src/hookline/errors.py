"""What can go wrong, and the signals a hook may send on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final


class HooklineError(Exception):
    """Base of every error that Hookline raises about itself."""


class HookError(HooklineError):
    """A hook, module or strategy that cannot be bound: a wrong method name, parameter, order or name."""


class OptionError(HooklineError, ValueError):
    """A value or a combination of values that the trainer refuses."""


class LossError(HooklineError):
    """A training step returned something that cannot be trained on."""


class NonFiniteLoss(HooklineError, ArithmeticError):
    """The loss became NaN or infinite, and the run is told to stop on it."""


class HangError(HookError):
    """Something in a run did not come back in time, and the run was told to end then. No error policy passes over it."""


class PeerError(HooklineError):
    """Another rank of the run has failed, so that this one cannot go on."""


class CheckpointError(HooklineError):
    """A checkpoint that cannot be written or read."""


class StopTraining(Exception):
    """Raise it in any hook or step to end the run at the next batch boundary."""

    def __init__(self, reason: str = "StopTraining was raised") -> None:
        super().__init__(reason)
        self.reason = reason


class Preempted(SystemExit):
    """A signal has ended the run: it was saved, told and torn down. Left alone, the process exits with 128 + the signal."""

    def __init__(self, signal: int) -> None:
        super().__init__(128 + signal)
        self.signal = signal


class Signal:
    """A value a hook returns to steer the loop. There are exactly four, compared by identity."""

    __slots__ = ("name", "strength")

    def __init__(self, name: str, strength: int) -> None:
        self.name = name
        self.strength = strength

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # copies and pickles stay the same object


SKIP_BATCH: Final = Signal("SKIP_BATCH", 1)
"""Returned from on_train_batch_start: leave this batch out; it has no further events."""

END_EPOCH: Final = Signal("END_EPOCH", 2)
"""Returned from on_train_batch_start: this epoch is over; due validation and epoch-end events still run."""

SKIP_STEP: Final = Signal("SKIP_STEP", 1)
"""Returned from on_before_optimizer_step: do not update; on_step_skipped("hook") fires instead."""

STEP_DONE: Final = Signal("STEP_DONE", 2)
"""Returned from on_before_optimizer_step: the hook has made the update itself; it counts."""


def closest(name: str, allowed: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest allowed name, or an empty string."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""
