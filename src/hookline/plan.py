"""Listeners in order, composed once into plain callables: the loops call `plan.on_x(state)` and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hookline.binding import Caller
from hookline.errors import END_EPOCH, HookError, Signal, StopTraining, closest, described
from hookline.events import EVENTS, REPLACE, SIGNAL, Event, EventTable
from hookline.listener import Listener

Trace = Callable[[Listener, Caller], Caller]
"""Wraps the caller of a listener, to record or time it."""


class Tracer(Protocol):
    """Sees what a run calls: it is asked for a wrapper when slots are composed, so without one there is nothing there."""

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Around the call of one listener."""
        ...

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Around a whole event, also one that nobody hears."""
        ...


def nobody(s: Any) -> None:
    """The slot of an event that nobody listens to."""


def untraced(listener: Listener, call: Caller) -> Caller:
    """The trace that is not there."""
    return call


class Plan:
    """One slot per event. A change of hooks reassigns the slots it touches, between two events."""

    def __init__(self, table: EventTable, *, accounting: bool = True) -> None:
        self.table = table
        self.accounting = accounting
        self.wanted: frozenset[str] = frozenset()
        """Facts that somebody asks for, on any rank; the loops capture costly ones only if they are in here."""
        self.wanted_at: dict[str, frozenset[str]] = {}
        """The same by event."""
        self.asked_at: dict[str, frozenset[str]] = {}
        """What listeners ask for as they are now; ranks that have agreed on what is wanted stay with that until they next do."""
        self._is_agreed = False
        self.tracers: tuple[Tracer, ...] = ()
        self.up: set[tuple[str, str]] = set()
        """Whose set-up has begun in this run: they are the ones who get a teardown."""
        self.disable: Callable[[Listener], None] = lambda listener: self.remove([listener])
        self._heard: dict[str, list[Listener]] = {}
        self._elsewhere: list[Listener] = []
        """Called by other ranks only; what they ask for is worked out here too, because it may take all ranks."""
        self._acts: dict[str, tuple[Sequence[Listener], Callable[[Trace], Caller]]] = {}
        for event in table:
            setattr(self, event.name, nobody)

    def __getattr__(self, name: str) -> Caller:
        """Only reached for a name that has no slot: an event declared since, or a mistake."""
        if name.startswith("_") or name not in self.table:
            raise AttributeError(f"{name!r} is no event.{closest(name, [event.name for event in self.table])}")
        return nobody

    def listeners(self, event: str) -> Sequence[Listener]:
        """Who is called at this event, in order."""
        acting = self._acts.get(event)
        return acting[0] if acting else self._heard.get(event, [])

    def add(self, listeners: Iterable[Listener]) -> None:
        """Give each listener its place."""
        self._change(listeners, lambda heard, listener: heard.append(listener))

    def count_elsewhere(self, listeners: Iterable[Listener]) -> None:
        """Take note of listeners that other ranks call."""
        self._elsewhere += [each for each in listeners if each not in self._elsewhere]
        self._count_wants()

    def remove(self, listeners: Iterable[Listener]) -> None:
        """Take listeners out; whoever is being called right now is not disturbed."""
        leaving = list(listeners)
        self._elsewhere = [each for each in self._elsewhere if each not in leaving]
        self._change(leaving, lambda heard, listener: heard.remove(listener) if listener in heard else None)

    def act(self, event: str, listeners: Sequence[Listener], build: Callable[[Trace], Caller]) -> None:
        """Let an action be done by what `build` makes; it puts the trace it is given around each listener's call."""
        self._acts[event] = (listeners, build)
        self._compose(event)
        self._count_wants()

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
                setattr(self, event.name, nobody)

    # ---- composing ----------------------------------------------------------------------------------------------

    def _change(self, listeners: Iterable[Listener], apply: Callable[[list[Listener], Listener], None]) -> None:
        touched = set()
        for listener in listeners:
            # a new list each time: a delivery that is going on keeps the one it began with
            heard = list(self._heard.get(listener.event.name, []))
            apply(heard, listener)
            self._heard[listener.event.name] = sorted(heard, key=lambda each: each.place)
            touched.add(listener.event.name)
        if "teardown" in touched:
            touched.add("setup")  # its slot also marks those who have only a teardown
        for event in touched:
            self._compose(event)
        self._count_wants()

    def _count_wants(self) -> None:
        acting = [listener for listeners, _ in self._acts.values() for listener in listeners]
        heard = [listener for listeners in self._heard.values() for listener in listeners]
        at: dict[str, set[str]] = {}
        for listener in (*acting, *heard, *self._elsewhere):
            at.setdefault(listener.event.name, set()).update(listener.facts)
        self.asked_at = {event: frozenset(facts) for event, facts in at.items()}
        if not self._is_agreed:
            self._want(self.asked_at)

    def agree_on_wants(self, everywhere: dict[str, frozenset[str]] | None) -> None:
        """Work out what is asked for anywhere, until told otherwise; None: there is nobody else any more."""
        self._is_agreed = everywhere is not None
        self._want(self.asked_at if everywhere is None else everywhere)

    def _want(self, at: dict[str, frozenset[str]]) -> None:
        self.wanted_at = at
        self.wanted = self.table.with_needs({fact for facts in at.values() for fact in facts})

    def _compose(self, name: str) -> None:
        if name not in self.table:  # an event that was declared once and has been forgotten
            return
        event = self.table[name]
        if event.action:
            _, build = self._acts[name]
            setattr(self, name, self._traced_slot(event, build(self._traced if self.tracers else untraced)))
            return
        listeners = self._heard.get(name, [])
        if event.either and any(each.receiver == "D" for each in listeners):
            listeners = [each for each in listeners if each.receiver != "M"]
        pairs = [(self.caller(listener), listener) for listener in listeners]
        slot = self._setup_slot(pairs) if name == "setup" else self._slot(event, pairs)
        setattr(self, name, self._traced_slot(event, slot))

    def caller(self, listener: Listener) -> Caller:
        """A listener's call with everything around it."""
        return listener.caller(self.accounting, self.disable, self._traced if self.tracers else untraced)

    def _traced(self, listener: Listener, call: Caller) -> Caller:
        for tracer in self.tracers:
            call = tracer.call(listener, call)
        return call

    def _traced_slot(self, event: Event, slot: Caller) -> Caller:
        for tracer in self.tracers:
            slot = tracer.slot(event, slot)
        return slot

    def _slot(self, event: Event, pairs: list[tuple[Caller, Listener]]) -> Caller:
        if not pairs:
            return nobody
        if event.isolated:
            return _isolated_slot(pairs, self.up if event.name == "teardown" else None)
        if event.returns == SIGNAL:
            return _signal_slot(pairs, event)
        if event.returns == REPLACE:
            return _replace_slot(pairs, event)
        return _notify_slot(pairs)


    def _setup_slot(self, pairs: list[tuple[Caller, Listener]]) -> Caller:
        """Marks everyone in their turn, so that teardown reaches just those whose set-up began."""
        has_setup = {listener.key for _, listener in pairs}
        setup = self.table["setup"]
        only_teardown = [(nobody, each) for each in self._heard.get("teardown", []) if each.key not in has_setup]
        turns = sorted([*pairs, *only_teardown], key=lambda turn: turn[1].place_at(setup))

        def set_up(s: Any) -> None:
            for call, listener in turns:
                if listener not in self._heard.get(listener.event.name, []):
                    continue  # somebody's set-up has removed it before its turn
                self.up.add(listener.key)
                try:
                    if (value := call(s)) is not None:
                        _no_signal_here(value, listener)
                except StopTraining as stop:
                    s.request_stop(stop.reason)
                except BaseException as error:
                    blame(error, listener, s)
                    raise

        return set_up if turns else nobody


