"""Hooks that come late to a run or leave it early, and everyone's teardown: the same for the trainer and for
other hosts.
"""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

from hookline.engine.foreign import HookAdapter, RunAware
from hookline.engine.hook_list import Entry
from hookline.engine.slots import blame
from hookline.run.parts import EmittingRun
from hookline.training import run_events
from hookline.training.restore import restore_hook
from hookline.util.errors import StopTraining

V = TypeVar("V", bound=EmittingRun)


class LateHooks(Generic[V]):
    """Begins every hook's run, greets those that are added in the middle of it and takes note of those that
    are removed.
    """

    def __init__(self, run: V) -> None:
        self.run = run
        self._present: set[Entry] = set()
        """Who was there, switched on, when the run began."""

    def begin(self) -> None:
        """Start every hook's filters, budgets and accounts anew, and be there for hooks that come late."""
        hooks = self.run.state.hooks
        self._present = {entry for entry in hooks.entries() if entry.enabled}
        for entry in hooks.entries():
            self._start(entry)
            if not entry.enabled:
                self.run.plan.remove(
                    entry.listeners
                )  # one that was switched off in an earlier run had kept its teardown
        hooks.observer = self
        hooks.stopwatch.start()

    def on_hook_added(self, entry: Entry) -> None:
        """A hook joins in the middle: it gets its set-up and its saved state at once, no start events.

        One that was only switched off goes on where it was.
        """
        run, key = self.run, ("H", entry.name)
        if key in run.plan.up or self._has_begun(entry):
            entry.begin_budget()
            return
        raise_first(
            _teardown_removed(run, list(run.participants.leaving.get(id(entry.given), ())))
        )  # back before it has gone
        self._start(entry)
        run.plan.up.add(key)
        for listener in entry.listeners:
            if listener.event.name == "setup":
                run.plan.call(listener, run.state)
        restore_hook(entry, run.resume.contents, run.state)

    def on_hook_removed(self, entry: Entry) -> None:
        """A hook leaves in the middle: it gets its teardown when nobody is calling it any more, if it was set
        up.
        """
        key = ("H", entry.name)
        if key in self.run.plan.up:
            self.run.plan.up.discard(key)
            self.run.participants.leaving.setdefault(id(entry.given), []).append(entry)

    def _has_begun(self, entry: Entry) -> bool:
        """Whether it has been part of the run and needs no set-up."""
        needs_set_up = any(each.event.name in ("setup", "teardown") for each in entry.listeners)
        return not needs_set_up and entry in self._present

    def _start(self, entry: Entry) -> None:
        for listener in entry.listeners:
            listener.begin(self.run.state)
        if isinstance(entry.hook, HookAdapter | RunAware):
            entry.hook.begin_run(self.run.state)


def teardown_removed(run: EmittingRun) -> None:
    """Hooks that were removed in the middle get their teardown, now that nobody is calling them any more."""
    raise_first(_teardown_removed(run, _leaving(run)))


def tear_down(run: EmittingRun) -> list[BaseException]:
    """Everyone whose set-up began and who is still up is torn down, whatever the others raise. What they
    raised.
    """
    failures = _teardown_removed(run, _leaving(run))
    failures += run_events.tear_down(run)
    return failures + _teardown_removed(run, _leaving(run))  # those that a teardown has sent away


def _leaving(run: EmittingRun) -> list[Entry]:
    return list(itertools.chain(*run.participants.leaving.values()))


def _teardown_removed(run: EmittingRun, entries: list[Entry]) -> list[BaseException]:
    failures: list[BaseException] = []
    for entry in entries:
        of_this_hook = run.participants.leaving.get(id(entry.given), [])
        if entry not in of_this_hook:  # another's teardown has added it again
            continue
        of_this_hook.remove(entry)
        if not of_this_hook:
            del run.participants.leaving[id(entry.given)]
        for listener in entry.listeners:
            if listener.event.name == "teardown":
                try:
                    run.plan.call(listener, run.state)
                except StopTraining as stop:
                    run.state.request_stop(stop.reason)
                except BaseException as error:
                    blame(error, listener, run.state)
                    failures.append(error)
    return failures


def attach_failures(error: BaseException, failures: list[BaseException]) -> None:
    """Later failures are attached to the first error, never put in its place."""
    for failure in failures:
        where = "; ".join(getattr(failure, "__notes__", []))
        error.add_note(f"then, while the run was ending: {type(failure).__name__}: {failure} ({where})")


def raise_first(failures: list[BaseException]) -> None:
    """Raise the first of them, if there is any, with the others noted on it. They are taken
    out of the list.
    """
    if not failures:
        return
    error = failures.pop(0)
    attach_failures(error, failures)
    failures.clear()
    try:
        raise error
    finally:
        del error  # a traceback that holds this frame, which holds the error, would be a cycle
