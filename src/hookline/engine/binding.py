"""Turn the parameters of a listener into a caller with one argument, the live state. Done once, at
registration.
"""

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
"""Takes the state and calls the listener with the facts that it requests."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A caller of a listener, and the facts that the listener requests."""

    call: Caller
    facts: tuple[str, ...]
    source: CallSource | None = None
    """The same call as text, for generated code that makes it without another frame; None: only `call` can
    make it.
    """


@dataclass(frozen=True, slots=True)
class CallSource:
    """The text of one call of a function. It consists of expressions from the table's rows, never of the
    user's text.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]
    values: tuple[Any, ...]
    """Arguments that are not facts. The text names them `d[0]`, `d[1]` and so on."""
    before: str = ""
    """A statement to run before the call; `after` runs after it, also if the call raises."""
    after: str = ""
    answers: bool = True
    """Whether the function's return value is used."""

    def text(self, suffix: str = "") -> str:
        """Return the call as text; `f` and `d`, with the suffix, stand for the function and the values."""
        call = self._named(f"f({', '.join(self.arguments)})", suffix)
        return call if self.answers else f"({call},) and None"

    def around(self, suffix: str = "") -> tuple[str, str]:
        """Return the statements before and after the call, or empty strings."""
        return self._named(self.before, suffix), self._named(self.after, suffix)

    def _named(self, text: str, suffix: str) -> str:
        return re.sub(r"\b([fd])(?=[(\[])", rf"\g<1>{suffix}", text) if suffix else text

    def caller(self) -> Caller:
        """Compile the call as a function of the state."""
        before, after = self.around()
        body = f"return {self.text()}"
        if before:
            body = f"{before}\n        try:\n            {body}\n        finally:\n            {after}"
        made = factory(f"def make(f, d):\n    def call(s):\n        {body}\n    return call")
        return made(self.function, self.values)  # type: ignore[no-any-return]

    def published(self, what: Any) -> Caller:
        """Compile the call for a caller that is not a slot of the plan.

        It writes what is running into `s.running`, as slots do.
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
    """Bind a listener whose parameters are names of facts, in any order and any subset.

    overridden: the methods to which it passes its `*args` and `**kwargs`; they receive the facts that they
    request.
    """

    def remaining(own: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> list[inspect.Parameter]:
        requested = {table.fact(each.name, event) for each in own} - {None}
        return [each for each in theirs if table.fact(each.name, event) not in requested]

    arguments = _CallArguments(event, table, function)
    for parameter in _with_overridden(_read_signature(function, where), iter(overridden), remaining, where):
        fact = table.fact(parameter.name, event)
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments.positional_rest()
        elif parameter.kind is parameter.VAR_KEYWORD:
            arguments.keyword_rest()
        elif fact is not None:
            arguments.request(fact, parameter)
        else:
            arguments.leave_out(parameter, where)
    return arguments.binding()


def bind_by_position(
    function: Callable[..., Any],
    event: Event,
    table: EventTable,
    where: str,
    overridden: Iterable[Callable[..., Any]] = (),
) -> Binding:
    """Bind a step or an action, which receives the event's facts in order, whatever its parameters are
    called.

    It requests further facts by name, with additional or keyword-only parameters. A step with `*args` gets
    the batch, its index and, with several loaders, the loader's index. overridden: as in `bind_by_name`.
    """

    def remaining(own: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> list[inspect.Parameter]:
        return theirs[sum(each.kind is not each.KEYWORD_ONLY for each in own) :]

    arguments = _CallArguments(event, table, function)
    positional = [table.fact(name, event) for name in event.facts]
    for parameter in _with_overridden(_read_signature(function, where), iter(overridden), remaining, where):
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments.rest_of_step()
        elif parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif positional and parameter.kind is not parameter.KEYWORD_ONLY:
            fact = positional.pop(0)
            assert fact is not None
            _refuse_swapped(parameter.name, fact, event, table, where)
            arguments.request(fact, parameter)
        elif (fact := table.fact(parameter.name, event)) is not None:
            arguments.request(fact, parameter)
        else:
            arguments.leave_out(parameter, where)
    return arguments.binding()


def _refuse_swapped(name: str, fact: Fact, event: Event, table: EventTable, where: str) -> None:
    """Refuse a positional parameter that has the name of another fact of the event, because it would get the
    wrong value.
    """
    meant = table.fact(name, event)
    if meant is not None and meant is not fact and meant.name in event.facts:
        raise HookError(
            f"{where} gets its arguments by position ({', '.join(event.facts)}), so {name!r} would be the "
            f"{fact.name}. Move it to its position, or make it a keyword-only parameter: `*, {name}`."
        )


IF_SEVERAL = "*(({},) if s.several_loaders else ())"
"""The text of an argument that is passed only if the pass has several loaders."""


class _CallArguments:
    """The arguments of one call, collected as source text."""

    def __init__(self, event: Event, table: EventTable, function: Callable[..., Any]) -> None:
        self.event = event
        self.table = table
        self.function = function
        self.source: list[str] = []
        self.facts: list[str] = []
        self.left_out: list[Any] = []
        """Defaults of positional parameters that are not facts."""

    def request(self, fact: Fact, parameter: inspect.Parameter) -> None:
        expression = self.table.expression(fact, self.event)
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        self.source.append(f"{parameter.name}={expression}" if keyword else expression)
        self.facts.append(fact.name)

    def leave_out(self, parameter: inspect.Parameter, where: str) -> None:
        """Keep the default of a parameter that is not a fact; raise if it has none.

        It is passed explicitly, so that later positional arguments keep their positions.
        """
        if parameter.default is parameter.empty:
            raise HookError(unknown_fact(parameter.name, self.event, self.table, where))
        if parameter.kind is not parameter.KEYWORD_ONLY:
            self.source.append(f"d[{len(self.left_out)}]")
            self.left_out.append(parameter.default)

    def positional_rest(self) -> None:
        for name in self.event.facts:
            fact = self.table.fact(name, self.event)
            if fact is not None and fact.name not in self.facts and not fact.only_named:
                self.source.append(self.table.expression(fact, self.event))
                self.facts.append(fact.name)

    def rest_of_step(self) -> None:
        """Add the arguments that a step or an action has in every trainer: no names of loaders, and the index
        of the loader only where it tells several apart.
        """
        for name in self.event.facts:
            fact = self.table.fact(name, self.event)
            if fact is None or fact.name in self.facts or name == "dataloader_name":
                continue
            source = self.table.expression(fact, self.event)
            is_step = name == "dataloader_idx" and "batch_idx" in self.event.facts
            self.source.append(IF_SEVERAL.format(source) if is_step else source)
            self.facts.append(fact.name)

    def keyword_rest(self) -> None:
        bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        for fact in self.table.facts_at(self.event):
            if fact.name not in self.facts and fact.name not in bound and not fact.costly:
                self.source.append(f"{fact.name}={self.table.expression(fact, self.event)}")
                self.facts.append(fact.name)

    def binding(self) -> Binding:
        source = CallSource(self.function, tuple(self.source), tuple(self.left_out))
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
    """Compile a caller that writes `what` into `s.running` while the expression runs, without another frame.

    expression: uses `s` (the state), `f` and `d`. It is never the user's text.
    """
    return factory(_PUBLISHING.format(expression=expression))(f, d, what)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=512)
def factory(source: str) -> Callable[..., Any]:
    """Compile the definition of a function `make`; the result is cached by text."""
    space: dict[str, Any] = {}
    exec(compile(source, "<hookline binding>", "exec"), space)
    return space["make"]  # type: ignore[no-any-return]


def _read_signature(function: Callable[..., Any], where: str) -> Sequence[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise HookError(
            f"{where} cannot be a hook: its parameters cannot be read ({error}). "
            f"Wrap it: `lambda loss: {getattr(function, '__name__', 'f')}(loss)`."
        ) from None
    if isinstance(function, functools.partial):  # a keyword argument that a partial has bound stays bound
        parameters = [p for p in parameters if p.name not in function.keywords]
    return parameters


_Remaining = Callable[[list[inspect.Parameter], list[inspect.Parameter]], list[inspect.Parameter]]


def _with_overridden(
    own: Sequence[inspect.Parameter],
    overridden: Iterator[Callable[..., Any]],
    remaining: _Remaining,
    where: str,
) -> Sequence[inspect.Parameter]:
    """Return the parameters of an override, with its `*args` and `**kwargs` replaced by the parameters of the
    method that receives them.
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
    theirs = _with_overridden(_read_signature(below, where), overridden, remaining, where)
    left = remaining(named, [each for each in theirs if each.kind not in _VARIABLE])
    if takes_names and (named or not takes_positions):
        # passed by name, they reach the right parameter whatever is passed before them
        left = [
            each.replace(kind=each.KEYWORD_ONLY) if each.kind is not each.POSITIONAL_ONLY else each
            for each in left
        ]
    elif not takes_names:
        left = [each for each in left if each.kind is not each.KEYWORD_ONLY]
    rest = [each for each in theirs if each.kind in _VARIABLE and each.kind in kinds]
    return sorted([*named, *left, *rest], key=lambda each: max(each.kind, each.POSITIONAL_OR_KEYWORD))


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def unknown_fact(name: str, event: Event, table: EventTable, where: str) -> str:
    """Return the text of the error for a parameter that is not a fact of the event."""
    facts = table.facts_at(event)
    names = [n for fact in facts for n in (fact.name, *fact.spellings)]
    common = ", ".join(fact.name for fact in facts if fact.name not in event.facts)
    elsewhere = table.events_with(name)
    hint = closest(name, names)
    if elsewhere:
        from hookline.util.text import list_some  # only an error needs it

        here = "; here use metrics['train/loss']" if name == "loss" and "metrics" in event.facts else ""
        hint = f" It is an argument of {list_some(elsewhere, 4)}{here}."
    return (
        f"{where}: {event.name} has no argument {name!r}.{hint}\n"
        f"  arguments of {event.name}: {', '.join(event.facts) or 'none of its own'}\n"
        f"  arguments of every event: {common}\n"
        f"  (a parameter with a default value may have any name)"
    )
