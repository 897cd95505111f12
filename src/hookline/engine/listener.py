"""One listener: a method or function bound to one event, and how its caller is put together."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, NoneType
from typing import Any, TypeVar

from hookline.engine.binding import Binding, Caller, bind_by_name, bind_by_position
from hookline.engine.cost import Account, Allowance
from hookline.engine.events import NOTHING, RECEIVERS, SIGNAL, Event, EventTable
from hookline.engine.filters import Filter, When, _When, filters_of
from hookline.engine.source_text import hands_on, parsed, words_of
from hookline.util.errors import HookError, OptionError, StopTraining, closest, described, misspelling_of

F = TypeVar("F", bound=Callable[..., Any])
ON_ERROR = ("raise", "warn", "disable")
log = logging.getLogger("hookline")


@dataclass(slots=True, eq=False)
class Listener:
    """Who is called at one event, with what, in which place, and what happens if it fails."""

    receiver: str
    name: str
    owner: Any
    event: Event
    function: Callable[..., Any]
    binding: Binding
    filters: list[Filter]
    on_error: str = "raise"
    order: int = 0
    after_module: bool = False
    serial: int = 0
    account: Account = field(default_factory=Account)
    allowance: Allowance | None = None
    """Its part of the hook's budget, if the hook has one."""
    declares_steering: bool = False
    """Whether its owner declares that it may return a signal at this event."""

    @property
    def facts(self) -> tuple[str, ...]:
        """Everything it asks for, its filters' needs included."""
        return (*self.binding.facts, *(fact for each in self.filters for fact in each.facts))

    @property
    def label(self) -> str:
        """`hook 'name'`, `module Net`, ..."""
        return f"hook {self.name!r}" if self.receiver == "H" else f"{RECEIVERS[self.receiver]} {self.name}"

    @property
    def key(self) -> tuple[str, str]:
        """Who it belongs to."""
        return self.receiver, self.name

    @property
    def place(self) -> tuple[int, int, int]:
        """Sort key within its event."""
        return self.place_at(self.event)

    def place_at(self, event: Event) -> tuple[int, int, int]:
        """The row's order of receivers, then `order`, then registration."""
        who = "M" if self.after_module and "M" in event.receivers else self.receiver
        phase = 2 * event.receivers.index(who)
        return (phase + (who != self.receiver), self.order, self.serial)

    @property
    def steers(self) -> bool:
        """Whether it is known that it may return a signal: its return annotation says so, or, without one,
        its owner.
        """
        annotated = _returns_something(self.function)
        return self.declares_steering if annotated is None else annotated

    @property
    def origin(self) -> str:
        """`file.py:12`, where the function is written."""
        code = getattr(inspect.unwrap(plain_function(self.function)), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else "built in"

    def begin(self, s: Any) -> None:
        """A run begins, or the hook joins one: what was counted before is forgotten."""
        self.account.clear()
        if self.allowance is not None:
            self.allowance.begin()
        for each in self.filters:
            each.begin(s)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but accounting and its error policy is around its call."""
        return self.allowance is None and not self.filters

    def counted(self, accounting: bool, call: Caller) -> Caller:
        """Return a call with its account around it if that is kept."""
        return (
            _counted(call, self.account)
            if (accounting and self.receiver == "H") or self.allowance is not None
            else call
        )

    def caller(
        self,
        accounting: bool,
        disable: Callable[[Listener], None],
        trace: Callable[[Listener, Caller], Caller],
    ) -> Caller:
        """Compose the call: bind, then trace, accounting, budget, filters and error policy; each only if
        needed.
        """
        call = self.counted(accounting, trace(self, self.binding.call))
        if self.allowance is not None:
            call = self.allowance.around(call)
        if self.filters:
            call = filtered(call, self.filters)
        if self.on_error != "raise":
            call = _forgiving(call, self, disable)
        return call


def forgive(error: Exception, listener: Listener, disable: Callable[[Listener], None]) -> None:
    """Handle the failure of a listener by its error policy: warn, and switch it off if the policy says so."""
    if isinstance(
        error, StopTraining | HookError | OptionError
    ):  # a request, and wrong settings that would pass unnoticed
        raise error
    log.warning(
        "%s failed in %s and is %s",
        listener.label,
        listener.event.name,
        "switched off" if listener.on_error == "disable" else "passed over",
        exc_info=True,
    )
    if listener.on_error == "disable":
        disable(listener)


def _forgiving(call: Caller, listener: Listener, disable: Callable[[Listener], None]) -> Caller:
    def forgiving(s: Any) -> Any:
        try:
            return call(s)
        except Exception as error:
            return forgive(error, listener, disable)

    return forgiving


def _counted(call: Caller, account: Account, clock: Callable[[], int] = time.perf_counter_ns) -> Caller:
    def counted(s: Any) -> Any:
        start = clock()
        try:
            return call(s)
        finally:
            spent = clock() - start
            account.calls += 1
            account.total += spent
            if spent > account.worst:
                account.worst = spent

    return counted


def filtered(call: Caller, filters: list[Filter]) -> Caller:
    """A call that is made only if all filters let it through."""
    if len(filters) == 1 and isinstance(filters[0], _When):
        is_ready = filters[0].ready
        return lambda s: call(s) if is_ready(s) else None
    # those that count must see every moment; a predicate, and `once` last of all, only what the others let
    # through
    counting = [each.ready for each in filters if each.counts]
    choosing = [
        each.ready for each in sorted(filters, key=lambda each: each.text == "once") if not each.counts
    ]

    def filter_call(s: Any) -> Any:
        if s.sanity_checking:  # schedules begin with the training
            return None
        if all([each(s) for each in counting]) and all(each(s) for each in choosing):  # noqa: C419
            return call(s)
        return None

    return filter_call


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, out of partials and bound methods."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _returns_something(function: Callable[..., Any]) -> bool | None:
    """Return whether a function is annotated with a type other than None; None if its return type is not
    annotated.
    """
    function = inspect.unwrap(plain_function(function))
    if not inspect.isroutine(function):  # an object with __call__
        function = type(function).__call__
    annotations: Mapping[str, Any] = getattr(function, "__annotations__", {})
    if "return" not in annotations:
        return None
    annotation = annotations["return"]  # text, where annotations are not evaluated
    return (annotation.strip("'\"") if isinstance(annotation, str) else annotation) not in (
        None,
        "None",
        NoneType,
    )


def _declares_steering(owner: Any, event: Event, table: EventTable) -> bool:
    """Return whether the attribute `steers` of a hook or module is True, or names the event; another value is
    not for us.
    """
    declared = getattr(owner, "steers", False)
    if isinstance(declared, tuple | list | set | frozenset):
        names = [each for each in declared if isinstance(each, str)]
        return event in {table.find(name) or table.find(f"on_{name}") for name in names}
    return declared is True


# ---- finding the listeners of an object --------------------------------------------------------------------


def no_event(function: F) -> F:
    """Mark a method named `on_...` that is not meant to be a hook."""
    function.__hookline_no_event__ = True  # type: ignore[attr-defined]
    return function


def make_listener(
    function: Callable[..., Any],
    event: Event,
    table: EventTable,
    *,
    receiver: str,
    name: str,
    owner: Any,
    filters: list[Filter] | None = None,
    by_position: bool = False,
) -> Listener:
    """Bind one function to one event, its filters' predicates included."""
    where = _where(owner, function)
    _refuse_never_run(function, event, where)
    bind = bind_by_position if by_position else bind_by_name
    binding = bind(function, event, table, where, overridden(owner, function))
    filters = [*(filters or ()), *filters_of(function)]
    for each in filters:
        if isinstance(each, _When):
            predicate = bind_by_name(each.predicate, event, table, f"the `when` of {where}")
            each.bound, each.facts = predicate.call, predicate.facts
    return Listener(receiver, name, owner, event, function, binding, filters)


def overridden(owner: Any, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the methods that an override hands its arguments on to, nearest first."""
    inner = inspect.unwrap(function)
    if inner is not function and inspect.ismethod(
        inner
    ):  # an adapter's wrapper around a method of the object it stands for
        owner, function = inner.__self__, inner
    written, classes = plain_function(function), iter(type(owner).__mro__)
    method = getattr(written, "__name__", "")
    if isinstance(function, functools.partial) or not any(
        _plain(vars(cls).get(method)) is written for cls in classes
    ):
        return  # not a method of the class
    for cls in classes:  # those after the one that defines it
        found = vars(cls).get(method)
        if isinstance(found, FunctionType | staticmethod | classmethod):
            if not hands_on(inspect.unwrap(plain_function(function)), method):
                return
            function = found.__get__(owner, type(owner))
            yield function


def find_listeners(owner: Any, receiver: str, name: str, table: EventTable) -> list[Listener]:
    """Every event method of an object. What is meant as one and would never be called is an error, and so are
    two spellings.
    """
    found: dict[str, Listener] = {}
    spelled: dict[str, str] = {}
    for method, events in event_methods(owner, receiver, table):
        function = getattr(owner, method)
        for event in events:
            if event.name in found and spelled[event.name] != method:
                raise HookError(
                    f"{type(owner).__name__} has both {spelled[event.name]} and {method}, which are two "
                    f"spellings of one event, {event.name}. Keep one of them."
                )
            spelled[event.name] = method
            found[event.name] = made = make_listener(
                function, event, table, receiver=receiver, name=name, owner=owner
            )
            made.declares_steering = _declares_steering(owner, event, table)
    return list(found.values())


def event_methods(
    owner: Any, receiver: str, table: EventTable, check: bool = True
) -> Iterator[tuple[str, list[Event]]]:
    """The names of an object's overridden event methods, with the events each one listens to."""
    for member in _members(owner):
        function, method = _plain(member.value), member.name
        if getattr(function, "__hookline_no_event__", False):
            continue
        event = table.find(method, receiver)
        if not member.is_method(owner):
            if check and event is not None and (event.action or method.startswith("on_")):
                _refuse_value(owner, member)
        elif marked := getattr(function, "__hookline_on__", None):
            yield method, list(dict.fromkeys(table.named(each, receiver) for each in marked))
        elif event is not None:
            if not event.action:
                yield method, [event]
        elif check and not _is_anothers(member.cls):
            _refuse_unheard(owner, member, receiver, table)


@dataclass(frozen=True, slots=True)
class _Member:
    """An attribute that the user wrote, on the instance (then `cls` is None) or on a class that is not one of
    our bases.
    """

    name: str
    value: Any
    cls: type | None

    def is_method(self, owner: Any) -> bool:
        """Whether it can be called as a method. Functions that are put on an instance count, other callables
        only as events.
        """
        value = self.value
        if self.cls is None:
            return callable(value) if self.name.startswith("on_") else isinstance(value, _FUNCTIONS)
        if isinstance(value, _BINDING):
            return callable(getattr(owner, self.name, None))
        return callable(value) or isinstance(value, staticmethod | classmethod)


_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_BINDING = (functools.partialmethod, functools.singledispatchmethod, MemberDescriptorType)
"""Descriptors that may give a method of the instance; the last one is an attribute in `__slots__`."""


def _members(owner: Any) -> Iterator[_Member]:
    """The first of each name, as Python would find it."""
    seen = set()
    for name, value in getattr(owner, "__dict__", {}).items():
        seen.add(name)
        yield _Member(name, value, None)
    for cls in type(owner).__mro__:
        ours = _is_ours(cls)
        for name, value in vars(cls).items():
            if name in seen or name.startswith("__"):
                continue
            seen.add(name)
            if not ours:
                yield _Member(name, value, cls)


def _is_ours(cls: type) -> bool:
    """Whether a class was not written by the user."""
    return "__hookline_base__" in vars(cls) or cls is object or cls.__module__.partition(".")[0] == "torch"


def _is_anothers(cls: type | None) -> bool:
    """Whether a class belongs to a library and was not written for Hookline: what it calls its methods is no
    mistake.
    """
    if cls is None or hasattr(cls, "__hookline_base__"):
        return False
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return (
        cls.__module__.partition(".")[0] in sys.stdlib_module_names
        or "site-packages" in file
        or "dist-packages" in file
    )


def overrides(owner: Any, method: str) -> bool:
    """Whether a user's class, not one of our bases, defines this method, or the instance has
    one of its own.
    """
    found = next((member for member in _members(owner) if member.name == method), None)
    return found is not None and found.is_method(owner)


def _plain(value: Any) -> Any:
    """The function of a method as it stands in its class."""
    return plain_function(getattr(value, "__func__", value))


# ---- what would never be called, without a word ------------------------------------------------------------


def _refuse_never_run(function: Callable[..., Any], event: Event, where: str) -> None:
    """A call of these only makes an object; nobody awaits or exhausts it."""
    if isinstance(function, When):
        raise HookError(
            f"{where}: `@when` above {event.name} has no predicate; give it one in parentheses: "
            "`@when(lambda step: step > 5)`."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise HookError(
            f"{where} is `async def`, and a run awaits nothing, so its body would never run. Write `def`; "
            "for work beside the training start a thread in it."
        )
    if inspect.isgeneratorfunction(function) and event.returns in (NOTHING, SIGNAL):
        raise HookError(
            f"{where} contains `yield`, so a call makes a generator and its body would never run. "
            "Take the `yield` out."
        )


def _refuse_value(owner: Any, member: _Member) -> None:
    """`on_step_end = "log"`: a value in the place of an event method. True, False and None are settings and
    switches.
    """
    where, value = f"{type(owner).__name__}.{member.name}", member.value
    if isinstance(value, property | functools.cached_property):
        raise HookError(
            f"{where} is a property, which is read and not called, so it would never be called. Write a "
            "method: take the decorator away."
        )
    if isinstance(value, MemberDescriptorType):
        value = getattr(owner, member.name, None)
    if not (isinstance(value, bool | None) or (member.cls is not None and hasattr(value, "__get__"))):
        raise HookError(
            f"{where} is {described(value)}, which cannot be called. Write a method, "
            f"`def {member.name}(self): ...`, or give the value another name."
        )


def _refuse_unheard(owner: Any, member: _Member, receiver: str, table: EventTable) -> None:
    """A method that is not an event and was surely meant as one is an error; what may be a helper is left
    alone.
    """
    method, where = member.name, f"{type(owner).__name__}.{member.name}"
    if method.startswith("on_"):
        raise HookError(_unknown_method(owner, method, receiver, table))
    if getattr(_plain(member.value), "__hookline_when__", None):
        meant = method if table.find(f"on_{method}", receiver) is None else f"on_{method}"
        hint = closest(method, table.names(receiver)) if meant == method else f" Did you mean {meant!r}?"
        problem = f"{where} has a filter but is no event, so it would never be called.{hint}"
        raise HookError(f"{problem} {OWN}")
    if meant := _meant(owner, member, receiver, table):
        raise HookError(_never_called(owner, method, meant))


OWN = "Mark it with @hookline.no_event if it is a method of your own."


def _never_called(owner: Any, method: str, meant: str) -> str:
    return f"{type(owner).__name__}.{method} would never be called. Did you mean {meant!r}? {OWN}"


def _meant(owner: Any, member: _Member, receiver: str, table: EventTable) -> str:
    """The name that a method should have. An empty string if it may be a helper: its class uses it, or it
    takes other things.
    """
    method, function = member.name, _plain(member.value)
    if method.startswith("_") or not inspect.isfunction(function):
        return ""
    known = table.names(receiver) if receiver == "S" else (*table.names(receiver), *STATE)
    right = misspelling_of(method, known)
    # a name without its `on_`: only in hooks, which exist to be called by events; a module is called from all
    # sides
    if not right and receiver == "H" and _MOMENT.fullmatch(method) and table.find(f"on_{method}", receiver):
        right = f"on_{method}"
    if not right or _is_used(owner, method, function) or _has_beside(owner, right, member.cls):
        return ""
    event, needed = table.find(right, receiver), _required(getattr(owner, method))
    if event is None:
        return right if len(needed) <= STATE[right] else ""
    takes_it = (
        len(needed) <= len(event.facts)
        if event.action
        else all(table.fact(name, event) is not None for name in needed)
    )
    return right if takes_it else ""


def refuse_misspelled(owner: Any, known: Mapping[str, int]) -> None:
    """Refuse what is nearly the name of a method that is called, in a class written for another package.

    known: the names, each with the number of arguments that it is called with. What is not close to one of
    them is a helper.
    """
    known = {**known, **STATE}
    for member in _members(owner):
        method, function = member.name, _plain(member.value)
        if (
            method.startswith("_")
            or _is_anothers(member.cls)
            or getattr(function, "__hookline_no_event__", False)
        ):
            continue
        right = misspelling_of(method, tuple(known)) if inspect.isfunction(function) else ""
        if not right or _is_used(owner, method, function) or _has_beside(owner, right, member.cls):
            continue
        if len(_required(getattr(owner, method))) <= known[right]:
            raise HookError(_never_called(owner, method, right))


STATE: Mapping[str, int] = MappingProxyType({"state_dict": 0, "load_state_dict": 1})
"""What a checkpoint calls besides events, and with how many arguments."""


def _has_beside(owner: Any, right: str, cls: type | None) -> bool:
    """Whether the class of a method, or one derived from it, has the right name too: then the method is not
    meant as that.
    """
    classes = type(owner).__mro__
    until = classes.index(cls) + 1 if cls is not None else 0
    return right in getattr(owner, "__dict__", {}) or any(right in vars(each) for each in classes[:until])


def _required(function: Any) -> list[str]:
    """The parameters that a call must give."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


_MOMENT = re.compile(r"(?:before|after)_\w+|\w+_(?:start|begin|end)")
"""Names that say when, not what: `train_batch_end`; `save_checkpoint` is something that a hook may well do.
"""


def _is_used(owner: Any, method: str, function: Any) -> bool:
    """Whether the classes of an object speak of the method: call it, look it up as text, or have it under
    another name.

    A function without source text may do so.
    """
    for cls in type(owner).__mro__:
        if _is_ours(cls):
            continue
        for name, value in vars(cls).items():
            plain = inspect.unwrap(_plain(value)) if callable(_plain(value)) else None
            if name != method and _plain(value) is function:
                return True
            if inspect.isfunction(plain) and ((tree := parsed(plain)) is None or method in words_of(tree)):
                return True
    return False


def _where(owner: Any, function: Callable[..., Any]) -> str:
    name = getattr(plain_function(function), "__name__", type(function).__name__)
    if owner is None or inspect.isroutine(owner):
        return f"function {name}"
    return f"{type(owner).__name__}.{name}"


def _unknown_method(owner: Any, method: str, receiver: str, table: EventTable) -> str:
    others = [each for each in RECEIVERS if each != receiver and table.find(method, each)]
    if others:
        event = table.find(method, others[0])
        assert event is not None
        heard = " and ".join(RECEIVERS[each] for each in event.receivers)
        return (
            f"{type(owner).__name__}.{method}: this event is heard by {heard}, not by the "
            f"{RECEIVERS[receiver]}."
        )
    names = sorted(name for name in table.names(receiver) if name.startswith("on_"))
    return (
        f"{type(owner).__name__}.{method} is no event.{closest(method, names)} "
        f"{OWN}\n"
        f"  events that the {RECEIVERS[receiver]} can hear: {', '.join(names)}"
    )
