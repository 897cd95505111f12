"""Listeners: a method or function bound to one event, and how its caller is composed."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, NoneType
from typing import Any, TypeVar

from hookline.engine.binding import Binding, Caller, bind_by_name
from hookline.engine.cost import Account, Allowance
from hookline.engine.events import EVENTS, NOTHING, RECEIVERS, SIGNAL, Event, EventTable
from hookline.engine.filters import Filter, FilterSettings, PredicateFilter, filters_of
from hookline.engine.source_text import (
    function_in_closure,
    parse_source,
    passes_arguments_on,
    plain_function,
    words_of,
)
from hookline.engine.table import LISTED, meant_name
from hookline.util.errors import ELSEWHERE, HookError, OptionError, StopTraining, closest, described

F = TypeVar("F", bound=Callable[..., Any])
ON_ERROR = ("raise", "warn", "disable")
log = logging.getLogger("hookline")
_warn_once = functools.cache(log.warning)


@dataclass(slots=True, eq=False)
class Listener:
    """A function bound to one event, with its position among listeners, its filters and its error policy."""

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
        """Return all facts that it requests, including those of its filters."""
        return (*self.binding.facts, *(fact for each in self.filters for fact in each.facts))

    @property
    def label(self) -> str:
        """Return `hook 'name'`, `module Net`, ..."""
        return f"hook {self.name!r}" if self.receiver == "H" else f"{RECEIVERS[self.receiver]} {self.name}"

    @property
    def key(self) -> tuple[str, str]:
        """Return the receiver and the name of its owner."""
        return self.receiver, self.name

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Return the key that sorts the listeners of its event."""
        return self.sort_key_at(self.event)

    def sort_key_at(self, event: Event) -> tuple[int, int, int]:
        """Return the key that sorts it at an event: the order of receivers, `order`, then registration."""
        who = "M" if self.after_module and "M" in event.receivers else self.receiver
        return 2 * event.receivers.index(who) + (who != self.receiver), self.order, self.serial

    @property
    def steers(self) -> bool:
        """Return whether it declares that it may return a signal, by its return annotation or, without one,
        by its owner.
        """
        annotated = _returns_something(self.function)
        return self.declares_steering if annotated is None else annotated

    @property
    def origin(self) -> str:
        """Return where the function is defined: `file.py:12`, or in a notebook `Cell In[3], line 12`."""
        from hookline.util.terminal import place  # only messages and explain ask for it

        code = getattr(inspect.unwrap(plain_function(self.function)), "__code__", None)
        return place(code.co_filename, code.co_firstlineno) if code else "built in"

    def begin(self, s: Any) -> None:
        """Reset the account, the budget and the filters when a run begins or the hook joins one."""
        self.account.clear()
        if self.allowance is not None:
            self.allowance.begin()
        for filter_ in self.filters:
            filter_.begin(s)

    @property
    def is_plain(self) -> bool:
        """Return whether accounting and the error policy are all that surrounds its call."""
        return self.allowance is None and not self.filters

    def counted(self, accounting: bool, call: Caller) -> Caller:
        """Return the call with its account around it, if an account is kept."""
        return (
            _with_account(call, self.account)
            if (accounting and self.receiver == "H") or self.allowance is not None
            else call
        )

    def caller(
        self,
        accounting: bool,
        disable: Callable[[Listener], None],
        trace: Callable[[Listener, Caller], Caller],
    ) -> Caller:
        """Compose the call: bind, trace, account, budget, filters and error policy, each only if needed."""
        call = self.counted(accounting, trace(self, self.binding.call))
        if self.allowance is not None:
            call = self.allowance.around(call)
        if self.filters:
            call = with_filters(call, self.filters)
        if self.on_error != "raise":
            call = _with_error_policy(call, self, disable)
        return call


def apply_error_policy(error: Exception, listener: Listener, disable: Callable[[Listener], None]) -> None:
    """Handle the failure of a listener by its error policy: log a warning, and disable the hook if the policy
    says so.
    """
    if isinstance(error, StopTraining | HookError | OptionError):
        raise error  # a request to stop, or a wrong setting, which must not go unnoticed
    log.warning(
        "%s failed in %s and is %s",
        listener.label,
        listener.event.name,
        "switched off" if listener.on_error == "disable" else "skipped",
        exc_info=True,
    )
    if listener.on_error == "disable":
        disable(listener)


