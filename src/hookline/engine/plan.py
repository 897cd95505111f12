"""The plan: listeners in order, composed once into plain callables, which the loops call as
`plan.on_x(state)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from hookline.engine.binding import Caller
from hookline.engine.events import Event, EventTable
from hookline.engine.listener import Listener
from hookline.engine.slots import add_failure_note, isolated_slot, make_slot, no_signal_here
from hookline.util.errors import StopTraining, closest

Trace = Callable[[Listener, Caller], Caller]
"""Wraps the caller of a listener, to record or time it."""


class Tracer(Protocol):
    """Wraps the calls of a run. It is asked for its wrappers when slots are composed, so that a plan without
    one has no wrapper, and what a tracer returns as it is costs nothing.
    """

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Return the call of one listener with the tracer's wrapper, or as it is."""
        ...

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Return the slot of an event with the tracer's wrapper, also if the event has no listeners; or as it
        is.
        """
        ...


def noop(s: Any) -> None:
    """Do nothing: the slot of an event without listeners."""


class Plan:
    """One slot per event. A change of hooks drops the affected slots; each is composed again when it is next
    read.

    So a thousand changes between two events cost one composition, and a slot is always a plain callable.
    """

    def __init__(self, table: EventTable, *, accounting: bool = True) -> None:
        self.table = table
        self.accounting = accounting
        self._agreed: dict[str, frozenset[str]] | None = None
        """The facts that listeners of any rank request, by event, while several ranks train together."""
        self.tracers: tuple[Tracer, ...] = ()
        self.up: set[tuple[str, str]] = set()
        """The keys of the participants whose `setup` has begun in this run; only they get a teardown."""
        self.disable: Callable[[Listener], None] = lambda listener: self.remove([listener])
        self._listeners: dict[str, dict[Listener, None]] = {}
        """The listeners of each event as they were added; a dictionary removes one without a search."""
        self._sorted: dict[str, list[Listener]] = {}
        """The listeners in call order, for events that were looked up since the last change."""
        self._remote_listeners: dict[Listener, None] = {}
        """Listeners that only other ranks call. This rank computes their facts too, because that may take a
        collective.
        """
        self._actions: dict[str, tuple[Sequence[Listener], Callable[[Trace], Caller]]] = {}
        for event in table:
            setattr(self, event.name, noop)

    def __getattr__(self, name: str) -> Caller:
        """Compose a slot that a change has dropped, or the slot of an event that was declared later.

        Raise AttributeError for any other name.
        """
        if name.startswith("_") or name not in self.table:
            raise AttributeError(
                f"{name!r} is not an event.{closest(name, [event.name for event in self.table])}"
            )
        self._compose(name)
        return self.__dict__[name]  # type: ignore[no-any-return]

    def listeners(self, event: str) -> Sequence[Listener]:
        """Return the listeners of this event in call order."""
        if event in self._actions:
            return self._actions[event][0]
        if event not in self._sorted:
            # a new list each time: an event that is being delivered keeps the list that it started with
            self._sorted[event] = sorted(self._listeners.get(event, ()), key=lambda each: each.sort_key)
        return self._sorted[event]

    def __contains__(self, listener: Listener) -> bool:
        """Return whether a listener is called at its event."""
        return listener in self._listeners.get(listener.event.name, ())

    def add(self, listeners: Iterable[Listener]) -> None:
        """Add listeners to their events."""
        self._change(listeners, lambda present, listener: present.setdefault(listener))

    def count_elsewhere(self, listeners: Iterable[Listener]) -> None:
        """Record listeners that only other ranks call."""
        self._remote_listeners.update(dict.fromkeys(listeners))
        self._forget_wants()

    def remove(self, listeners: Iterable[Listener]) -> None:
        """Remove listeners; a listener that is being called now runs to its end."""
        removed = list(listeners)
        for listener in removed:
            self._remote_listeners.pop(listener, None)
        self._change(removed, lambda present, listener: present.pop(listener, None))

    def act(self, event: str, listeners: Sequence[Listener], build: Callable[[Trace], Caller]) -> None:
        """Set the implementation of an action. `build` puts the trace that it receives around each listener's
        call.
        """
        self._actions[event] = (listeners, build)
        self._compose(event)
        self._forget_wants()

    def attach(self, tracer: Tracer) -> None:
        """Add a tracer outside the existing ones, from the next event on."""
        self._retrace((*self.tracers, tracer))

    def detach(self, tracer: Tracer) -> None:
        """Remove a tracer, and with it its wrappers."""
        self._retrace(tuple(each for each in self.tracers if each is not tracer))

    def compose_again(self, listeners: Iterable[Listener]) -> None:
        """Compose the slots of these listeners again, because a tracer wraps them differently now."""
        self.recompose({each.event.name for each in listeners})

    def recompose(self, events: Iterable[str]) -> None:
        """Compose the slots of these events again when they are next called, as `compose_again` does."""
        self._drop(*events)

    def _retrace(self, tracers: tuple[Tracer, ...]) -> None:
        self.tracers = tracers
        for event in self.table:
            if not event.action or event.name in self._actions:
                self._compose(event.name)

    def is_traced(self, event: str) -> bool:
        """Return whether a tracer wraps the slot of this event, or the call of one of its listeners."""
        slot_is_traced = self._traced_slot(self.table[event], noop) is not noop
        return slot_is_traced or any(map(self._is_traced, self.listeners(event)))

    def traced_slot(self, event: str, tracer: Tracer) -> Caller:
        """Return the slot of an event as it would be with this tracer too. The plan does not change."""
        before, self.tracers = self.tracers, (*self.tracers, tracer)
        try:
            return self._composed(self.table[event])
        finally:
            self.tracers = before

    def clear_run(self) -> None:
        """Remove all listeners but those of hooks, because module, strategy and data module belong to one
        run.
        """
        self._actions.clear()
        self.remove(
            [each for listeners in self._listeners.values() for each in listeners if each.receiver != "H"]
        )
        for event in self.table:
            if event.action:
                setattr(self, event.name, noop)

    # ---- composing -----------------------------------------------------------------------------------------

    def _change(
        self, listeners: Iterable[Listener], apply: Callable[[dict[Listener, None], Listener], object]
    ) -> None:
        touched = set()
        for listener in listeners:
            apply(self._listeners.setdefault(listener.event.name, {}), listener)
            touched.add(listener.event.name)
        if "teardown" in touched:
            touched.add("setup")  # its slot also records the participants that have only a teardown
        for event in touched:
            self._sorted.pop(event, None)
        self._drop(*touched)
        self._forget_wants()

    @functools.cached_property
    def asked_at(self) -> dict[str, frozenset[str]]:
        """Return the facts that listeners of this process request, by event; a new object after every
        change.
        """
        acting = [listener for listeners, _ in self._actions.values() for listener in listeners]
        listening = [listener for listeners in self._listeners.values() for listener in listeners]
        at: dict[str, set[str]] = {}
        for listener in (*acting, *listening, *self._remote_listeners):
            at.setdefault(listener.event.name, set()).update(listener.facts)
        return {event: frozenset(facts) for event, facts in at.items()}

    @functools.cached_property
    def wanted_at(self) -> dict[str, frozenset[str]]:
        """Return the facts that listeners of any rank request, by event, as the ranks last agreed on them."""
        return self.asked_at if self._agreed is None else self._agreed

    @functools.cached_property
    def wanted(self) -> frozenset[str]:
        """Return all requested facts and the facts that they need. The loops capture a costly fact only if it
        is in here.
        """
        return self.table.with_needs({fact for facts in self.wanted_at.values() for fact in facts})

    def agree_on_wants(self, everywhere: dict[str, frozenset[str]] | None) -> None:
        """Capture the facts that listeners of any rank request, until the next call; None: this process runs
        alone.
        """
        self._agreed = everywhere
        self._drop("wanted_at", "wanted")

    def _forget_wants(self) -> None:
        self._drop("asked_at", *(("wanted_at", "wanted") if self._agreed is None else ()))

    def _drop(self, *names: str) -> None:
        """Drop slots or facts, so that they are computed again when they are next read."""
        for name in names:
            self.__dict__.pop(name, None)

    def _compose(self, name: str) -> None:
        if name not in self.table:  # an event that was declared and then removed
            return
        setattr(self, name, self._composed(self.table[name]))

    def _composed(self, event: Event) -> Caller:
        if event.action:
            if event.name not in self._actions:
                return self._traced_slot(event, noop)
            _, build = self._actions[event.name]
            return self._traced_slot(event, build(self._traced))
        listeners = self.listeners(event.name)
        if event.either and any(each.receiver == "D" for each in listeners):
            listeners = [each for each in listeners if each.receiver != "M"]
        slot = self._setup_slot(listeners) if event.name == "setup" else self._slot(event, listeners)
        return self._traced_slot(event, slot)

    def caller(self, listener: Listener) -> Caller:
        """Return a listener's call with its filters, budget, tracers and error policy."""
        return listener.caller(self.accounting, self.disable, self._traced)

    def call(self, listener: Listener, s: Any) -> Any:
        """Call one listener outside the slot of its event."""
        outer = s.running
        s.running = (listener, outer)
        try:
            return self.caller(listener)(s)
        finally:
            s.running = outer

    def _traced(self, listener: Listener, call: Caller) -> Caller:
        for tracer in self.tracers:
            call = tracer.call(listener, call)
        return call

    def _is_traced(self, listener: Listener) -> bool:
        return self._traced(listener, noop) is not noop

    def _traced_slot(self, event: Event, slot: Caller) -> Caller:
        for tracer in self.tracers:
            slot = tracer.slot(event, slot)
        return slot

    def _slot(self, event: Event, listeners: Sequence[Listener]) -> Caller:
        if not listeners:
            return noop
        if event.isolated:
            pairs = [(self.caller(each), each) for each in listeners]
            return isolated_slot(pairs, self.up if event.name == "teardown" else None)
        return make_slot(event, listeners, self.caller, self.disable, self.accounting, self._is_traced)

    def _setup_slot(self, listeners: Sequence[Listener]) -> Caller:
        """Return a slot that records each participant in its turn, so that teardown reaches only those whose
        `setup` began.
        """
        pairs = [(self.caller(each), each) for each in listeners]
        has_setup = {listener.key for _, listener in pairs}
        setup = self.table["setup"]
        only_teardown = [(noop, each) for each in self.listeners("teardown") if each.key not in has_setup]
        turns = sorted([*pairs, *only_teardown], key=lambda turn: turn[1].sort_key_at(setup))

        def set_up(s: Any) -> None:
            outer = s.running
            try:
                for call, listener in turns:
                    if listener not in self:
                        continue  # the `setup` of an earlier one has removed it
                    self.up.add(listener.key)
                    s.running = (listener, outer)
                    try:
                        if (value := call(s)) is not None:
                            no_signal_here(value, listener)
                    except StopTraining as stop:
                        s.request_stop(stop.reason)
                    except BaseException as error:
                        add_failure_note(error, listener, s)
                        raise
            finally:
                s.running = outer

        return set_up if turns else noop
