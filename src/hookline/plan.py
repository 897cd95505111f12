"""Listeners in order, composed once into plain callables: the loops call `plan.on_x(state)` and nothing else."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hookline.binding import Caller
from hookline.errors import END_EPOCH, HookError, Signal, StopTraining, closest, described
from hookline.events import EVENTS, REPLACE, SIGNAL, Event, EventTable
from hookline.listener import Listener, plain_function

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
    """One slot per event. A change of hooks drops the slots it touches; each is composed again when the loops next read it.

    So a thousand changes between two events cost one composition, and a slot that is read is always a plain callable.
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
        """The listeners of each event as they were added; a dictionary finds and removes one without a search."""
        self._sorted: dict[str, list[Listener]] = {}
        """The same in the order in which they are called, for events that were looked up since the last change."""
        self._elsewhere: dict[Listener, None] = {}
        """Called by other ranks only; what they ask for is worked out here too, because it may take all ranks."""
        self._acts: dict[str, tuple[Sequence[Listener], Callable[[Trace], Caller]]] = {}
        for event in table:
            setattr(self, event.name, nobody)

    def __getattr__(self, name: str) -> Caller:
        """Compose a slot that a change has dropped, or that of an event declared since; any other name is a mistake."""
        if name.startswith("_") or name not in self.table:
            raise AttributeError(f"{name!r} is no event.{closest(name, [event.name for event in self.table])}")
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
        """Let an action be done by what `build` makes; it puts the trace it is given around each listener's call."""
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
                setattr(self, event.name, nobody)

    # ---- composing ----------------------------------------------------------------------------------------------

    def _change(self, listeners: Iterable[Listener], apply: Callable[[dict[Listener, None], Listener], object]) -> None:
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
        """The facts that listeners of any rank ask for, by event; ranks that have agreed on them keep them until they next do."""
        return self.asked_at if self._agreed is None else self._agreed

    @functools.cached_property
    def wanted(self) -> frozenset[str]:
        """The same over all events, with what must be captured for them; the loops capture costly facts only if in here."""
        return self.table.with_needs({fact for facts in self.wanted_at.values() for fact in facts})

    def agree_on_wants(self, everywhere: dict[str, frozenset[str]] | None) -> None:
        """Capture what listeners of any rank ask for, until the next call; None: this process runs alone again."""
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
        pairs = [(self.caller(listener), listener) for listener in listeners]
        slot = self._setup_slot(pairs) if name == "setup" else self._slot(event, pairs)
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
        only_teardown = [(nobody, each) for each in self.listeners("teardown") if each.key not in has_setup]
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
                            _no_signal_here(value, listener)
                    except StopTraining as stop:
                        s.request_stop(stop.reason)
                    except BaseException as error:
                        blame(error, listener, s)
                        raise
            finally:
                s.running = outer

        return set_up if turns else nobody


# ---- the kinds of slots. `try` costs nothing until something is raised, so blame is found out only then ----------
# Each slot writes into `s.running` which listener it calls, for the watchdog, and puts back what was there before.


def _notify_slot(pairs: list[tuple[Caller, Listener]]) -> Caller:
    def notify(s: Any) -> None:
        outer = s.running
        try:
            for call, listener in pairs:
                s.running = (listener, outer)
                try:
                    if (value := call(s)) is not None:
                        _no_signal_here(value, listener)
                except StopTraining as stop:
                    s.request_stop(stop.reason)
                except BaseException as error:
                    blame(error, listener, s)
                    raise
        finally:
            s.running = outer

    return notify


def _signal_slot(pairs: list[tuple[Caller, Listener]], event: Event) -> Caller:
    def steer(s: Any) -> Signal | None:
        strongest: Signal | None = None
        outer = s.running
        try:
            for call, listener in pairs:
                s.running = (listener, outer)
                try:
                    if (value := call(s)) is not None:
                        signal = _read_signal(value, event, listener)
                        _check_steers(signal, listener, s)
                        if strongest is None or signal.strength > strongest.strength:
                            strongest = signal
                except StopTraining as stop:
                    s.request_stop(stop.reason)
                except BaseException as error:
                    blame(error, listener, s)
                    raise
        finally:
            s.running = outer
        return strongest

    return steer


def _replace_slot(pairs: list[tuple[Caller, Listener]], event: Event) -> Caller:
    target = event.replaces
    own = event.live.get(target, "").startswith("s.own[")

    def replace(s: Any) -> Any:
        outer = s.running
        try:
            for call, listener in pairs:
                s.running = (listener, outer)
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
        finally:
            s.running = outer

    return replace


def _isolated_slot(pairs: list[tuple[Caller, Listener]], only: set[tuple[str, str]] | None) -> Caller:
    """Everyone is called whatever the others raise; with `only`, those in it, who leave it by that."""

    def isolated(s: Any) -> list[BaseException]:
        failures: list[BaseException] = []
        outer = s.running
        for call, listener in pairs:
            if only is not None:
                if listener.key not in only:
                    continue
                only.discard(listener.key)
            s.running = (listener, outer)
            try:
                call(s)
            except BaseException as error:
                if not isinstance(error, StopTraining):
                    blame(error, listener, s)
                    failures.append(error)
        s.running = outer
        return failures

    return isolated


def _check_steers(signal: Signal, listener: Listener, s: Any) -> None:
    """Refuse a signal that the other ranks do not wait for: they would continue with the batch, and this rank would not."""
    if s.world_size > 1 and not listener.steers:
        name = getattr(plain_function(listener.function), "__name__", "function")
        raise HookError(
            f"{listener.label} returned {signal!r} from {listener.event.name} on rank {s.rank} of {s.world_size}, but it is not "
            "declared to return a signal. Several ranks must know before the first batch at which events they wait for one. "
            f"Declare it in the return annotation (`from hookline import Signal`):\n"
            f"    def {name}(...) -> Signal | None:    # {listener.origin}\n"
            "or, for a method without a return annotation, by an attribute of its class:\n"
            f"    steers = True"
        )


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