def _with_error_policy(call: Caller, listener: Listener, disable: Callable[[Listener], None]) -> Caller:
    def guarded(s: Any) -> Any:
        try:
            return call(s)
        except Exception as error:
            return apply_error_policy(error, listener, disable)

    return guarded


def _with_account(call: Caller, account: Account, clock: Callable[[], int] = time.perf_counter_ns) -> Caller:
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


def with_filters(call: Caller, filters: list[Filter]) -> Caller:
    """Return a caller that makes the call only if all filters allow it."""
    if len(filters) == 1 and isinstance(filters[0], PredicateFilter):
        is_ready = filters[0].ready
        return lambda s: call(s) if is_ready(s) else None
    # a filter that counts must see every event; the others, with `once` as the last, only see an event that
    # the filters before them allow
    counting = [each.ready for each in filters if each.counts]
    deciding = [
        each.ready for each in sorted(filters, key=lambda each: each.text == "once") if not each.counts
    ]

    def filter_call(s: Any) -> Any:
        if (
            not s.sanity_checking  # schedules start with training
            and all([each(s) for each in counting])  # noqa: C419
            and all(each(s) for each in deciding)
        ):
            return call(s)
        return None

    return filter_call


def _returns_something(function: Callable[..., Any]) -> bool | None:
    """Return whether a function's return annotation is other than None; None if it has no annotation."""
    function = inspect.unwrap(plain_function(function))
    if not inspect.isroutine(function):  # an object with __call__
        function = type(function).__call__
    annotations: Mapping[str, Any] = getattr(function, "__annotations__", {})
    if "return" not in annotations:
        return None
    annotation = annotations["return"]
    if isinstance(annotation, str):  # annotations are not evaluated
        annotation = annotation.strip("'\"")
    return annotation not in (None, "None", NoneType)


def _declares_steering(owner: Any, event: Event, table: EventTable) -> bool:
    """Return whether the attribute `steers` of a hook or module is True or names the event."""
    declared = getattr(owner, "steers", False)
    if isinstance(declared, tuple | list | set | frozenset):
        return event in {
            table.find(name) or table.find(f"on_{name}") for name in declared if isinstance(name, str)
        }
    return declared is True


# ---- finding the listeners of an object --------------------------------------------------------------------


def no_event(function: F) -> F:
    """Mark a method named `on_...` that is not meant to be a hook. function: the method."""
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
    bind: Callable[..., Binding] = bind_by_name,
) -> Listener:
    """Bind one function to one event, including the predicates of its filters."""
    where = _describe_function(owner, function)
    _refuse_never_run(function, event, where)
    below = overridden_methods(owner, function)
    inner = undecorated_method(owner, function)
    if inner is not None and all(table.fact(name, event) is not None for name in _required_parameters(inner)):
        below = itertools.chain([inner], overridden_methods(owner, inner))
    binding = bind(function, event, table, where, below)
    filters = [*(filters or ()), *filters_of(function)]
    for made in filters:
        if isinstance(made, PredicateFilter):
            predicate = bind_by_name(made.predicate, event, table, f"the `when` of {where}")
            made.bound, made.facts = predicate.call, predicate.facts
    return Listener(receiver, name, owner, event, function, binding, filters)