# ---- the kinds of slots. `try` costs nothing until something is raised, so blame is found out only then ----------


def _notify_slot(pairs: list[tuple[Caller, Listener]]) -> Caller:
    def notify(s: Any) -> None:
        for call, listener in pairs:
            try:
                if (value := call(s)) is not None:
                    _no_signal_here(value, listener)
            except StopTraining as stop:
                s.request_stop(stop.reason)
            except BaseException as error:
                blame(error, listener, s)
                raise

    return notify


def _signal_slot(pairs: list[tuple[Caller, Listener]], event: Event) -> Caller:
    def steer(s: Any) -> Signal | None:
        strongest: Signal | None = None
        for call, listener in pairs:
            try:
                if (value := call(s)) is not None:
                    signal = _read_signal(value, event, listener)
                    if strongest is None or signal.strength > strongest.strength:
                        strongest = signal
            except StopTraining as stop:
                s.request_stop(stop.reason)
            except BaseException as error:
                blame(error, listener, s)
                raise
        return strongest

    return steer


def _replace_slot(pairs: list[tuple[Caller, Listener]], event: Event) -> Caller:
    target = event.replaces
    own = event.live.get(target, "").startswith("s.own[")

    def replace(s: Any) -> Any:
        for call, listener in pairs:
            try:
                if (value := call(s)) is not None:
                    if isinstance(value, Signal):
                        _no_signal_here(value, listener)
                    if own:
                        s.own[target] = value
                    else:
                        s.replace(target, value)
            except StopTraining as stop:
                s.request_stop(stop.reason)
            except BaseException as error:
                blame(error, listener, s)
                raise

    return replace


