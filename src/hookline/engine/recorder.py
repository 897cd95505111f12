"""Record the calls that a run makes. The recorder wraps the plan's slots while it is attached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hookline.engine.binding import Caller
from hookline.engine.events import RECEIVERS, Event
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a listener at an event."""

    receiver: str
    """'H', 'M', 'D' or 'S'."""
    name: str
    """The hook's name, or the class of the module, data module or strategy."""
    event: str
    epoch: int
    batch_idx: int
    step: int

    def __str__(self) -> str:
        who = f"hook {self.name}" if self.receiver == "H" else RECEIVERS[self.receiver]
        return f"{who}: {self.event}"


def _event_name(event: str, plan: Plan) -> str:
    """Return the name of an event or action that is given under any spelling, of any receiver."""
    found = (
        plan.table.find(spelling, receiver) for spelling in (event, f"on_{event}") for receiver in RECEIVERS
    )
    row = next((each for each in found if each is not None), None)
    return row.name if row is not None else plan.table.named(event).name


class Recorder:
    """Records every call of a listener, in order.

    >>> with Recorder(trainer) as recorder:
    ...     trainer.fit(module, loader)
    >>> recorder.events()
    ['setup', 'on_fit_start', ...]

    trainer: a Trainer or a Line. events: record only these; None: all.
    """

    def __init__(self, trainer: Any, events: Iterable[str] | None = None) -> None:
        self._plan: Plan = trainer.plan
        self._only = {_event_name(each, self._plan) for each in events} if events is not None else None
        self.calls: list[Call] = []

    def __enter__(self) -> Recorder:
        self._plan.attach(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._plan.detach(self)

    def events(self) -> list[str]:
        """Return the names of the events, with consecutive listeners of one event as one."""
        names = [call.event for call in self.calls]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot unchanged, because only the calls of listeners are recorded.

        event: the event. slot: the function that calls its listeners.
        """
        return slot

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Return a call that is recorded before it is made.

        listener: the listener. call: the function that calls it.
        """
        if self._only is not None and listener.event.name not in self._only:
            return call

        def recorded(s: Any) -> Any:
            self.calls.append(
                Call(listener.receiver, listener.name, listener.event.name, s.epoch, s.batch_idx, s.step)
            )
            return call(s)

        return recorded
