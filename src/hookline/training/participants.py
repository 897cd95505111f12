"""Hooks that are added or removed during a run, and teardown, for the trainer and for hosted runs."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

from hookline.engine.foreign import HookAdapter, RunAware
from hookline.engine.hook_list import Entry
from hookline.engine.slots import add_failure_note
from hookline.run.parts import EmittingRun
from hookline.run.run import Run
from hookline.training import run_events
from hookline.training.restore import restore_hook
from hookline.util.errors import StopTraining

V = TypeVar("V", bound=EmittingRun)


class LateHooks(Generic[V]):
    """Start every hook at the beginning of a run, set up hooks that are added later, record removed ones."""

    def __init__(self, run: V) -> None:
        self.run = run
        self._present: set[Entry] = set()
        """Hooks that were enabled when the run began."""

    def begin(self) -> None:
        """Reset the filters, budgets and accounts of every hook, and observe added and removed hooks."""
        hooks = self.run.state.hooks
        self._present = {entry for entry in hooks.entries() if entry.enabled}
        for entry in hooks.entries():
            self._start(entry)
            if not entry.enabled:
                # a hook that was disabled in an earlier run has kept its teardown until now
                self.run.plan.remove(entry.listeners)
        hooks.observer = self
        hooks.stopwatch.start(self.run.state.stage)

    def on_hook_added(self, entry: Entry) -> None:
        """Set up a hook that is added during the run and restore its saved state; emit no start events.

        A hook that was only disabled continues where it was.
        """
        run, key = self.run, ("H", entry.name)
        if key in run.plan.up or self._has_begun(entry):
            entry.begin_budget()
            return
        # the same hook may have been removed before, and still wait for its teardown
        raise_first(_teardown_removed(run, list(run.participants.leaving.get(id(entry.given), ()))))
        self._start(entry)
        run.plan.up.add(key)
        for listener in entry.listeners:
            if listener.event.name == "setup":
                run.plan.call(listener, run.state)
        restore_hook(entry, run.resume.contents, run.state)

    def on_hook_removed(self, entry: Entry) -> None:
        """Record a hook that is removed during the run. Its teardown follows between two batches."""
        key = ("H", entry.name)
        if key in self.run.plan.up:
            self.run.plan.up.discard(key)
            self.run.participants.leaving.setdefault(id(entry.given), []).append(entry)

    def _has_begun(self, entry: Entry) -> bool:
        """Return whether a hook was part of the run and needs no set-up."""
        return entry in self._present and not any(
            each.event.name in ("setup", "teardown") for each in entry.listeners
        )

    def _start(self, entry: Entry) -> None:
        for listener in entry.listeners:
            listener.begin(self.run.state)
        if isinstance(entry.hook, HookAdapter | RunAware):
            entry.hook.begin_run(self.run.state)


def attach_run(run: Run, given: Run | None) -> None:
    """Give the module and data module of a run access to it; given=None: take it away."""
    run.steps._attach(given)
    if run.datamodule is not None:
        run.datamodule._attach(given)


def teardown_removed(run: EmittingRun) -> None:
    """Tear down the hooks that were removed during the run. Call it where no event is being emitted."""
    raise_first(_teardown_removed(run, _leaving(run)))


def tear_down_all(run: EmittingRun) -> list[BaseException]:
    """Tear down every participant whose set-up began, even if some fail; return what they raised."""
    failures = _teardown_removed(run, _leaving(run))
    failures += run_events.tear_down(run)
    return failures + _teardown_removed(run, _leaving(run))  # hooks that a teardown has removed


def _leaving(run: EmittingRun) -> list[Entry]:
    return list(itertools.chain(*run.participants.leaving.values()))


def _teardown_removed(run: EmittingRun, entries: list[Entry]) -> list[BaseException]:
    failures: list[BaseException] = []
    for entry in entries:
        of_this_hook = run.participants.leaving.get(id(entry.given), [])
        if entry not in of_this_hook:  # the teardown of another hook has added it again
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
                    add_failure_note(error, listener, run.state)
                    failures.append(error)
    return failures


def attach_failures(error: BaseException, failures: list[BaseException]) -> None:
    """Attach later failures to the first error as notes."""
    for failure in failures:
        where = "; ".join(getattr(failure, "__notes__", []))
        place = f" ({where})" if where else ""
        error.add_note(f"then, while the run was ending: {type(failure).__name__}: {failure}{place}")


def raise_first(failures: list[BaseException]) -> None:
    """Raise the first failure, if there is one, with the others attached as notes. Empty the list."""
    if not failures:
        return
    error = failures.pop(0)
    attach_failures(error, failures)
    failures.clear()
    try:
        raise error
    finally:
        del error  # avoids a reference cycle: its traceback holds this frame
