"""Commands: requests of one rank, or of another thread, that all ranks execute at the next batch boundary.

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
  epoch, and when training ends. `CommandQueue.left` returns the commands that came too late.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hookline.run.save_request import RollbackRequest
from hookline.util.errors import HooklineError, Signal, closest

F = TypeVar("F", bound=Callable[..., None])
RunCommand = tuple[str, dict[str, Any]]
"""The kind of a command and its arguments."""

_HANDLERS: dict[str, Callable[..., None]] = {}


def handles_command(kind: str) -> Callable[[F], F]:
    """Register the handler of a kind of command. It gets the run, the sender's rank and the arguments."""

    def register(function: F) -> F:
        known = _HANDLERS.setdefault(kind, function)
        if known is not function:
            raise HooklineError(
                f"Commands of the kind {kind!r} already have the handler {known.__module__}.{known.__name__}."
            )
        return function

    return register


class CommandQueue:
    """A queue of commands that wait for the next boundary."""

    __slots__ = ("_commands", "_lock", "waiting")

    def __init__(self) -> None:
        self._commands: list[RunCommand] = []
        self._lock = threading.Lock()
        self.waiting = False
        """Whether there are commands; the loop reads it after every batch."""

    def send(self, kind: str, **facts: Any) -> None:
        """Send a command to all ranks, which execute it at the next boundary."""
        if kind not in _HANDLERS:
            raise HooklineError(
                f"{kind!r} is not a kind of command: it has no handler.{closest(kind, _HANDLERS)} "
                f"Kinds: {', '.join(sorted(_HANDLERS))}."
            )
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise HooklineError(
                f"The arguments of a command are sent to the other ranks as JSON; those of {kind!r} are not "
                f"plain data: {error}."
            ) from None
        with self._lock:
            self._commands.append((kind, facts))
            self.waiting = True

    def left(self) -> list[RunCommand]:
        """Remove and return all waiting commands."""
        with self._lock:
            taken, self._commands = self._commands, []
            self.waiting = False
        return taken


def run_commands(run: Any, commands: list[RunCommand], sender: int = 0) -> None:
    """Execute commands in their order."""
    for kind, facts in commands:
        _HANDLERS[kind](run, sender, **facts)


# ---- The boundary between two batches


class Boundary:
    """The boundary of a run in one process."""

    waits_for_signals = True
    """Whether a hook's signal takes effect at the batch that it is returned for."""

    polls = 0
    """How often the ranks of this run have synchronized."""

    def __init__(self, run: Any) -> None:
        self.run = run

    @property
    def is_stopping(self) -> bool:
        """Whether the run will stop."""
        return bool(self.run.state.should_stop)

    @property
    def signal_filters(self) -> tuple[Callable[[Signal | None], Signal | None], ...]:
        """The functions that the signal of hooks before an update goes through."""
        return ()

    def poll(self) -> None:
        """Execute the commands that were sent."""
        if self.run.participants.commands.waiting:
            run_commands(self.run, self.run.participants.commands.left())

    def sync_point(self) -> None:
        """Do the same as `poll` between epochs, and at the beginning and end of training."""
        self.poll()

    def stop_by_clock(self) -> None:
        """Stop the run because `max_time` is over; with one process the loop does it."""

    def request_rollback(self, request: RollbackRequest) -> None:
        """Go back to a checkpoint at the next boundary. The first request counts."""
        self.run.resume.request_rollback(request)
