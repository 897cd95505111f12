"""From a method's parameters to a caller of one argument, the live state. Done once, at registration."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.engine.events import Event, EventTable, Fact
from hookline.util.errors import HookError, closest

Caller = Callable[[Any], Any]
"""Takes the state, calls the listener with the facts it asked for."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A listener made callable, and what it asked for."""

    call: Caller
    facts: tuple[str, ...]
    source: Source | None = None
    """The same call as text, for code that makes it without a frame of its own; None: it can only be made by
    `call`.
    """


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one call of a function with expressions of the table's rows. It is never text of the
    user's.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]
    values: tuple[Any, ...]
    """What the arguments name besides facts, as `d[0]`, `d[1]` and so on."""
    before: str = ""
    """A statement that comes before the call, and one that comes after it, whatever it raises."""
    after: str = ""
    answers: bool = True
    """Whether what the function returns counts."""

    def text(self, suffix: str = "") -> str:
        """Return the call; `f` and `d`, each with the suffix, stand for the function and the values."""
        call = self._named(f"f({', '.join(self.arguments)})", suffix)
        return call if self.answers else f"({call},) and None"

    def around(self, suffix: str = "") -> tuple[str, str]:
        """Return the statements before and after the call; empty if there are none."""
        return self._named(self.before, suffix), self._named(self.after, suffix)

    def _named(self, text: str, suffix: str) -> str:
        return re.sub(r"\b([fd])(?=[(\[])", rf"\g<1>{suffix}", text) if suffix else text

    def caller(self) -> Caller:
        """Make the call as a function of the state."""
        before, after = self.around()
        body = f"return {self.text()}"
        if before:
            body = f"{before}\n        try:\n            {body}\n        finally:\n            {after}"
        made = factory(f"def make(f, d):\n    def call(s):\n        {body}\n    return call")
        return made(self.function, self.values)  # type: ignore[no-any-return]

    def published(self, what: Any) -> Caller:
        """Make the call for a caller that is not a slot of the plan: it also writes into `s.running` what
        runs, as slots do.
        """
        if self.before:
            return publishing("f(s)", what, self.caller())
        return publishing(self.text(), what, self.function, self.values)


