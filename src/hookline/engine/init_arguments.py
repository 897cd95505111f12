"""Record the arguments of an object's `__init__` when it is called, without reading frames.

A class that records calls `record_init` from its `__init_subclass__`. Only plain values are kept (numbers,
text, None, and lists, tuples and dictionaries of them), because the record is part of the object and of its
checkpoints: it must not hold models or datasets. For any other value the record has the type.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

RECORD, RUNNING = "_init_arguments", "_running_inits"
"""Attributes of the object: the recorded arguments, and, during `__init__`, its running calls from the
outermost on.
"""


@dataclass(slots=True)
class InitArguments:
    """The arguments of an object's `__init__`, including defaults."""

    recorded: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Arguments that are not plain values, each with its type; an argument that has its default is not
    listed.
    """


def init_arguments(made: Any) -> InitArguments | None:
    """Return the arguments that an object was created with; None if its class does not record them."""
    found: InitArguments | None = getattr(made, "__dict__", {}).get(RECORD)
    return found


def running_arguments(made: Any) -> dict[str, Any]:
    """Return the arguments of every `__init__` that is running for an object; the outermost value wins."""
    found: dict[str, Any] = {}
    for init, args, kwargs in reversed(getattr(made, "__dict__", {}).get(RUNNING, [])):
        bound = inspect.signature(init).bind(made, *args, **kwargs)
        found |= {
            name: value
            for name, value, kind, _ in _bound_arguments(bound)
            if kind is not inspect.Parameter.VAR_POSITIONAL
        }
    return found


def record_init(cls: type) -> None:
    """Make the objects of a class record the arguments that they are created with."""
    where = next(each for each in cls.__mro__ if "__init__" in vars(each))
    init: Any = cls.__init__  # type: ignore[misc]
    if hasattr(init, "__hookline_records__") or where is object or "__hookline_base__" in vars(where):
        return
    if where is not cls:  # inherited from a class that does not record, such as a mixin

        @functools.wraps(init)
        def init_of_next(self: Any, *args: Any, **kwargs: Any) -> None:
            super(cls, self).__init__(*args, **kwargs)  # type: ignore[arg-type]

        init = init_of_next
    cls.__init__ = _recording(init)  # type: ignore[misc]


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if (
            type(self).__init__ is __init__
        ):  # the outermost call has the arguments that the class is called with
            self.__dict__[RECORD] = _record(init, self, args, kwargs)
        running = self.__dict__.setdefault(RUNNING, [])
        running.append((init, args, kwargs))
        try:
            init(self, *args, **kwargs)
        finally:
            running.pop()
            if not running:
                self.__dict__.pop(RUNNING, None)

    __init__.__hookline_records__ = True  # type: ignore[attr-defined]
    return __init__


def _record(
    init: Callable[..., None], made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> InitArguments:
    record = InitArguments()
    try:
        bound = inspect.signature(init).bind(made, *args, **kwargs)
    except TypeError:  # `__init__` itself raises a better error
        return record
    for name, value, _, default in _bound_arguments(bound):
        if not (why := cannot_keep(value)):
            record.recorded[name] = _copy_plain(value)
        elif value is not default:
            record.left_out[name] = why
    return record


def _bound_arguments(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield name, value, kind and default of each argument but `self`.

    Each argument in `**kwargs` comes on its own; `*args` only if it is not empty.
    """
    bound.apply_defaults()
    for parameter in list(bound.signature.parameters.values())[1:]:
        value = bound.arguments[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from ((name, each, parameter.kind, parameter.empty) for name, each in value.items())
        elif parameter.kind is not parameter.VAR_POSITIONAL or value:
            yield parameter.name, value, parameter.kind, parameter.default


def _copy_plain(value: Any) -> Any:
    """Return a copy of a plain value, because `__init__` may change a list that it receives."""
    if type(value) in (list, tuple):
        return type(value)(_copy_plain(each) for each in value)
    return {key: _copy_plain(each) for key, each in value.items()} if type(value) is dict else value


def cannot_keep(value: Any) -> str:
    """Return the type of a value that cannot be recorded, or an empty string.

    A subclass cannot: it would be restored as another type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return ""
    if kind in (list, tuple):
        return next((why for each in value if (why := cannot_keep(each))), "")
    if kind is dict:
        return next((why for pair in value.items() for each in pair if (why := cannot_keep(each))), "")
    return f"a {kind.__module__}.{kind.__qualname__}"
