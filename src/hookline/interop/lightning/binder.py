"""Binds methods of Lightning's classes to the live state: by position, with as many arguments as they
accept.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from hookline.engine.binding import Binding, Source
from hookline.engine.events import EventTable
from hookline.interop.adapter import Reader, Row
from hookline.util.errors import HookError, closest

NAME_OF_HOOK = "_current_fx_name"
"""The attribute in which a Lightning module records the current hook; its `log` reads it."""
BETWEEN_HOOKS = {"fit": "training_step", "validate": "validation_step"}
"""Its value between Lightning's hooks, by stage: Hookline's hooks log as a step does."""
RETURNED = {"on_before_batch_transfer", "on_after_batch_transfer", "on_train_batch_start"}
"""Hooks of a module whose returned value Lightning uses; it ignores all others, and those of callbacks."""


def bind(
    function: Callable[..., Any], method: str, row: Row, table: EventTable, view: Any, *, answers: bool
) -> Binding:
    """Return the binding of one hook. `trainer` is the view, `module` the module as the view shows it."""
    event = table[row.event]
    by_name = _takes_by_name(function, "stage")  # the one argument that Lightning passes by keyword
    names = row.arguments[: accepted(function, row.arguments, method)]
    reads: dict[str, Reader] = {**row.reads, "checkpoint": CheckpointView}
    values: list[Any] = [view, view.moment]
    expressions: list[str] = []
    facts: list[str] = []
    for name in names:
        fact = table.fact(name, event)
        assert fact is not None, (method, name)
        if name in ("trainer", "module") and row.arguments[:1] == ("trainer",):
            expressions.append("d[0]" if name == "trainer" else "d[1].proxy")
            continue
        source = table.expression(fact, event)
        if name in reads:
            source = f"d[{len(values)}]({source})"
            values.append(reads[name])
        expressions.append(f"stage={source}" if name == "stage" and by_name else source)
        facts.append(fact.name)
    # record the name of the hook while it is called
    begin = f"names = d[1].names; before = names[{NAME_OF_HOOK!r}]; names[{NAME_OF_HOOK!r}] = {method!r}"
    call = Source(
        function, tuple(expressions), tuple(values), begin, f"names[{NAME_OF_HOOK!r}] = before", answers
    )
    return Binding(call.caller(), tuple(facts), call)


STEP = """
def make(f, names):
    def call(*given):
        before = names[{where!r}]
        names[{where!r}] = {method!r}
        try:
            return f(*given)
        finally:
            names[{where!r}] = before
    return call
"""


def recording_name(function: Callable[..., Any], method: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a step or action that records its name as the current hook while it runs."""
    source = STEP.format(where=NAME_OF_HOOK, method=method)
    space: dict[str, Any] = {}
    exec(compile(source, "<hookline adopted>", "exec"), space)
    made: Any = functools.wraps(function)(space["make"](function, names))
    made.__signature__ = inspect.signature(function)
    return made  # type: ignore[no-any-return]


def _takes_by_name(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(
        each.kind is each.VAR_KEYWORD or (each.name == name and each.kind is not each.POSITIONAL_ONLY)
        for each in parameters
    )


def accepted(function: Callable[..., Any], arguments: tuple[str, ...], method: str) -> int:
    """Return how many of the offered arguments the function takes."""
    takes, offered = 0, len(arguments)
    for parameter in inspect.signature(function).parameters.values():
        required = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_POSITIONAL or (
            parameter.name == "stage" and arguments[-1:] == ("stage",)
        ):
            return offered
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            takes += 1
            if takes > offered and required:
                raise HookError(
                    f"{_shown(function)} takes {parameter.name!r}, but {method} is called with {offered} "
                    f"arguments."
                )
        elif parameter.kind is parameter.KEYWORD_ONLY and required:
            raise HookError(
                f"{_shown(function)} needs {parameter.name!r} by keyword, but {method} is called by position."
            )
    return min(takes, offered)


def _shown(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


class MissingEntry(HookError, KeyError):
    """A callback has requested an entry that this checkpoint does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointView(MutableMapping[str, Any]):
    """A checkpoint's contents under Lightning's names; the user's own keys are kept apart from Hookline's."""

    NAMES: Mapping[str, str] = {
        "state_dict": "module",
        "optimizer_states": "optimizers",
        "lr_schedulers": "schedulers",
        "callbacks": "hooks",
    }
    COUNTS: Mapping[str, str] = {"epoch": "epoch", "global_step": "step"}
    OWN = "lightning"

    def __init__(self, contents: dict[str, Any]) -> None:
        self.contents = contents

    def _own(self) -> dict[str, Any]:
        return self.contents.setdefault(self.OWN, {})  # type: ignore[no-any-return]

    def __getitem__(self, key: str) -> Any:
        if key in self.COUNTS:
            return self.contents["counters"][self.COUNTS[key]]
        if key not in self:
            raise MissingEntry(
                f"the checkpoint has no entry {key!r}.{closest(key, list(self))} "
                f"There are: {', '.join(self)}."
            )
        return self.contents[self.NAMES[key]] if key in self.NAMES else self._own()[key]

    def __contains__(self, key: object) -> bool:
        return key in list(self)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.COUNTS:
            raise HookError(f"checkpoint[{key!r}] is the progress of the run and cannot be replaced.")
        (self.contents if key in self.NAMES else self._own())[self.NAMES.get(key, key)] = value

    def __delitem__(self, key: str) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(
            [*self.COUNTS, *(key for key, name in self.NAMES.items() if name in self.contents), *self._own()]
        )

    def __len__(self) -> int:
        return len(list(iter(self)))
