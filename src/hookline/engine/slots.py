"""The slots of a plan: one compiled function per event that calls the event's listeners.

A slot is generated code that calls the listeners one after the other, with no frame between it and a
listener. It reads the facts, measures the time, publishes the running listener and handles a failure. It
calls a listener that has a filter, a budget or a tracer through the caller that was composed for it.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.engine.binding import Caller, CallSource, factory
from hookline.engine.events import EVENTS, REPLACE, SIGNAL, Event
from hookline.engine.listener import Listener, apply_error_policy
from hookline.engine.source_text import plain_function
from hookline.util.errors import END_EPOCH, HookError, Signal, StopTraining, described

MOST_UNROLLED = 64
"""The most listeners of one event that get code of their own; a slot calls more than that in a loop, which
needs no code for each.
"""

Compose = Callable[[Listener], Caller]
"""Returns the caller of a listener with its filters, budget, tracers and error policy."""

_SLOT = """
def make(clock, handle_result, failed, apply_error_policy, disable, {names}):
    def slot(s):
        result = None
        outer = s.running
        try:
{calls}
        finally:
            s.running = outer
        return result
    return slot
"""

# `try` costs nothing until an exception is raised, so the listener that failed is identified only then
_CALL = """\
s.running = (l{n}, outer)
try:
{call}
    if value is not None:
        result = handle_result(s, value, result, l{n})
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

_WITH_POLICY = """\
try:
{call}
except Exception as error:
    value = apply_error_policy(error, l{n}, disable)"""


def make_slot(
    event: Event,
    listeners: Sequence[Listener],
    compose: Compose,
    disable: Callable[[Listener], None],
    accounting: bool,
    is_traced: Callable[[Listener], bool],
) -> Caller:
    """Compile the slot of an event that calls these listeners in this order.

    compose: makes the caller of each listener that cannot be called inline, such as one that is traced.
    """
    handle_result = _result_handler(event)
    if len(listeners) > MOST_UNROLLED:
        return _looped_slot([(compose(each), each) for each in listeners], handle_result)
    calls: list[str] = []
    names: dict[str, Any] = {}
    for n, listener in enumerate(listeners):
        names[f"l{n}"] = listener
        source = listener.binding.source
        if source is None or not listener.is_plain or is_traced(listener):
            names[f"c{n}"] = compose(listener)
            call = f"value = c{n}(s)"
        else:
            names[f"f{n}"], names[f"d{n}"] = source.function, source.values
            counts = accounting and listener.receiver == "H"
            if counts:
                names[f"a{n}"] = listener.account
                if f"a{n - 1}" not in names:
                    calls.append("began = clock()")
            call = _inline_call(source, listener, n, counts)
        calls.append(_CALL.format(n=n, call=_indent(call)))
    made = factory(_SLOT.format(names=", ".join(names), calls=textwrap.indent("\n".join(calls), " " * 12)))
    slot: Caller = made(
        time.perf_counter_ns, handle_result, _ends_event, apply_error_policy, disable, *names.values()
    )
    return slot


def _inline_call(source: CallSource, listener: Listener, n: int, counts: bool) -> str:
    """Return the lines that call a listener, with its account and its error policy around it."""
    call = f"value = {source.text(str(n))}"
    before, after = source.around(str(n))
    if before:
        call = _AROUND.format(before=before, call=_indent(call), after=_indent(after))
    if counts:
        call = f"try:\n{_indent(call)}\nfinally:\n{_indent(_ACCOUNT.format(n=n))}"
    return call if listener.on_error == "raise" else _WITH_POLICY.format(n=n, call=_indent(call))


def _indent(lines: str) -> str:
    return textwrap.indent(lines, "    ")


def _looped_slot(pairs: list[tuple[Caller, Listener]], handle_result: ResultHandler) -> Caller:
    def slot(s: Any) -> Any:
        result = None
        outer = s.running
        try:
            for call, listener in pairs:
                s.running = (listener, outer)
                try:
                    if (value := call(s)) is not None:
                        result = handle_result(s, value, result, listener)
                except BaseException as error:
                    if _ends_event(s, error, listener):
                        raise
        finally:
            s.running = outer
        return result

    return slot


