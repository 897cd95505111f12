"""Errands: what one rank, or another thread, wants the whole run to do at the next batch boundary.

How to use them:
    @carries_out("disable")                               # once, at import: says what an errand of this kind
    does def disable(run: Any, sender: int, name: str) -> None:  # on the main thread of every rank, at one
    and the same boundary
        run.state.hooks.disable(name)

    run.errands.send("disable", name="gradient_monitor")  # any thread, any rank; the facts must be plain
    (JSON) data

The order is that of sending, rank by rank. What a function here raises ends the run like the error of a hook,
so it catches what should not. An errand comes before the boundary's save point and its look at whether to
stop: asking for a checkpoint or a stop takes effect there. Boundaries are after every training batch (after
the validation that is due there), after an epoch's end, and when training ends; `Errands.left` says what came
too late.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hookline.util.errors import HooklineError, Signal, closest

F = TypeVar("F", bound=Callable[..., None])
Errand = tuple[str, dict[str, Any]]
"""A kind and its facts."""

_CARRIERS: dict[str, Callable[..., None]] = {}


def carries_out(kind: str) -> Callable[[F], F]:
    """Mark the function that carries out errands of this kind: it gets the run, the sender's rank and the
    facts by name.
    """

    def register(function: F) -> F:
        known = _CARRIERS.setdefault(kind, function)
        if known is not function:
            raise HooklineError(
                f"Errands of the kind {kind!r} are carried out by {known.__module__}.{known.__name__} "
                f"already."
            )
        return function

    return register


class Errands:
    """What is waiting to be carried out."""

    __slots__ = ("_box", "_lock", "waiting")

    def __init__(self) -> None:
        self._box: list[Errand] = []
        self._lock = threading.Lock()
        self.waiting = False
        """What the loop looks at after every batch."""

    def send(self, kind: str, **facts: Any) -> None:
        """Have it carried out at the next boundary, by all ranks."""
        if kind not in _CARRIERS:
            raise HooklineError(
                f"Nobody carries out errands of the kind {kind!r}.{closest(kind, _CARRIERS)} "
                f"Kinds: {', '.join(sorted(_CARRIERS))}."
            )
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise HooklineError(
                f"The facts of an errand travel to the other ranks as JSON; those of {kind!r} cannot: "
                f"{error}."
            ) from None
        with self._lock:
            self._box.append((kind, facts))
            self.waiting = True

    def left(self) -> list[Errand]:
        """Take out all that is waiting."""
        with self._lock:
            taken, self._box = self._box, []
            self.waiting = False
        return taken


def do_errands(run: Any, errands: list[Errand], sender: int = 0) -> None:
    """Carry them out, in their order."""
    for kind, facts in errands:
        _CARRIERS[kind](run, sender, **facts)


# ---- The boundary between two batches


class Boundary:
    """The boundary of a run in one process."""

    waits_for_signals = True
    """Whether a hook's signal takes effect at the batch that it is returned for."""

    asks = 0
    """How often the ranks of this run have exchanged what is new."""

    def __init__(self, run: Any) -> None:
        self.run = run

    @property
    def is_stopping(self) -> bool:
        """Whether the run is to stop."""
        return bool(self.run.state.should_stop)

    @property
    def signal_filters(self) -> tuple[Callable[[Signal | None], Signal | None], ...]:
        """What becomes of the signal that hooks return before an update."""
        return ()

    def after_batch(self) -> None:
        """Carry out the commands that were sent."""
        if self.run.participants.errands.waiting:
            do_errands(self.run, self.run.participants.errands.left())

    def settle(self) -> None:
        """Do the same between epochs, and at the beginning and the end of training."""
        self.after_batch()

    def stop_by_clock(self) -> None:
        """Stop because the time is over."""
