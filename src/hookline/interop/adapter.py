"""Call the hooks of a dialect in Hookline's plan: with facts by name, and otherwise with its documented
arguments by position.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hookline.engine.events import EVENTS
from hookline.engine.hook import Hook
from hookline.engine.source_text import closed_over

Reader = Callable[[Any], Any]
"""Converts a fact of Hookline to the value that the dialect documents."""
MARKS = ("__hookline_on__", "__hookline_no_event__")
"""Attributes of functions that are adapted already, or that the user has marked as not an event."""


@dataclass(frozen=True, slots=True)
class Row:
    """A method of a dialect: its event, and its arguments in the order in which the dialect passes them."""

    event: str
    arguments: tuple[str, ...] = ()
    reads: Mapping[str, Reader] = field(default_factory=dict)
    in_sanity_check: bool = True
    """Whether it is called in the sanity check; systems that have none would count it as an evaluation."""
    other_forms: tuple[tuple[str, ...], ...] = ()
    """Further argument lists with which the method is written and called."""
    if_several: tuple[str, ...] = ()
    """Arguments that a method with `*args` gets only if the pass has several loaders."""

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """Return all argument lists, the documented one first."""
        return (self.arguments, *self.other_forms)


class DialectHook(Hook):
    """The base of a dialect's hook classes.

    A method that is called directly, as a test or a hand-written loop does, takes the arguments that it
    declares. If it has several forms, it also accepts all arguments of one of them.
    """

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__: ClassVar[Mapping[str, Row]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adapt_methods(cls, cls.__hookline_rows__)


def adapt_methods(cls: type, rows: Mapping[str, Row]) -> None:
    """Make the methods that a class overrides listen to their events; for hooks, modules and data modules of
    a dialect.
    """
    for method, row in rows.items():
        written_in = next((each for each in cls.__mro__ if method in vars(each)), Hook)
        function = vars(written_in).get(method)
        is_stub = "__hookline_base__" in vars(written_in)
        if (
            not is_stub
            and inspect.isfunction(function)
            and not any(hasattr(function, mark) for mark in MARKS)
        ):
            setattr(cls, method, _adapted(function, method, row))


def _adapted(function: Callable[..., Any], method: str, row: Row) -> Callable[..., Any]:
    """Return the method for the plan: it requests facts by name and receives them as the dialect has them."""
    arguments = _Arguments(function, row, method)
    event = EVENTS[row.event]
    is_same_event = method in (event.name, *event.spellings) and row.in_sanity_check
    picks = arguments.picks()
    if is_same_event and not picks and not any(name in row.reads for name in arguments.facts):
        if not arguments.by_position:
            return function  # no wrapper is needed
        if len(arguments.passed) == len(arguments.order) == len(arguments.facts):
            named: Any = function
            named.__signature__ = arguments.signature_in_order()
            named.__hookline_on__ = [row.event]
            return function
    directly = _accepting_longer_forms(function, picks) if picks else function
    skip = "" if row.in_sanity_check else "None if sanity_checking else "
    # a direct call does not pass `sanity_checking` and reaches the user's method itself
    source = (
        "lambda f, d, r: lambda self, *given, sanity_checking=None, **named: "
        f"d(self, *given, **named) if sanity_checking is None else "
        f"{skip}f({', '.join(['self', *arguments.passed])})"
    )
    adapted: Any = functools.wraps(function)(
        eval(compile(source, "<hookline dialect>", "eval"))(function, directly, row.reads)
    )
    adapted.__signature__ = arguments.signature()
    adapted.__hookline_on__ = [row.event]
    return adapted  # type: ignore[no-any-return]


def _accepting_longer_forms(
    function: Callable[..., Any], picks: dict[int, tuple[int, ...]]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def accept_longer_forms(self: Any, *given: Any, **named: Any) -> Any:
        pick = picks.get(len(given))
        return (
            function(self, *given, **named)
            if pick is None
            else function(self, *[given[at] for at in pick], **named)
        )

    return accept_longer_forms


def _parameters(function: Callable[..., Any], row: Row, method: str) -> list[inspect.Parameter]:
    """Return the parameters after `self`; of a decorator without functools.wraps, those of the method under
    it, if it does not have more than the dialect passes.
    """
    parameters = list(inspect.signature(function).parameters.values())
    takes_rest = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if takes_rest and inspect.isfunction(function) and (inner := closed_over(function, method)):
        theirs = list(inspect.signature(inner).parameters.values())[1:]
        needed = [each for each in theirs if each.kind is each.POSITIONAL_OR_KEYWORD]
        if len(needed) <= max(map(len, row.forms)):
            return theirs
    return (
        parameters
        if parameters[:1] and parameters[0].kind is parameters[0].VAR_POSITIONAL
        else parameters[1:]
    )


class _Arguments:
    """The facts that a method requests, and the source of the arguments that it is called with.

    A parameter whose name is not a fact gets the documented argument at its position, or the next one that no
    parameter names. Any other parameter keeps its default, or its name, which the binding then rejects.
    """

    def __init__(self, function: Callable[..., Any], row: Row, method: str) -> None:
        self.row = row
        self.facts: list[str] = []
        self.passed: list[str] = []
        self.order: list[str] = []
        """The facts in the order in which the method takes them."""
        self.by_position = False
        parameters = _parameters(function, row, method)
        known = {each.name: EVENTS.fact(each.name, EVENTS[row.event]) for each in parameters}
        named = {fact.name for fact in known.values() if fact is not None}
        listed = [
            each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        self.takes_rest = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        form = next(
            (each for each in row.forms if len(each) == len(listed) and not self.takes_rest), row.arguments
        )
        self.unassigned = [name for name in form if name not in named]
        for position, each in enumerate(parameters):
            fact = known[each.name]
            keyword = f"{each.name}=" if each.kind is each.KEYWORD_ONLY else ""
            if each.kind is each.VAR_POSITIONAL:
                for name in list(self.unassigned):
                    self._take_positional(name, is_rest=True)
            elif fact is not None:
                self._take(fact.name, keyword)
            elif self.unassigned and not keyword and each.kind is not each.VAR_KEYWORD:
                here = form[position : position + 1]
                if here and here[0] in self.unassigned:
                    self._take_positional(here[0])
                elif each.default is each.empty:
                    self._take_positional(self.unassigned[0])
                else:
                    break
            elif each.default is each.empty and each.kind is not each.VAR_KEYWORD:
                self._take(each.name, keyword)
            elif not keyword:
                break  # the remaining parameters keep their defaults

    def _take_positional(self, name: str, is_rest: bool = False) -> None:
        self.by_position = True
        self.unassigned.remove(name)
        self._take(name)
        if is_rest and name in self.row.if_several:
            self._take("state")
            state, index = self.passed.pop(), self.passed.pop()
            self.order.pop()
            self.passed.append(f"*(({index},) if {state}.several_loaders else ())")

    def _take(self, name: str, keyword: str = "") -> None:
        if not keyword:
            self.order.append(name)
        if name == "sanity_checking":
            value = name
        else:
            if name not in self.facts:
                self.facts.append(name)
            value = f"given[{self.facts.index(name)}]"
        self.passed.append(keyword + (f"r[{name!r}]({value})" if name in self.row.reads else value))

    def picks(self) -> dict[int, tuple[int, ...]]:
        """Return, by number of arguments, which of them a direct call with a longer form passes on."""
        if not self.row.other_forms or self.takes_rest or len(self.passed) != len(self.order):
            return {}
        return {
            len(form): tuple(form.index(name) for name in self.order)
            for form in self.row.forms
            if len(form) > len(self.order) and set(self.order) <= set(form)
        }

    def signature_in_order(self) -> inspect.Signature:
        """Return a signature with the facts in the order in which the method takes them."""
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *self.facts)
        ]
        return inspect.Signature(parameters)

    def signature(self) -> inspect.Signature:
        """Return the same with `sanity_checking`, which only the plan passes."""
        mark = inspect.Parameter("sanity_checking", inspect.Parameter.KEYWORD_ONLY)
        return inspect.Signature([*self.signature_in_order().parameters.values(), mark])


# ---- Common to the adapters of other packages' callbacks


SETTINGS: Mapping[str, Callable[[Any], bool]] = {
    "name": lambda given: isinstance(given, str),
    "tier": lambda given: isinstance(given, str),
    "order": lambda given: isinstance(given, int) and not isinstance(given, bool),
    "ranks": lambda given: isinstance(given, str | set | frozenset),
    "on_error": lambda given: isinstance(given, str),
}
"""The attributes of a Hookline hook, with a check: a callback may use the same name for something else."""


class AdoptedCallback:
    """Represents one callback among the hooks, with the attributes of a hook."""

    kind = ""
    name = ""
    tier = "user"
    order: int | None = None
    after_module: bool | tuple[str, ...] | None = None
    ranks = "all"
    on_error = "raise"

    def __init__(self, original: Any, packages: tuple[str, ...], base: str) -> None:
        self.original = original
        self.base = next(
            cls
            for cls in original.__class__.__mro__
            if cls.__name__ == base and cls.__module__.partition(".")[0] in packages
        )
        self.tier = self.usual_tier()
        for setting, is_ours in SETTINGS.items():
            given = self._set_on_original(setting)
            if is_ours(given):
                setattr(self, setting, given)

    def usual_tier(self) -> str:
        """Return the tier if the callback does not set one."""
        return "user"

    def _set_on_original(self, name: str) -> Any:
        """Return the attribute of the instance or of its classes below the package's base, or None."""
        classes = self.original.__class__.__mro__
        spaces = [vars(self.original), *(vars(cls) for cls in classes[: classes.index(self.base)])]
        return next((each[name] for each in spaces if name in each), None)

    def overrides(self, method: str) -> bool:
        """Return whether the callback's class or the instance itself (a LambdaCallback) defines the
        method.
        """
        if method in vars(self.original):
            return vars(self.original)[method] is not None
        if type(self.original) is not self.original.__class__:
            return True  # a mock of the class, which records every call
        found = getattr(type(self.original), method, None)
        return found is not None and found is not getattr(self.base, method, None)

    def before_optimizers(self) -> None:
        """Prepare for the optimizers of a checkpoint, which are restored next."""