def isolated_slot(pairs: list[tuple[Caller, Listener]], only: set[tuple[str, str]] | None) -> Caller:
    """Return a slot that calls every listener even if another one raises.

    only: the listeners to call, each once; None: all.
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
                    add_failure_note(error, listener, s)
                    failures.append(error)
        s.running = outer
        return failures

    return isolated


# ---- returned values ---------------------------------------------------------------------------------------

ResultHandler = Callable[[Any, Any, Any, Listener], Any]
"""Handles a returned value. Arguments: the state, the value, the event's result so far, and the listener."""


def _result_handler(event: Event) -> ResultHandler:
    if event.returns == SIGNAL:
        return _stronger_signal
    if event.returns == REPLACE:
        return _make_replacer(event)
    return _ignore_value


def _ignore_value(s: Any, value: Any, result: Any, listener: Listener) -> None:
    no_signal_here(value, listener)


def _stronger_signal(s: Any, value: Any, result: Signal | None, listener: Listener) -> Signal:
    signal = _read_signal(value, listener.event, listener)
    _refuse_undeclared_signal(signal, listener, s)
    return signal if result is None or signal.strength > result.strength else result


def _make_replacer(event: Event) -> ResultHandler:
    target = event.replaces
    is_own = event.live.get(target, "").startswith("s.own[")

    def replace(s: Any, value: Any, result: Any, listener: Listener) -> None:
        no_signal_here(value, listener)
        if is_own:
            s.own[target] = value
        else:
            s.replace(target, value)

    return replace


def _refuse_undeclared_signal(signal: Signal, listener: Listener, s: Any) -> None:
    """Refuse a signal from a listener that does not declare one.

    The other ranks do not wait for it: they would continue with the batch and this rank would not.
    """
    if s.world_size > 1 and not listener.steers:
        name = getattr(plain_function(listener.function), "__name__", "function")
        raise HookError(
            f"{listener.label} returned {signal!r} from {listener.event.name} on rank {s.rank} of "
            f"{s.world_size}, but it is not declared to return a signal. All ranks must know before the "
            "first batch at which events a signal may be returned. Declare it in the return annotation "
            "(`from hookline import Signal`):\n"
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
    """Refuse a signal that a listener returned from an event where signals have no effect."""
    if isinstance(value, Signal):
        raise HookError(
            f"{listener.label} returned {value!r} from {listener.event.name}, where a signal has no effect."
        )


# ---- failures ----------------------------------------------------------------------------------------------


def _ends_event(s: Any, error: BaseException, listener: Listener) -> bool:
    """Return whether an exception ends the event.

    A request to stop is recorded instead, and the other listeners are called.
    """
    if isinstance(error, StopTraining):
        s.request_stop(error.reason)
        return False
    add_failure_note(error, listener, s)
    return True


@dataclass(frozen=True, slots=True)
class FailureSource:
    """The participant that raised an exception, and the event at which it did."""

    name: str
    event: str


def add_failure_note(error: BaseException, listener: Listener, s: Any) -> None:
    """Add to an exception which listener failed, where it is defined, and the position of the run."""
    record_failure(
        error, FailureSource(listener.label, listener.event.name), f"({listener.origin}) at {s.position}"
    )
    if (
        isinstance(error, AttributeError)
        and listener.receiver == "H"
        and error.obj is listener.owner is not None
    ):
        for hint in _attribute_hints(str(error.name), listener.event):
            error.add_note(hint)


def record_failure(error: BaseException, source: FailureSource, where: str) -> None:
    """Add a note to an exception, and record the innermost source of the failure."""
    error.add_note(f"raised by {source.name} in {source.event} {where}")
    if failure_source(error) is None:  # of nested events, keep the innermost
        with contextlib.suppress(AttributeError):  # an exception with slots
            error.__hookline_failure_source__ = source  # type: ignore[attr-defined]


def _attribute_hints(name: str, event: Event) -> Iterator[str]:
    """Yield a hint for an attribute that hooks do not have, such as `self.log` or `self.trainer`."""
    if name in ("log", "log_dict"):
        yield (
            f"A hook logs through the trainer: `def {event.name}(self, trainer): trainer.log('name', value)`."
        )
    elif EVENTS.fact(name, event) is not None:
        yield f"A hook requests it as a parameter: `def {event.name}(self, {name}): ...`."


def failure_source(error: BaseException) -> FailureSource | None:
    """Return the source of an exception, or None if no participant raised it."""
    return getattr(error, "__hookline_failure_source__", None)
