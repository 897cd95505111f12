"""Listeners in order, composed once into plain callables: the loops call `plan.on_x(state)`
and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from hookline.engine.binding import Caller
from hookline.engine.events import Event, EventTable
from hookline.engine.listener import Listener
from hookline.engine.slots import blame, isolated_slot, make_slot, no_signal_here
from hookline.util.errors import StopTraining, closest

Trace = Callable[[Listener, Caller], Caller]
"""Wraps the caller of a listener, to record or time it."""


class Tracer(Protocol):
    """Sees what a run calls: it is asked for a wrapper when slots are composed, so without one there is
    nothing there.
    """

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Around the call of one listener."""
        ...

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Around a whole event, also one that nobody hears."""
        ...


def noop(s: Any) -> None:
    """Do nothing: the slot of an event without listeners."""


def untraced(listener: Listener, call: Caller) -> Caller:
    """The trace that is not there."""
    return call


class Plan:
    """One slot per event. A change of hooks drops the slots it touches; each is composed again when the loops
    next read it.

    So a thousand changes between two events cost one composition, and a slot that is read is always a plain
    callable.
    """

    def __init__(self, table: EventTable, *, accounting: bool = True) -> None:
        self.table = table
        self.accounting = accounting
        self._agreed: dict[str, frozenset[str]] | None = None
        """What listeners of all ranks ask for, by event, while several ranks run together."""
        self.tracers: tuple[Tracer, ...] = ()
        self.up: set[tuple[str, str]] = set()
        """Whose set-up has begun in this run: they are the ones who get a teardown."""
        self.disable: Callable[[Listener], None] = lambda listener: self.remove([listener])
        self._heard: dict[str, dict[Listener, None]] = {}
        """The listeners of each event as they were added; a dictionary finds and removes one without a
        search.
        """
        self._sorted: dict[str, list[Listener]] = {}
        """The same in the order in which they are called, for events that were looked up since the last
        change.
        """
        self._elsewhere: dict[Listener, None] = {}
        """Called by other ranks only; what they ask for is worked out here too, because it may take all
        ranks.
        """
        self._acts: dict[str, tuple[Sequence[Listener], Callable[[Trace], Caller]]] = {}
        for event in table:
            setattr(self, event.name, noop)

    def __getattr__(self, name: str) -> Caller:
        """Compose a slot that a change has dropped, or that of an event declared since; any other name is a
        mistake.
        """
        if name.startswith("_") or name not in self.table:
            raise AttributeError(
                f"{name!r} is no event.{closest(name, [event.name for event in self.table])}"
            )
        self._compose(name)
        return self.__dict__[name]  # type: ignore[no-any-return]

    def listeners(self, event: str) -> Sequence[Listener]:
        """Who is called at this event, in order."""
        if event in self._acts:
            return self._acts[event][0]
        if event not in self._sorted:
            # a new list each time: a delivery that is going on keeps the one it began with
            self._sorted[event] = sorted(self._heard.get(event, ()), key=lambda each: each.place)
        return self._sorted[event]

    def __contains__(self, listener: Listener) -> bool:
        """Whether a listener is called at its event."""
        return listener in self._heard.get(listener.event.name, ())

    def add(self, listeners: Iterable[Listener]) -> None:
        """Give each listener its place."""
        self._change(listeners, lambda heard, listener: heard.setdefault(listener))

    def count_elsewhere(self, listeners: Iterable[Listener]) -> None:
        """Take note of listeners that other ranks call."""
        self._elsewhere.update(dict.fromkeys(listeners))
        self._forget_wants()

    def remove(self, listeners: Iterable[Listener]) -> None:
        """Take listeners out; whoever is being called right now is not disturbed."""
        leaving = list(listeners)
        for each in leaving:
            self._elsewhere.pop(each, None)
        self._change(leaving, lambda heard, listener: heard.pop(listener, None))

    def act(self, event: str, listeners: Sequence[Listener], build: Callable[[Trace], Caller]) -> None:
        """Let an action be done by what `build` makes; it puts the trace it is given around each listener's
        call.
        """
        self._acts[event] = (listeners, build)
        self._compose(event)
        self._forget_wants()

    def attach(self, tracer: Tracer) -> None:
        """Let a tracer see everything from the next event on, around those that do already."""
        self._retrace((*self.tracers, tracer))

    def detach(self, tracer: Tracer) -> None:
        """Take it away again: off means absent."""
        self._retrace(tuple(each for each in self.tracers if each is not tracer))

    def _retrace(self, tracers: tuple[Tracer, ...]) -> None:
        self.tracers = tracers
        for event in self.table:
            if not event.action or event.name in self._acts:
                self._compose(event.name)

    def clear_run(self) -> None:
        """Forget everyone but the hooks: module, strategy and data module belong to one run."""
        self._acts.clear()
        self.remove([each for heard in self._heard.values() for each in heard if each.receiver != "H"])
        for event in self.table:
            if event.action:
                setattr(self, event.name, noop)

    # ---- composing -----------------------------------------------------------------------------------------

    def _change(
        self, listeners: Iterable[Listener], apply: Callable[[dict[Listener, None], Listener], object]
    ) -> None:
        touched = set()
        for listener in listeners:
            apply(self._heard.setdefault(listener.event.name, {}), listener)
            touched.add(listener.event.name)
        if "teardown" in touched:
            touched.add("setup")  # its slot also marks those who have only a teardown
        for event in touched:
            self._sorted.pop(event, None)
        self._drop(*touched)
        self._forget_wants()

    @functools.cached_property
    def asked_at(self) -> dict[str, frozenset[str]]:
        """The facts that listeners ask for as they are now, by event; another object after every change."""
        acting = [listener for listeners, _ in self._acts.values() for listener in listeners]
        heard = [listener for listeners in self._heard.values() for listener in listeners]
        at: dict[str, set[str]] = {}
        for listener in (*acting, *heard, *self._elsewhere):
            at.setdefault(listener.event.name, set()).update(listener.facts)
        return {event: frozenset(facts) for event, facts in at.items()}

    @functools.cached_property
    def wanted_at(self) -> dict[str, frozenset[str]]:
        """The facts that listeners of any rank ask for, by event; ranks that have agreed on them keep them
        until they next do.
        """
        return self.asked_at if self._agreed is None else self._agreed

    @functools.cached_property
    def wanted(self) -> frozenset[str]:
        """The same over all events, with what must be captured for them; the loops capture costly facts only
        if in here.
        """
        return self.table.with_needs({fact for facts in self.wanted_at.values() for fact in facts})

    def agree_on_wants(self, everywhere: dict[str, frozenset[str]] | None) -> None:
        """Capture what listeners of any rank ask for, until the next call; None: this process runs alone
        again.
        """
        self._agreed = everywhere
        self._drop("wanted_at", "wanted")

    def _forget_wants(self) -> None:
        self._drop("asked_at", *(("wanted_at", "wanted") if self._agreed is None else ()))

    def _drop(self, *names: str) -> None:
        """Let slots or facts be worked out again when they are next read."""
        for name in names:
            self.__dict__.pop(name, None)

    def _compose(self, name: str) -> None:
        if name not in self.table:  # an event that was declared once and has been forgotten
            return
        event = self.table[name]
        if event.action:
            _, build = self._acts[name]
            setattr(self, name, self._traced_slot(event, build(self._traced if self.tracers else untraced)))
            return
        listeners = self.listeners(name)
        if event.either and any(each.receiver == "D" for each in listeners):
            listeners = [each for each in listeners if each.receiver != "M"]
        slot = self._setup_slot(listeners) if name == "setup" else self._slot(event, listeners)
        setattr(self, name, self._traced_slot(event, slot))

    def caller(self, listener: Listener) -> Caller:
        """A listener's call with everything around it."""
        return listener.caller(self.accounting, self.disable, self._traced if self.tracers else untraced)

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
        return make_slot(event, listeners, self.caller, self.disable, self.accounting, bool(self.tracers))

    def _setup_slot(self, listeners: Sequence[Listener]) -> Caller:
        """Marks everyone in their turn, so that teardown reaches just those whose set-up began."""
        pairs = [(self.caller(each), each) for each in listeners]
        has_setup = {listener.key for _, listener in pairs}
        setup = self.table["setup"]
        only_teardown = [(noop, each) for each in self.listeners("teardown") if each.key not in has_setup]
        turns = sorted([*pairs, *only_teardown], key=lambda turn: turn[1].place_at(setup))

        def set_up(s: Any) -> None:
            outer = s.running
            try:
                for call, listener in turns:
                    if listener not in self:
                        continue  # somebody's set-up has removed it before its turn
                    self.up.add(listener.key)
                    s.running = (listener, outer)
                    try:
                        if (value := call(s)) is not None:
                            no_signal_here(value, listener)
                    except StopTraining as stop:
                        s.request_stop(stop.reason)
                    except BaseException as error:
                        blame(error, listener, s)
                        raise
            finally:
                s.running = outer

        return set_up if turns else noop
