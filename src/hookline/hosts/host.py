"""What a host of hooks can tell them, as a table, and the list of hooks that holds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.asking import asked_of
from hookline.errors import HookError, closest
from hookline.events import EVENTS, Event
from hookline.hook import Hook
from hookline.hooklist import Entry, HookList
from hookline.listener import Listener

TRAINERS = ("trainer", "state.trainer")
"""How hooks write it."""


def _is_ours(cls: type) -> bool:
    return "__hookline_base__" in vars(cls)


@dataclass(frozen=True, slots=True)
class Host:
    """A training loop that is not Hookline's own, seen by hooks.

    Every event that hooks can hear is offered, or never comes about here (listening to it is no mistake), or
    is lacking: then a hook that listens to it is refused when it is added.
    """

    name: str
    """How messages call it: `Lightning's Trainer`."""
    offers: Mapping[str, str]
    """Event -> what tells of it: a method of the host's own callbacks, or a call of `Line`."""
    lacks: Mapping[str, str]
    """Event -> why this host cannot tell of it."""
    useless: Mapping[str, str] = field(default_factory=dict)
    """Built-in hook -> why it can do nothing here, though it hears everything that it listens to."""

    def why_lacking(self, event: Event) -> str:
        """Why a hook cannot listen to this event here; an empty string if it can."""
        if event.inside == "own":
            return "events of your own are fired by `Trainer.emit`, which is not there"
        return self.lacks.get(event.name, "")


class HostedHooks(HookList):
    """The hooks of a host: what it cannot tell or give is refused when a hook is added that needs it."""

    def __init__(self, plan: Any, host: Host, rank: int, offered: frozenset[str]) -> None:
        """offered: the attributes of what hooks see as `trainer`."""
        self.host = host
        self._offered = offered
        super().__init__(plan, EVENTS, rank)

    def move_to(self, rank: int) -> None:
        """This process turns out to be another rank than the launcher has said: other hooks
        are heard here.
        """
        if rank == self._rank:
            return
        self._rank = rank
        for entry in self.entries():
            self._plan.remove(entry.listeners)
            if entry.enabled:
                self._plan.add(self._here(entry))

    def _listeners(self, entry: Entry) -> list[Listener]:
        listeners = super()._listeners(entry)
        who = f"hook {entry.name!r} ({type(entry.given).__name__})"
        for cls in type(entry.given).__mro__:
            if cls.__name__ in self.host.useless and cls.__module__.startswith("hookline.hooks."):
                raise HookError(
                    f"{who} can do nothing in {self.host.name}: {self.host.useless[cls.__name__]}."
                )
        for listener in listeners:
            self._refuse(who, listener)
        for attribute, where in (
            asked_of(TRAINERS, entry.hook, _is_ours) if isinstance(entry.hook, Hook) else ()
        ):
            if attribute not in self._offered:
                raise HookError(
                    f"{who} needs trainer.{attribute} in {where}, which {self.host.name} has not got for "
                    f"hooks.{closest(attribute, self._offered)}"
                )
        return listeners

    def _refuse(self, who: str, listener: Listener) -> None:
        if reason := self.host.why_lacking(listener.event):
            raise HookError(
                f"{who} listens to {listener.event.name}, which {self.host.name} cannot tell: {reason}."
            )