def overridden_methods(owner: Any, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the methods to which an override passes its arguments, nearest first."""
    owner, function = _original_of(owner, function)
    written, classes = plain_function(function), iter(type(owner).__mro__)
    method = getattr(written, "__name__", "")
    if isinstance(function, functools.partial) or not any(
        _plain_member(vars(cls).get(method)) is written for cls in classes
    ):
        return  # not a method of the class
    for cls in classes:  # the iterator continues after the class that defines it
        found = vars(cls).get(method)
        if isinstance(found, FunctionType | staticmethod | classmethod):
            if not passes_arguments_on(inspect.unwrap(plain_function(function)), method):
                return
            function = found.__get__(owner, type(owner))
            yield function


def _original_of(owner: Any, function: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Return a method and its owner; for an adapter's wrapper, those of the original."""
    inner = inspect.unwrap(function)
    if inner is not function and inspect.ismethod(inner):
        return inner.__self__, inner
    return owner, function


def undecorated_method(owner: Any, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the method that a decorator without functools.wraps closes over, or None."""
    owner, function = _original_of(owner, function)
    written = plain_function(function)
    for cls in type(owner).__mro__ if getattr(written, "__closure__", None) else ():
        for method, value in vars(cls).items():
            if _plain_member(value) is written and inspect.isfunction(written):
                found = function_in_closure(written, method)
                return None if found is None else found.__get__(owner, type(owner))
    return None


def find_listeners(owner: Any, receiver: str, name: str, table: EventTable) -> list[Listener]:
    """Return the listeners of an object's event methods; the rows of its class, if it has any, bind them.

    Refuse two spellings of one event, and a method that looks like an event but would never be called.
    """
    found: dict[str, Listener] = {}
    spelled: dict[str, str] = {}
    rows = getattr(owner, "__hookline_rows__", {})
    for method, events in event_methods(owner, receiver, table):
        function = getattr(owner, method)
        has_row = method in rows and not hasattr(function, "__hookline_on__")
        bind = rows[method].bind if has_row else bind_by_name
        for event in events:
            if event.name in found and spelled[event.name] != method:
                raise HookError(
                    f"{type(owner).__name__} has both {spelled[event.name]} and {method}, which are two "
                    f"spellings of one event, {event.name}. Keep one of them."
                )
            spelled[event.name] = method
            found[event.name] = made = make_listener(
                function, event, table, receiver=receiver, name=name, owner=owner, bind=bind
            )
            made.declares_steering = _declares_steering(owner, event, table)
    return list(found.values())


def event_methods(
    owner: Any, receiver: str, table: EventTable, check: bool = True
) -> Iterator[tuple[str, list[Event]]]:
    """Yield the name of each overridden event method, with the events that it listens to."""
    rows = getattr(owner, "__hookline_rows__", {})  # of another system: by method, its event and binder
    for member in _members(owner):
        function, method = _plain_member(member.value), member.name
        if getattr(function, "__hookline_no_event__", False):
            continue
        event = table[rows[method].event] if method in rows else table.find(method, receiver)
        if not member.is_method(owner):
            if check and event is not None and (event.action or method.startswith("on_")):
                _refuse_value(owner, member)
        elif marked := getattr(function, "__hookline_on__", None):
            yield method, list(dict.fromkeys(table.named(each, receiver) for each in marked))
        elif event is not None:
            if not event.action:
                yield method, [event]
        elif check and not _is_third_party(member.cls):
            _refuse_unknown(owner, member, receiver, table)


@dataclass(frozen=True, slots=True)
class _Member:
    """An attribute that the user defined, on the instance (`cls` is None) or on a class that is not one of
    our bases.
    """

    name: str
    value: Any
    cls: type | None

    def is_method(self, owner: Any) -> bool:
        """Return whether it can be called as a method.

        On an instance, functions count; other callables count only under the name of an event.
        """
        value = self.value
        if self.cls is None:
            return callable(value) if self.name.startswith("on_") else isinstance(value, _FUNCTIONS)
        if isinstance(value, _DESCRIPTORS):
            return callable(getattr(owner, self.name, None))
        return callable(value) or isinstance(value, staticmethod | classmethod)


_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_DESCRIPTORS = (functools.partialmethod, functools.singledispatchmethod, MemberDescriptorType)
"""Descriptors that may give a method of the instance; the last one is an attribute in `__slots__`."""


def _members(owner: Any) -> Iterator[_Member]:
    """Yield the attributes of an object; for each name, the one that Python would find."""
    seen = set()
    for name, value in getattr(owner, "__dict__", {}).items():
        seen.add(name)
        yield _Member(name, value, None)
    for cls in type(owner).__mro__:
        ours = _is_framework_class(cls)
        for name, value in vars(cls).items():
            if name in seen or name.startswith("__"):
                continue
            seen.add(name)
            if not ours:
                yield _Member(name, value, cls)


def _is_framework_class(cls: type) -> bool:
    """Return whether a class belongs to Hookline, torch or Python itself."""
    return "__hookline_base__" in vars(cls) or cls is object or cls.__module__.partition(".")[0] == "torch"


def _is_third_party(cls: type | None) -> bool:
    """Return whether a class belongs to a library that was not written for Hookline. Its method names are not
    checked.
    """
    if cls is None or hasattr(cls, "__hookline_base__"):
        return False
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    return is_installed or cls.__module__.partition(".")[0] in sys.stdlib_module_names


def overrides(owner: Any, method: str) -> bool:
    """Return whether the instance or a class of the user defines this method."""
    home = next((c for c in (owner, *type(owner).__mro__) if method in getattr(c, "__dict__", ())), None)
    if home is None or (home is not owner and _is_framework_class(home)):
        return False
    return _Member(method, vars(home)[method], None if home is owner else home).is_method(owner)


def _plain_member(value: Any) -> Any:
    """Return the function of a method as its class defines it."""
    return plain_function(getattr(value, "__func__", value))


# ---- methods that would silently never be called -----------------------------------------------------------


def _refuse_never_run(function: Callable[..., Any], event: Event, where: str) -> None:
    """Refuse coroutines and generators: a call only creates an object, and its body would never run."""
    if isinstance(function, FilterSettings):
        raise HookError(
            f"{where}: `@when` above {event.name} has no predicate; give it one in parentheses: "
            "`@when(lambda step: step > 5)`."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise HookError(
            f"{where} is `async def`. The trainer does not await hooks, so its body would never run. Write "
            "`def`, and start a thread in it for work in the background."
        )
    if inspect.isgeneratorfunction(function) and event.returns in (NOTHING, SIGNAL):
        raise HookError(
            f"{where} contains `yield`, so a call makes a generator and its body would never run. "
            "Remove the `yield`."
        )


def _refuse_value(owner: Any, member: _Member) -> None:
    """Refuse a value under the name of an event method, such as `on_step_end = "log"`.

    True, False and None are allowed as settings.
    """
    where, value = f"{type(owner).__name__}.{member.name}", member.value
    if isinstance(value, property | functools.cached_property):
        raise HookError(
            f"{where} is a property. A property is not called as an event method, so its code would never "
            "run. Make it a method: remove the decorator."
        )
    if isinstance(value, MemberDescriptorType):
        value = getattr(owner, member.name, None)
    if not (isinstance(value, bool | None) or (member.cls is not None and hasattr(value, "__get__"))):
        raise HookError(
            f"{where} is {described(value)}, which cannot be called. Write a method, "
            f"`def {member.name}(self): ...`, or give the value another name."
        )


def _refuse_unknown(owner: Any, member: _Member, receiver: str, table: EventTable) -> None:
    """Refuse a method that is not an event but was clearly meant as one; ignore what may be a helper."""
    method, where = member.name, f"{type(owner).__name__}.{member.name}"
    if method.startswith("on_"):
        raise HookError(_unknown_method(owner, method, receiver, table))
    if getattr(_plain_member(member.value), "__hookline_when__", None):
        meant = method if table.find(f"on_{method}", receiver) is None else f"on_{method}"
        hint = closest(method, table.names(receiver)) if meant == method else f" Did you mean {meant!r}?"
        raise HookError(
            f"{where} has a filter but is not an event, so it would never be called.{hint} {_OWN}"
        )
    if meant := _meant(owner, member, receiver, table):
        raise HookError(_never_called(owner, method, meant))


_OWN = "Mark it with @hookline.no_event if it is a method of your own."


def _never_called(owner: Any, method: str, meant: str) -> str:
    return f"{type(owner).__name__}.{method} would never be called. Did you mean {meant!r}? {_OWN}"


def _meant(owner: Any, member: _Member, receiver: str, table: EventTable) -> str:
    """Return the event name that a method should have.

    The string is empty if the method may be a helper: its class uses it, or its parameters do not fit.
    """
    method, function = member.name, _plain_member(member.value)
    if method.startswith("_") or not inspect.isfunction(function):
        return ""
    right = meant_name(
        method, (*table.names(receiver), *(() if receiver == "S" else STATE)), is_hook=receiver == "H"
    )
    if (instead := ELSEWHERE.get(method, ("",))[0]) and table.find(instead, receiver):
        is_own = _is_used(owner, method, function, unread=False) or _has_both(owner, instead, member.cls)
        return "" if is_own else instead
    if not right or _is_used(owner, method, function) or _has_both(owner, right, member.cls):
        return ""
    event, needed = table.find(right, receiver), _required_parameters(getattr(owner, method))
    if event is None:
        return right if len(needed) <= STATE[right] else ""
    facts = [table.fact(name, event) for name in needed]
    is_callable_with_facts = len(needed) <= len(event.facts) if event.action else None not in facts
    return right if is_callable_with_facts else ""


def refuse_misspelled(owner: Any, known: Mapping[str, int], is_hook: bool = False) -> None:
    """Refuse a misspelled method name in a class written for another package.

    known: the names, each with the number of arguments of its call. A name that is not close to one of them
    is a helper. is_hook: whether the object is only a hook: then a name without its `on_` is refused, too,
    and any other method `on_...` that nothing in the class uses is a warning.
    """
    known = {**known, **STATE}
    for member in _members(owner):
        method, function = member.name, _plain_member(member.value)
        is_checked = inspect.isfunction(function) and not method.startswith("_") and method not in known
        if not is_checked or getattr(function, "__hookline_no_event__", False):
            continue
        right = meant_name(method, tuple(known), is_hook)
        is_unknown = is_hook and method.startswith("on_")
        if (
            not (right or is_unknown)
            or any(method in vars(each) and _is_third_party(each) for each in type(owner).__mro__)
            or _is_used(owner, method, function)
        ):
            continue
        if (
            right
            and not _has_both(owner, right, member.cls)
            and len(_required_parameters(getattr(owner, method))) <= known[right]
        ):
            raise HookError(_never_called(owner, method, right))
        if is_unknown:
            event = EVENTS.find(meant_name(method, EVENTS.names("H"), is_hook) or method)
            _warn_once(
                f"{type(owner).__name__}.{method} would never be called."
                f"{closest(method if event is None else event.name, known)} {_OWN}"
            )


STATE: Mapping[str, int] = MappingProxyType({"state_dict": 0, "load_state_dict": 1})
"""Methods that a checkpoint calls, with their number of arguments."""


def _has_both(owner: Any, right: str, cls: type | None) -> bool:
    """Return whether the class of a method, or a class derived from it, also has the right name. Then it is
    not a misspelling.
    """
    classes = type(owner).__mro__
    until = classes.index(cls) + 1 if cls is not None else 0
    return right in getattr(owner, "__dict__", {}) or any(right in vars(each) for each in classes[:until])


def _required_parameters(function: Any) -> list[str]:
    """Return the names of the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def _is_used(owner: Any, method: str, function: Any, unread: bool = True) -> bool:
    """Return whether the classes of an object mention the method: call it, look it up as text, or have it
    under another name.

    unread: whether a function without source text counts as a mention.
    """
    for cls in type(owner).__mro__:
        if _is_framework_class(cls):
            continue
        for name, value in vars(cls).items():
            plain = inspect.unwrap(_plain_member(value)) if callable(_plain_member(value)) else None
            if name != method and _plain_member(value) is function:
                return True
            tree = parse_source(plain) if inspect.isfunction(plain) else None
            if method in words_of(tree) if tree is not None else unread and inspect.isfunction(plain):
                return True
    return False


def _describe_function(owner: Any, function: Callable[..., Any]) -> str:
    name = getattr(plain_function(function), "__name__", type(function).__name__)
    if owner is None or inspect.isroutine(owner):
        return f"function {name}"
    return f"{type(owner).__name__}.{name}"


def _unknown_method(owner: Any, method: str, receiver: str, table: EventTable) -> str:
    where = f"{type(owner).__name__}.{method}"
    others = [each for each in RECEIVERS if each != receiver and table.find(method, each)]
    if others:
        event = table.find(method, others[0])
        assert event is not None
        receivers = " and ".join(RECEIVERS[each] for each in event.receivers)
        return f"{where}: this event is for {receivers}, not for the {RECEIVERS[receiver]}."
    names = [name for name in table.names(receiver) if name.startswith("on_")]
    return f"{where} is not an event.{closest(method, names)} {LISTED} {_OWN}"
