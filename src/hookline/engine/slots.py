"""The slots of a plan: what an event's name stands for, compiled for the listeners that are there.

A slot is generated code that calls one listener after the other, with no frame between it and the listener:
the facts are read, the time is taken, what runs is published and a failure is handled right there. Listeners
with a filter, a budget or a tracer around them are called through the caller that was composed for them.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.engine.binding import Caller, Source, factory
from hookline.engine.events import EVENTS, REPLACE, SIGNAL, Event
from hookline.engine.listener import Listener, forgive, plain_function
from hookline.util.errors import END_EPOCH, HookError, Signal, StopTraining, described

MOST_UNROLLED = 64
"""Listeners of one event that are called by code of their own; more of them are called in a loop, which
compiles at once.
"""

Compose = Callable[[Listener], Caller]
"""Returns the caller of a listener with everything around it."""

_SLOT = """
def make(clock, take, failed, forgive, disable, {names}):
    def slot(s):
        taken = None
        outer = s.running
        try:
{calls}
        finally:
            s.running = outer
        return taken
    return slot
"""

# `try` costs nothing until something is raised, so which listener failed is found out only then
_CALL = """\
s.running = (l{n}, outer)
try:
{call}
    if value is not None:
        taken = take(s, value, taken, l{n})
except BaseException as error:
    if failed(s, error, l{n}):
        raise"""

_AROUND = """\
{before}
try:
{call}
finally:
{after}"""

# the clock is read once between two listeners: reading it costs as much as a short hook
_ACCOUNT = """\
now = clock()
spent, began = now - began, now
a{n}.calls += 1
a{n}.total += spent
if spent > a{n}.worst:
    a{n}.worst = spent"""

_FORGIVING = """\
try:
{call}
except Exception as error:
    value = forgive(error, l{n}, disable)"""


def make_slot(
    event: Event,
    listeners: Sequence[Listener],
    compose: Compose,
    disable: Callable[[Listener], None],
    accounting: bool,
    is_traced: bool,
) -> Caller:
    """Compile the slot of an event for these listeners, in this order. compose: makes the call of those with
    more around it.
    """
    take = _taking(event)
    if len(listeners) > MOST_UNROLLED:
        return _looped_slot([(compose(each), each) for each in listeners], take)
    calls: list[str] = []
    names: dict[str, Any] = {}
    for n, listener in enumerate(listeners):
        names[f"l{n}"] = listener
        source = listener.binding.source
        if source is None or is_traced or not listener.is_plain:
            names[f"c{n}"] = compose(listener)
            call = f"value = c{n}(s)"
        else:
            names[f"f{n}"], names[f"d{n}"] = source.function, source.values
            counts = accounting and listener.receiver == "H"
            if counts:
                names[f"a{n}"] = listener.account
                if f"a{n - 1}" not in names:
                    calls.append("began = clock()")
            call = _inline(source, listener, n, counts)
        calls.append(_CALL.format(n=n, call=_indented(call)))
    made = factory(_SLOT.format(names=", ".join(names), calls=textwrap.indent("\n".join(calls), " " * 12)))
    slot: Caller = made(time.perf_counter_ns, take, _failed, forgive, disable, *names.values())
    return slot


def _inline(source: Source, listener: Listener, n: int, counts: bool) -> str:
    """Return the lines that call a listener, with its account and its error policy around it."""
    call = f"value = {source.text(str(n))}"
    before, after = source.around(str(n))
    if before:
        call = _AROUND.format(before=before, call=_indented(call), after=_indented(after))
    if counts:
        call = f"try:\n{_indented(call)}\nfinally:\n{_indented(_ACCOUNT.format(n=n))}"
    return call if listener.on_error == "raise" else _FORGIVING.format(n=n, call=_indented(call))


def _indented(lines: str) -> str:
    return textwrap.indent(lines, "    ")


def _looped_slot(pairs: list[tuple[Caller, Listener]], take: Take) -> Caller:
    def slot(s: Any) -> Any:
        taken = None
        outer = s.running
        try:
            for call, listener in pairs:
                s.running = (listener, outer)
                try:
                    if (value := call(s)) is not None:
                        taken = take(s, value, taken, listener)
                except BaseException as error:
                    if _failed(s, error, listener):
                        raise
        finally:
            s.running = outer
        return taken

    return slot


def isolated_slot(pairs: list[tuple[Caller, Listener]], only: set[tuple[str, str]] | None) -> Caller:
    """Make a slot that calls every listener whatever the others raise; with `only`, those in
    it, each once.
    """

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


# ---- what a returned value does ----------------------------------------------------------------------------

Take = Callable[[Any, Any, Any, Listener], Any]
"""Takes what a listener returned: the state, the value, what was taken before it, and the listener."""


def _taking(event: Event) -> Take:
    if event.returns == SIGNAL:
        return _stronger_signal
    if event.returns == REPLACE:
        return _replacing(event)
    return _no_value


def _no_value(s: Any, value: Any, taken: Any, listener: Listener) -> None:
    no_signal_here(value, listener)


def _stronger_signal(s: Any, value: Any, taken: Signal | None, listener: Listener) -> Signal:
    signal = _read_signal(value, listener.event, listener)
    _check_steers(signal, listener, s)
    return signal if taken is None or signal.strength > taken.strength else taken


def _replacing(event: Event) -> Take:
    target = event.replaces
    own = event.live.get(target, "").startswith("s.own[")

    def replace(s: Any, value: Any, taken: Any, listener: Listener) -> None:
        no_signal_here(value, listener)
        if own:
            s.own[target] = value
        else:
            s.replace(target, value)

    return replace


def _check_steers(signal: Signal, listener: Listener, s: Any) -> None:
    """Refuse a signal that the other ranks do not wait for: they would continue with the batch, and this rank
    would not.
    """
    if s.world_size > 1 and not listener.steers:
        name = getattr(plain_function(listener.function), "__name__", "function")
        raise HookError(
            f"{listener.label} returned {signal!r} from {listener.event.name} on rank {s.rank} of "
            f"{s.world_size}, but it is not declared to return a signal. Several ranks must know before the "
            "first batch at which events they wait for one. Declare it in the return annotation (`from "
            "hookline import Signal`):\n"
            f"    def {name}(...) -> Signal | None:    # {listener.origin}\n"
            "or, for a method without a return annotation, by an attribute of its class:\n"
            "    steers = True"
        )


def _read_signal(value: Any, event: Event, listener: Listener) -> Signal:
    if value is not True and isinstance(value, int) and value == -1 and "END_EPOCH" in event.signals:
        return END_EPOCH
    if isinstance(value, Signal) and value.name in event.signals:
        return value
    allowed = ", ".join(event.signals)
    is_batch = isinstance(value, list | tuple | dict) or hasattr(value, "shape")
    hint = (
        " To replace the batch, return it from on_after_batch_transfer."
        if "batch" in event.facts and is_batch
        else ""
    )
    raise HookError(
        f"{listener.label} returned {described(value)} from {event.name}; it may return None, "
        f"{allowed}.{hint}"
    )


def no_signal_here(value: Any, listener: Listener) -> None:
    """Values returned from a plain event have no meaning, but a signal that would be lost is a mistake."""
    if isinstance(value, Signal):
        raise HookError(
            f"{listener.label} returned {value!r} from {listener.event.name}, where it has no effect."
        )


# ---- which listener failed ---------------------------------------------------------------------------------


def _failed(s: Any, error: BaseException, listener: Listener) -> bool:
    """Return whether an exception ends the event; a request to stop is noted instead, and the other listeners
    are called.
    """
    if isinstance(error, StopTraining):
        s.request_stop(error.reason)
        return False
    blame(error, listener, s)
    return True


@dataclass(frozen=True, slots=True)
class Blame:
    """Who raised an exception, at which event."""

    who: str
    event: str


def blame(error: BaseException, listener: Listener, s: Any) -> None:
    """Say on the exception itself which hook failed, where, and at which position of the run."""
    accuse(error, Blame(listener.label, listener.event.name), f"({listener.origin}) at {s.position}")
    if (
        isinstance(error, AttributeError)
        and listener.receiver == "H"
        and error.obj is listener.owner is not None
    ):
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
        yield (
            f"A hook logs through the trainer: `def {event.name}(self, trainer): trainer.log('name', value)`."
        )
    elif EVENTS.fact(name, event) is not None:
        yield f"A hook asks for it by the name of a parameter: `def {event.name}(self, {name}): ...`."


def blamed(error: BaseException) -> Blame | None:
    """Who raised it, if a listener did."""
    return getattr(error, "__hookline_blame__", None)
