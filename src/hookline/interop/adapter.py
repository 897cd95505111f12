"""Bind the methods of other systems' hooks to Hookline's events: tables of rows, and one binder for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.engine.binding import IF_SEVERAL, Binding, CallSource, bind_by_name, unknown_fact
from hookline.engine.events import Event, EventTable
from hookline.engine.listener import undecorated_method
from hookline.util.errors import HookError

FactConverter = Callable[..., Any]
"""Converts a fact of Hookline to the value that the other system documents."""


@dataclass(frozen=True, slots=True)
class Row:
    """A method of another system: its event, and its arguments in the order in which the system passes them.

    A class with a table of rows by method, `__hookline_rows__`, is a base of hooks, modules or data modules.
    """

    event: str
    arguments: tuple[str, ...] = ()
    reads: Mapping[str, FactConverter] = field(default_factory=dict)
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

    def bind(
        self,
        function: Callable[..., Any],
        event: Event,
        table: EventTable,
        where: str,
        overridden: Iterable[Callable[..., Any]] = (),
    ) -> Binding:
        """Bind a method that may request facts by name, and otherwise gets the documented arguments."""
        arguments = RowArguments(self, event, table, where)
        arguments.fit(function)
        if arguments.by_position or arguments.values or self.other_forms:
            return arguments.binding(function)
        return self._outside_sanity_check(bind_by_name(function, event, table, where, overridden))

    def bind_in_order(self, function: Callable[..., Any], table: EventTable) -> Binding:
        """Bind a method that gets exactly the documented arguments, and whose returned value has no
        meaning.
        """
        arguments = RowArguments(self, table[self.event], table, self.event)
        for name in self.arguments:
            arguments.add(name)
        return arguments.binding(function, answers=False)

    def _outside_sanity_check(self, binding: Binding) -> Binding:
        call = binding.call
        if self.in_sanity_check:
            return binding
        return Binding(lambda s: None if s.sanity_checking else call(s), binding.facts)


class RowArguments:
    """The facts that one method requests, and the source text of the arguments that it is called with."""

    def __init__(self, row: Row, event: Event, table: EventTable, where: str) -> None:
        self.row = row
        self.event = event
        self.table = table
        self.where = where
        self.names: list[str] = []
        """The facts that are passed by position, in the order in which the method takes them."""
        self.by_position = False
        """Whether a fact is passed by its position in the row and not by the name of a parameter."""
        self.takes_rest = False
        """Whether the method has `*args`, which gets all further arguments."""
        self.values: list[FactConverter] = []
        self.expressions: list[str] = []
        self.facts: list[str] = []

    def fit(self, function: Callable[..., Any]) -> None:
        """Choose the arguments by the parameters of a bound method.

        A parameter whose name is not a fact gets the documented argument at its position, or the next one
        that no parameter names. Any other parameter keeps its default, or is refused if it has none.
        """
        parameters = _parameters_of_method(function, self.row)
        self.takes_rest = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        facts = {each.name: self.table.fact(each.name, self.event) for each in parameters}
        requested = {fact.name for fact in facts.values() if fact is not None}
        form = self.row.arguments
        if not self.takes_rest:
            listed = sum(each.kind in _POSITIONAL for each in parameters)
            form = next((each for each in self.row.forms if len(each) == listed), form)
        unassigned = [name for name in form if name not in requested]
        for position, parameter in enumerate(parameters):
            fact = facts[parameter.name]
            is_required = parameter.default is parameter.empty
            if parameter.kind is parameter.VAR_POSITIONAL:
                for name in unassigned:
                    self._add_by_position(name, is_rest=True)
                unassigned = []
            elif parameter.kind is parameter.VAR_KEYWORD:
                continue
            elif parameter.kind is parameter.KEYWORD_ONLY:
                if fact is not None or is_required:
                    self.add(parameter.name, f"{parameter.name}=")
            elif fact is not None:
                self.add(parameter.name)
            elif form[position : position + 1] and form[position] in unassigned:
                unassigned.remove(form[position])
                self._add_by_position(form[position])
            elif unassigned and is_required:
                self._add_by_position(unassigned.pop(0))
            elif is_required:
                self.add(parameter.name)
            else:
                break  # the remaining parameters keep their defaults

    def _add_by_position(self, name: str, is_rest: bool = False) -> None:
        self.by_position = True
        self.add(name)
        if is_rest and name in self.row.if_several:
            self.expressions.append(IF_SEVERAL.format(self.expressions.pop()))

    def add(self, name: str, keyword: str = "") -> None:
        """Pass this fact next, converted as the row says; refuse a name that is not a fact of the event."""
        fact = self.table.fact(name, self.event)
        if fact is None:
            raise HookError(unknown_fact(name, self.event, self.table, self.where))
        expression = self.table.expression(fact, self.event)
        if fact.name in self.row.reads:
            convert = self.row.reads[fact.name]
            of_state = ", s" if getattr(convert, "takes_state", False) else ""
            expression = f"d[{len(self.values)}]({expression}{of_state})"
            self.values.append(convert)
        if not keyword:
            self.names.append(fact.name)
        self.expressions.append(keyword + expression)
        self.facts.append(fact.name)

    def binding(self, function: Callable[..., Any], answers: bool = True) -> Binding:
        """Return the call of a function with these arguments."""
        source = CallSource(function, tuple(self.expressions), tuple(self.values), answers=answers)
        return self.row._outside_sanity_check(Binding(source.caller(), tuple(self.facts), source))


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters_of_method(function: Callable[..., Any], row: Row) -> list[inspect.Parameter]:
    """Return the parameters of a bound method; of a decorator without functools.wraps, those of the method
    under it, if it does not have more than the row passes.
    """
    parameters = list(inspect.signature(function).parameters.values())
    takes_rest = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    inner = undecorated_method(getattr(function, "__self__", None), function) if takes_rest else None
    if inner is not None:
        theirs = list(inspect.signature(inner).parameters.values())
        needed = [each for each in theirs if each.kind is each.POSITIONAL_OR_KEYWORD]
        if len(needed) <= max(map(len, row.forms)):
            return theirs
    return parameters


# ---- Common to the adapters of other packages' callbacks


HOOK_ATTRIBUTES: Mapping[str, Callable[[Any], bool]] = {
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
        for setting, is_ours in HOOK_ATTRIBUTES.items():
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
        return next((space[name] for space in spaces if name in space), None)

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
