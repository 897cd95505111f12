"""`Hook`, the base class of hooks, and `on`, which registers any function as a hook."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from hookline.engine._methods import HookMethods
from hookline.engine.filters import FilterSettings
from hookline.util.errors import HookError

F = TypeVar("F", bound=Callable[..., Any])

TIERS = {"user": 0, "builtin": 100, "monitor": 200}
"""The default `order` of each tier; lower runs first."""


class Hook(HookMethods):
    """Base class of hooks: override the events that you need, and name parameters after the facts you want.

    >>> class Report(Hook):
    ...     def on_train_epoch_end(self, epoch, metrics):
    ...         print(epoch, metrics["train/loss"])

    An editor completes the events with their docs; `docs/lifecycle.md` lists them all.
    """

    __hookline_base__: ClassVar[bool] = True

    name: str = ""
    """The name for `remove_hook`, `disable_hook`, checkpoints and `explain`; by default from the class
    name.
    """
    tier: str = "user"
    """'user', 'builtin' or 'monitor' (acts on a metric): decides which hook runs first if `order` is None."""
    order: int | None = None
    """An explicit position: lower runs first. User hooks are at 0, built-ins at 100, monitors at 200."""
    after_module: bool | Iterable[str] | None = None
    """True, or a set of events: run after the module's method. Monitors do so at on_train_epoch_end."""
    steers: bool | Iterable[str] = False
    """True, or a set of events: its methods may return a signal there.

    Needed in distributed training for a method without a return annotation: the ranks wait for a signal only
    at events where a hook may return one.
    """
    ranks: str | Iterable[int] = "all"
    """'all', 'zero' or a set of the ranks on which the hook is called."""
    on_error: str = "raise"
    """'raise', 'warn' (log and continue) or 'disable' (log once, switch the hook off, continue)."""
    observes: bool | None = None
    """True: the hook promises to change nothing. The audit (`Trainer(audit=True)`) checks it: a change is an
    error, to which `on_error` applies. A hook that is attached to a running job promises it unless this is
    False.
    """
    rewinds: bool | None = None
    """Whether `hookline rewind` calls the hook again. None: unless it only observes (`observes = True`).
    False: never, for a hook that sends or writes something outside of the run's directory.
    """
    budget: str | None = None
    """The most that it may cost: '1%' of the training time, or '5 ms' per call on average; None: no limit."""
    over_budget: str = "warn"
    """The action over the budget: 'warn' (once), 'throttle' (skip calls of events of every batch) or
    'disable'.
    """
    needs_metrics: Iterable[str] = ()
    """Metrics that the hook needs: a fit that can never log one of them is refused before training."""
    logs_metrics: Iterable[str] = ()
    """Metrics with a validation name (`val/acc`) that it logs itself during training, also without validation
    data.
    """
    needs_validation: bool = False
    """Whether the hook acts only after a validation: a fit without validation data is refused before
    training.
    """

    needs_base: bool = False
    """Whether the hook requests checkpoints with weights='trainable': then a fit begins by hashing the
    weights of the model.
    """

    may_listen: Iterable[str] = ()
    """Events to which some settings add a listener, because a hook must not listen to what it does not need.
    `hookline hooks` lists them with the event methods of the class.
    """

    writes_predictions: bool = False
    """Whether the hook writes the predictions, so that `trainer.predict` returns them only on request."""

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.name = name

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores under the hook's name; `load_state_dict` restores it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        state: a copy of it, from the checkpoint.
        """

    def enabled_changed(self, enabled: bool) -> None:
        """Release what the hook holds outside of its events when it is switched off, and the reverse.

        enabled: whether the hook was switched on.
        """

    def __repr__(self) -> str:
        return f"<hook {type(self).__name__}{f' {self.name!r}' if self.name else ''}>"


class FunctionHook:
    """A function registered for one or more events by `@on` or `trainer.on`."""

    def __init__(
        self,
        function: Callable[..., Any],
        events: list[str],
        when: FilterSettings | None = None,
        name: str = "",
    ) -> None:
        self.function = function
        self.events = events
        self.when = when
        self.name = name or getattr(function, "__name__", type(function).__name__).replace(
            "<lambda>", "function"
        )

    def __repr__(self) -> str:
        return f"<hook of function {self.name}: {', '.join(self.events)}>"


def redefines(hook: Any, other: Any) -> bool:
    """Return whether a notebook cell that was run again has defined the hook's function or class once more.

    Functions and classes that one definition creates in a loop share their code; they are separate hooks.
    """
    mine, its = definition(hook), definition(other)
    return mine is not None and its is not None and mine[0] == its[0] and mine[1] is not its[1]


def definition(hook: Any) -> tuple[str, types.CodeType] | None:
    """Return the name and code of a hook's function or class, if it was entered in a notebook or at a
    prompt.
    """
    made: Any = hook.function if isinstance(hook, FunctionHook) else type(hook)
    if made.__module__ != "__main__":
        return None
    found = next(filter(None, map(typed, vars(made).values() if isinstance(made, type) else [made])), None)
    return (getattr(made, "__qualname__", found.__qualname__), found.__code__) if found is not None else None


def typed(function: Any) -> types.FunctionType | None:
    """Return the function if it has a name and was entered in a notebook or at a prompt, not read from a
    file.
    """
    function = inspect.unwrap(function) if callable(function) else None
    if (
        not isinstance(function, types.FunctionType)
        or function.__module__ != "__main__"
        or function.__name__ == "<lambda>"
    ):
        return None
    is_from_file = hasattr(
        sys.modules["__main__"], "__file__"
    ) and not function.__code__.co_filename.startswith("<")
    return None if is_from_file else function


def on(
    *events: str,
    every: int | str | None = None,
    once: bool = False,
    after: int | str | None = None,
    before: int | str | None = None,
    when: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Mark a function as a hook, or a method of any name as the listener of an event.

    >>> @on("train_batch_end", every=100)
    ... def report(step, loss):
    ...     print(step, loss)

    Pass the function in `Trainer(hooks=[report])`.

    events: one or more, with or without `on_`. every: how often, such as 100 (calls), '500 steps' or '10
    minutes'. once: only the first time. after, before: from this moment on, or up to it, such as '1000
    steps'. when: a function of facts; the hook is called if it returns true.
    """
    check_names("on", events)
    recipe = FilterSettings(every, once, after, before, when)

    def mark(function: F) -> F:
        recipe(function)
        marked: list[str] = [*getattr(function, "__hookline_on__", ()), *events]
        function.__hookline_on__ = marked  # type: ignore[attr-defined]
        return function

    return mark


def check_names(call: str, events: Iterable[Any]) -> None:
    """Refuse anything but strings as event names; a function is easily passed there by mistake."""
    for event in events:
        if not isinstance(event, str):
            name = getattr(event, "__name__", "function").replace("<lambda>", "function")
            named = next((repr(each) for each in events if isinstance(each, str)), "'step_end'")
            raise HookError(
                f"{call}() takes names of events, not {name if callable(event) else repr(event)}. To "
                f"register a function: {call}({named})({name}), or @{call}({named}) above it."
            )


def snake_case(name: str) -> str:
    """Return the name in snake case: `GradientMonitor` -> `gradient_monitor`, `LRMonitor` -> `lr_monitor`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.replace("NaN", "Nan")).lower()