def _isolated_slot(pairs: list[tuple[Caller, Listener]], only: set[tuple[str, str]] | None) -> Caller:
    """Everyone is called whatever the others raise; with `only`, those in it, who leave it by that."""

    def isolated(s: Any) -> list[BaseException]:
        failures: list[BaseException] = []
        for call, listener in pairs:
            if only is not None:
                if listener.key not in only:
                    continue
                only.discard(listener.key)
            try:
                call(s)
            except BaseException as error:
                if not isinstance(error, StopTraining):
                    blame(error, listener, s)
                    failures.append(error)
        return failures

    return isolated


def _read_signal(value: Any, event: Event, listener: Listener) -> Signal:
    if value is not True and isinstance(value, int) and value == -1 and "END_EPOCH" in event.signals:
        return END_EPOCH
    if isinstance(value, Signal) and value.name in event.signals:
        return value
    allowed = ", ".join(event.signals)
    is_batch = isinstance(value, list | tuple | dict) or hasattr(value, "shape")
    hint = " To replace the batch, return it from on_after_batch_transfer." if "batch" in event.facts and is_batch else ""
    raise HookError(f"{listener.label} returned {described(value)} from {event.name}; it may return None, {allowed}.{hint}")


def _no_signal_here(value: Any, listener: Listener) -> None:
    """Values returned from a plain event have no meaning, but a signal that would be lost is a mistake."""
    if isinstance(value, Signal):
        raise HookError(f"{listener.label} returned {value!r} from {listener.event.name}, where it has no effect.")


@dataclass(frozen=True, slots=True)
class Blame:
    """Who raised an exception, at which event."""

    who: str
    event: str


def blame(error: BaseException, listener: Listener, s: Any) -> None:
    """Say on the exception itself which hook failed, where, and at which position of the run."""
    accuse(error, Blame(listener.label, listener.event.name), f"({listener.origin}) at {s.position}")
    if isinstance(error, AttributeError) and listener.receiver == "H" and error.obj is listener.owner is not None:
        for hint in _to_ask_for(str(error.name), listener.event):
            error.add_note(hint)


def accuse(error: BaseException, who: Blame, where: str) -> None:
    """The same of somebody who was not called by an event."""
    error.add_note(f"raised by {who.who} in {who.event} {where}")
    if blamed(error) is None:  # of events inside events the innermost
        with contextlib.suppress(AttributeError):  # an exception with slots
            error.__hookline_blame__ = who  # type: ignore[attr-defined]


def _to_ask_for(name: str, event: Event) -> Iterator[str]:
    """What a hook has not got but can ask for: `self.log` and `self.trainer` are a module's."""
    if name in ("log", "log_dict"):
        yield f"A hook logs through the trainer: `def {event.name}(self, trainer): trainer.log('name', value)`."
    elif EVENTS.fact(name, event) is not None:
        yield f"A hook asks for it by the name of a parameter: `def {event.name}(self, {name}): ...`."


def blamed(error: BaseException) -> Blame | None:
    """Who raised it, if a listener did."""
    return getattr(error, "__hookline_blame__", None)