def bind_by_name(
    function: Callable[..., Any],
    event: Event,
    table: EventTable,
    where: str,
    overridden: Iterable[Callable[..., Any]] = (),
) -> Binding:
    """Bind a listener whose parameters are the names of facts, in any order, any subset.

    overridden: the methods that it hands its `*args` and `**kwargs` on to: they get what these ask for.
    """

    def are_left(own: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> list[inspect.Parameter]:
        asked = {table.fact(each.name, event) for each in own} - {None}
        return [each for each in theirs if table.fact(each.name, event) not in asked]

    arguments = _Arguments(event, table, function)
    for parameter in _with_overridden(_parameters(function, where), iter(overridden), are_left, where):
        fact = table.fact(parameter.name, event)
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments.positional_rest()
        elif parameter.kind is parameter.VAR_KEYWORD:
            arguments.keyword_rest()
        elif fact is not None:
            arguments.ask(fact, parameter)
        elif parameter.default is parameter.empty:
            raise HookError(_no_such_fact(parameter.name, event, table, where))
        else:
            arguments.leave_out(parameter)
    return arguments.binding()


def bind_by_position(
    function: Callable[..., Any],
    event: Event,
    table: EventTable,
    where: str,
    overridden: Iterable[Callable[..., Any]] = (),
) -> Binding:
    """Bind a step or an action: the event's facts in their order, as many as it takes, whatever it calls
    them.

    Parameters beyond those, and keyword-only ones, are asked for by name. overridden: as in `bind_by_name`.
    """

    def are_left(own: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> list[inspect.Parameter]:
        return theirs[sum(each.kind is not each.KEYWORD_ONLY for each in own) :]

    arguments = _Arguments(event, table, function)
    waiting = [table.fact(name, event) for name in event.facts]
    for parameter in _with_overridden(_parameters(function, where), iter(overridden), are_left, where):
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments.positional_rest()
        elif parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif waiting and parameter.kind is not parameter.KEYWORD_ONLY:
            fact = waiting.pop(0)
            assert fact is not None
            _refuse_swapped(parameter.name, fact, event, table, where)
            arguments.ask(fact, parameter)
        elif (fact := table.fact(parameter.name, event)) is not None:
            arguments.ask(fact, parameter)
        elif parameter.default is parameter.empty:
            raise HookError(_no_such_fact(parameter.name, event, table, where))
        else:
            arguments.leave_out(parameter)
    return arguments.binding()


def _refuse_swapped(name: str, fact: Fact, event: Event, table: EventTable, where: str) -> None:
    """Names are free, but one that is another of the event's own facts would get the wrong value without a
    word.
    """
    meant = table.fact(name, event)
    if meant is not None and meant is not fact and meant.name in event.facts:
        raise HookError(
            f"{where} gets its arguments by position ({', '.join(event.facts)}), so {name!r} would be the "
            f"{fact.name}. Put it in its place, or ask for it by keyword: `*, {name}`."
        )


class _Arguments:
    """Collects the source of the arguments of one call."""

    def __init__(self, event: Event, table: EventTable, function: Callable[..., Any]) -> None:
        self.event = event
        self.table = table
        self.function = function
        self.source: list[str] = []
        self.facts: list[str] = []
        self.left_out: list[Any] = []
        """Defaults of positional parameters that nothing is passed for."""

    def ask(self, fact: Fact, parameter: inspect.Parameter) -> None:
        expression = self.table.expression(fact, self.event)
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        self.source.append(f"{parameter.name}={expression}" if keyword else expression)
        self.facts.append(fact.name)

    def leave_out(self, parameter: inspect.Parameter) -> None:
        """The parameter keeps its default, which is passed along so that those after it keep their places."""
        if parameter.kind is not parameter.KEYWORD_ONLY:
            self.source.append(f"d[{len(self.left_out)}]")
            self.left_out.append(parameter.default)

    def positional_rest(self) -> None:
        for name in self.event.facts:
            fact = self.table.fact(name, self.event)
            if fact is not None and fact.name not in self.facts:
                self.source.append(self.table.expression(fact, self.event))
                self.facts.append(fact.name)

    def keyword_rest(self) -> None:
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        for fact in self.table.facts_at(self.event):
            if fact.name not in self.facts and fact.name not in bound and not fact.costly:
                self.source.append(f"{fact.name}={self.table.expression(fact, self.event)}")
                self.facts.append(fact.name)

    def binding(self) -> Binding:
        source = Source(self.function, tuple(self.source), tuple(self.left_out))
        return Binding(source.caller(), tuple(self.facts), source)


_PUBLISHING = """
def make(f, d, what):
    def call(s):
        outer = s.running
        s.running = (what, outer)
        try:
            return {expression}
        finally:
            s.running = outer
    return call
"""


def publishing(
    expression: str, what: Any, f: Callable[..., Any] | None = None, d: Sequence[Any] = ()
) -> Caller:
    """Compile a caller of the state that writes what runs while it runs, without a frame between it and the
    function.

    expression: of `s`, the state, `f` and `d`. It is never text of the user's.
    """
    return factory(_PUBLISHING.format(expression=expression))(f, d, what)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=512)
def factory(source: str) -> Callable[..., Any]:
    """Compile the definition of a function `make`, once for each text."""
    space: dict[str, Any] = {}
    exec(compile(source, "<hookline binding>", "exec"), space)
    return space["make"]  # type: ignore[no-any-return]


def _parameters(function: Callable[..., Any], where: str) -> Sequence[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise HookError(
            f"{where} cannot be a hook: its parameters cannot be read ({error}). "
            f"Wrap it: `lambda loss: {getattr(function, '__name__', 'f')}(loss)`."
        ) from None
    if isinstance(function, functools.partial):  # what a partial has bound by keyword stays bound
        parameters = [p for p in parameters if p.name not in function.keywords]
    return parameters


_Left = Callable[[list[inspect.Parameter], list[inspect.Parameter]], list[inspect.Parameter]]


def _with_overridden(
    own: Sequence[inspect.Parameter], overridden: Iterator[Callable[..., Any]], are_left: _Left, where: str
) -> Sequence[inspect.Parameter]:
    """The parameters of an override, with those of the method that it hands its `*args` and `**kwargs` on to
    in their place.
    """
    kinds = {each.kind for each in own}
    takes_positions, takes_names = (
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )
    below = next(overridden, None) if takes_positions or takes_names else None
    if below is None:
        return own
    named = [each for each in own if each.kind not in _VARIABLE]
    theirs = _with_overridden(_parameters(below, where), overridden, are_left, where)
    left = are_left(named, [each for each in theirs if each.kind not in _VARIABLE])
    if takes_names and (
        named or not takes_positions
    ):  # by name they reach the right parameter, whatever is passed before them
        left = [
            each.replace(kind=each.KEYWORD_ONLY) if each.kind is not each.POSITIONAL_ONLY else each
            for each in left
        ]
    elif not takes_names:
        left = [each for each in left if each.kind is not each.KEYWORD_ONLY]
    rest = [each for each in theirs if each.kind in _VARIABLE and each.kind in kinds]
    return sorted([*named, *left, *rest], key=lambda each: max(each.kind, each.POSITIONAL_OR_KEYWORD))


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _no_such_fact(name: str, event: Event, table: EventTable, where: str) -> str:
    facts = table.facts_at(event)
    names = [n for fact in facts for n in (fact.name, *fact.spellings)]
    own = ", ".join(event.facts) or "none of its own"
    common = ", ".join(fact.name for fact in facts if fact.name not in event.facts)
    return (
        f"{where} asks for {name!r}, which is no fact of {event.name}.{closest(name, names)}\n"
        f"  facts of {event.name}: {own}\n"
        f"  facts known at every event: {common}\n"
        f"  (a parameter with a default value may have any name)"
    )
