"""Hooks that come late to a hosted run, or leave it early."""

from __future__ import annotations

from typing import Any

from hookline.foreign import HookAdapter
from hookline.hooklist import Entry
from hookline.listener import Listener
from hookline.plan import Plan
from hookline.state import State


class LateGuests:
    """Greets hooks that are added in the middle of a run and sees off those that are removed."""

    def __init__(self, plan: Plan, state: State) -> None:
        self.plan = plan
        self.state = state
        self.leaving: list[Listener] = []
        """Teardowns that are due at the next batch boundary."""

    def start(self, entry: Entry) -> None:
        """Its accounts and schedules begin now."""
        if isinstance(entry.hook, HookAdapter):
            entry.hook.begin_run(self.state)
        for listener in entry.listeners:
            listener.account.clear()
            for each in listener.filters:
                each.begin(self.state)

    def welcome(self, entry: Entry) -> None:
        """It gets its set-up at once, no start events."""
        key = ("H", entry.name)
        if key in self.plan.up:
            return
        self.start(entry)
        self.plan.up.add(key)
        for listener in entry.listeners:
            if listener.event.name == "setup":
                self.plan.caller(listener)(self.state)

    def farewell(self, entry: Entry) -> None:
        """It gets its teardown when nobody is calling it any more."""
        key = ("H", entry.name)
        if key in self.plan.up:
            self.plan.up.discard(key)
            self.leaving += [each for each in entry.listeners if each.event.name == "teardown"]

    def see_off(self) -> None:
        """The teardowns that are due."""
        leaving, self.leaving = self.leaving, []
        for listener in leaving:
            self.plan.caller(listener)(self.state)


def note(error: BaseException, failures: list[Any]) -> None:
    """Later failures are attached to the first error, never put in its place."""
    for failure in failures:
        where = "; ".join(getattr(failure, "__notes__", []))
        error.add_note(f"then, while the run was ending: {type(failure).__name__}: {failure} ({where})")
