"""Commands: what one rank, or another thread, asks the whole run to do at the next batch boundary.

    @handles_command("disable")
    def disable(run: Any, sender: int, name: str) -> None:
        run.state.hooks.disable(name)

    run.participants.commands.send("disable", name="gradient_monitor")

- A handler is registered once, at import. It runs on the main thread of every rank, at the same boundary.
- `send` can be called from any thread and any rank. The arguments must be plain JSON data.
- Commands run in the order of sending, rank by rank.
- An exception in a handler ends the run like an error of a hook.
- Commands run before the boundary's save point and its check for a stop, so a request for a checkpoint or a
  stop takes effect there.
- Boundaries are after every training batch (after the validation that is due there), after the end of an
  epoch, and when training ends. `CommandQueue.left` returns what came too late.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hookline.util.errors import HooklineError, Signal, closest

F = TypeVar("F", bound=Callable[..., None])
RunCommand = tuple[str, dict[str, Any]]
"""A kind and its facts."""

_HANDLERS: dict[str, Callable[..., None]] = {}


def handles_command(kind: str) -> Callable[[F], F]:
    """Mark the function that carries out commands of this kind: it gets the run, the sender's rank and the
    facts by name.
    """

    def register(function: F) -> F:
        known = _HANDLERS.setdefault(kind, function)
        if known is not function:
            raise HooklineError(
                f"Commands of the kind {kind!r} are carried out by {known.__module__}.{known.__name__} "
                f"already."
            )
        return function

    return register


class CommandQueue:
    """What is waiting to be carried out."""

    __slots__ = ("_box", "_lock", "waiting")

    def __init__(self) -> None:
        self._box: list[RunCommand] = []
        self._lock = threading.Lock()
        self.waiting = False
        """What the loop looks at after every batch."""

    def send(self, kind: str, **facts: Any) -> None:
        """Have it carried out at the next boundary, by all ranks."""
        if kind not in _HANDLERS:
            raise HooklineError(
                f"Nobody carries out commands of the kind {kind!r}.{closest(kind, _HANDLERS)} "
                f"Kinds: {', '.join(sorted(_HANDLERS))}."
            )
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise HooklineError(
                f"The facts of a command travel to the other ranks as JSON; those of {kind!r} cannot: "
                f"{error}."
            ) from None
        with self._lock:
            self._box.append((kind, facts))
            self.waiting = True

    def left(self) -> list[RunCommand]:
        """Take out all that is waiting."""
        with self._lock:
            taken, self._box = self._box, []
            self.waiting = False
        return taken


def run_commands(run: Any, commands: list[RunCommand], sender: int = 0) -> None:
    """Carry them out, in their order."""
    for kind, facts in commands:
        _HANDLERS[kind](run, sender, **facts)


# ---- The boundary between two batches


class Boundary:
    """The boundary of a run in one process."""

    waits_for_signals = True
    """Whether a hook's signal takes effect at the batch that it is returned for."""

    polls = 0
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

    def poll(self) -> None:
        """Carry out the commands that were sent."""
        if self.run.participants.commands.waiting:
            run_commands(self.run, self.run.participants.commands.left())

    def sync_point(self) -> None:
        """Do the same between epochs, and at the beginning and the end of training."""
        self.poll()

    def stop_by_clock(self) -> None:
        """Stop because the time is over."""
