"""Binds methods of Lightning's classes to the live state: by position, with as many arguments as they
accept.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from hookline.engine.binding import IF_SEVERAL, Binding, CallSource, factory
from hookline.engine.events import EventTable
from hookline.interop.adapter import Row, RowArguments
from hookline.interop.lightning.checkpoint_file import LIGHTNING
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
    if method == "teardown":
        function = _unless_failed(function, view)
    by_name = _takes_stage_by_name(function)
    names = row.arguments[: accepted(function, row.arguments, method)]
    # Lightning leaves these out with one loader, and a default of the user's stays
    may_be_left_out = {each for each in row.if_several if not _requires(function, each)}
    arguments = RowArguments(row, table[row.event], table, method)
    expressions, values = arguments.expressions, arguments.values
    values.append(view.moment)
    for name in names:
        if name in ("trainer", "module") and row.arguments[:1] == ("trainer",):
            expressions.append("d[0].trainer" if name == "trainer" else "d[0].proxy")
            continue
        arguments.add(name, "stage=" if name == "stage" and by_name else "")
        source = expressions[-1]
        if (method, name) in DIVIDED:
            expressions[-1] = f"({source} if d[0].is_native else d[{len(values)}]({source}, d[0].trainer))"
            values.append(divided)
        if name in may_be_left_out:
            expressions[-1] = IF_SEVERAL.format(source)
    # record the hook and its callback while it is called
    begin = (
        f"names = d[0].names; before = names[{NAME_OF_HOOK!r}]; names[{NAME_OF_HOOK!r}] = {method!r}; "
        "seen = d[0].trainer.__dict__; caller = seen['_caller']; seen['_caller'] = d[0].caller"
    )
    end = f"names[{NAME_OF_HOOK!r}] = before; seen['_caller'] = caller"
    call = CallSource(function, tuple(expressions), tuple(values), begin, end, answers)
    return Binding(call.caller(), tuple(arguments.facts), call)


DIVIDED = (("on_before_backward", "loss"), ("on_train_batch_end", "outputs"))
"""Losses of a batch that Lightning has divided by the batches of its accumulation window."""


def divided(loss: Any, trainer: Any) -> Any:
    """Return a loss, or outputs with one, as Lightning's trainer passes it on."""
    run = trainer._own._run
    batches = run.traits.accumulate
    if batches == 1 or run.traits.is_manual:
        return loss
    if isinstance(loss, Mapping):
        return {**loss, "loss": loss["loss"] / batches} if loss.get("loss") is not None else loss
    return loss / batches


def divided_in_dialect(loss: Any, state: Any) -> Any:
    """Return the same for hooks of the dialect's classes; `hookline.Trainer` passes the loss as it is."""
    shown = getattr(state.trainer, "lightning_trainer", None)
    return loss if shown is None else divided(loss, shown)


def _unless_failed(teardown: Callable[..., Any], view: Any) -> Callable[..., Any]:
    """Return a `teardown` that is not called after a failure in Lightning's trainer, as in Lightning."""

    @functools.wraps(teardown)
    def unless_failed(*given: Any, **named: Any) -> Any:
        own = view._own
        is_called = own.state.exception is None or not hasattr(own, "lightning_trainer")
        return teardown(*given, **named) if is_called else None

    return unless_failed


STEP = """
def make(f, names):
    def call(*given, **named):
        before = names[{where!r}]
        names[{where!r}] = {method!r}
        try:
            return f(*given, **named)
        finally:
            names[{where!r}] = before
    return call
"""


def recording_name(function: Callable[..., Any], method: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a step or action that records its name as the current hook while it runs."""
    made: Any = factory(STEP.format(where=NAME_OF_HOOK, method=method))(function, names)
    made = functools.wraps(function)(made)
    made.__signature__ = inspect.signature(function)
    return made  # type: ignore[no-any-return]


def _requires(function: Callable[..., Any], name: str) -> bool:
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def _takes_stage_by_name(function: Callable[..., Any]) -> bool:
    """Return whether a function takes the one argument that Lightning passes by keyword."""
    return any(
        each.kind is each.VAR_KEYWORD or (each.name == "stage" and each.kind is not each.POSITIONAL_ONLY)
        for each in inspect.signature(function).parameters.values()
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

    __str__ = Exception.__str__  # that of KeyError quotes the text


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
        if key not in self and key in self.contents:
            return self.contents[key]  # under Hookline's name
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


def entries_of(contents: dict[str, Any]) -> Any:
    """Return a checkpoint's contents under Lightning's names: those of its file, if it is one."""
    return contents[LIGHTNING] if LIGHTNING in contents else CheckpointView(contents)
