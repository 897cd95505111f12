"""Record the arguments that an object is created with.

A class that records has the base `RecordsInit`, or an `__init__` with `@checked_parameters`. Only plain
values are kept (numbers, text, None, and lists, tuples and dictionaries of them), because the record is part
of the object and of its checkpoints: it must not hold models or datasets. For any other value the record has
the type.

`__new__` records, and `__init__` stays the function that the user wrote: IPython's autoreload replaces the
code of the functions of a class, and would replace that of a wrapper around `__init__`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, ClassVar, Self

RECORD, RUNNING = "_init_arguments", "_running_inits"
"""Attributes of an object: its record, and, during `__init__`, its running calls from the outermost on."""


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


class RecordsInit:
    """A base of classes whose objects record the arguments that they are created with."""

    __hookline_base__: ClassVar[bool] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the object and record the arguments that `__init__` is called with next."""
        others: Any = super().__new__
        made: Self = others(cls) if others is object.__new__ else others(cls, *args, **kwargs)
        creates, initializes = (
            next(each for each in cls.__mro__ if name in vars(each)) for name in ("__new__", "__init__")
        )
        # a `__new__` of the user may pass on other arguments
        if "__hookline_base__" in vars(creates) and "__hookline_base__" not in vars(initializes):
            record = None if initializes is object else record_arguments(cls.__init__, made, args, kwargs)
            made.__dict__.update({} if record is None else {RECORD: record})
        return made


class Wrapped(staticmethod):  # type: ignore[type-arg]
    """A method of the user with a wrapper around it. The class itself has the method as it was written.

    IPython's autoreload replaces the code of a function of a class, also if the function is a wrapper of
    another module: the new code would have its globals. Of a static method it replaces the user's function.
    """

    def __init__(
        self, method: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Keep the method. wrap: makes its wrapper, when an object uses it."""
        super().__init__(method)
        self._wrap = wrap

    def __get__(self, made: Any, owner: type | None = None) -> Any:
        """Return the method of a class, or the wrapper as a method of an object."""
        return self.__func__ if made is None else MethodType(self._wrap(self.__func__), made)


def record_calls(cls: type) -> None:
    """Make the calls of a class's `__init__` record their arguments while they run."""
    where = next(each for each in cls.__mro__ if "__init__" in vars(each))
    init: Any = cls.__init__  # type: ignore[misc]
    if isinstance(vars(where)["__init__"], Wrapped) or where is object or "__hookline_base__" in vars(where):
        return
    if where is not cls:  # inherited from a class that does not record, such as a mixin

        @functools.wraps(init)
        def init_of_next(self: Any, *args: Any, **kwargs: Any) -> None:
            super(cls, self).__init__(*args, **kwargs)  # type: ignore[arg-type]

        init = init_of_next
    cls.__init__ = Wrapped(init, _recording)  # type: ignore[misc]


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        running = self.__dict__.setdefault(RUNNING, [])
        running.append((init, args, kwargs))
        try:
            init(self, *args, **kwargs)
        finally:
            running.pop()
            if not running:
                self.__dict__.pop(RUNNING, None)

    return __init__


def running_arguments(made: Any) -> dict[str, Any]:
    """Return the arguments of every `__init__` that is running for an object; the outermost value wins."""
    found: dict[str, Any] = {}
    for init, args, kwargs in reversed(made.__dict__.get(RUNNING, [])):
        bound = inspect.signature(init).bind(made, *args, **kwargs)
        several = next((n for n, p in bound.signature.parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        found |= {name: value for name, value, _ in _bound_arguments(bound) if name != several}
    return found


def record_arguments(
    init: Callable[..., None], made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> InitArguments | None:
    """Return the record of a call of `__init__`; None if the arguments do not fit."""
    try:
        bound = inspect.signature(init).bind(made, *args, **kwargs)
    except TypeError:  # `__init__` itself raises a better error; `copy` and `pickle` do not call it
        return None
    record = InitArguments()
    for name, value, default in _bound_arguments(bound):
        if not (why := cannot_keep(value)):
            record.recorded[name] = _copy_plain(value)
        elif value is not default:
            record.left_out[name] = why
    return record


def _bound_arguments(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of each argument but `self`.

    Each argument in `**kwargs` comes on its own; `*args` only if it is not empty.
    """
    bound.apply_defaults()
    for parameter in list(bound.signature.parameters.values())[1:]:
        value = bound.arguments[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from ((name, each, parameter.empty) for name, each in value.items())
        elif parameter.kind is not parameter.VAR_POSITIONAL or value:
            yield parameter.name, value, parameter.default


def _copy_plain(value: Any) -> Any:
    """Return a copy of a plain value, because `__init__` may change a list that it receives."""
    if type(value) in (list, tuple):
        return type(value)(_copy_plain(each) for each in value)
    return {key: _copy_plain(each) for key, each in value.items()} if type(value) is dict else value


def cannot_keep(value: Any, containers: frozenset[int] = frozenset()) -> str:
    """Return the type of a value that cannot be recorded, or an empty string.

    A subclass cannot: it would be restored as another type.
    containers: the ids of those that the value is in.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return ""
    if kind not in (list, tuple, dict):
        return f"a {kind.__module__}.{kind.__qualname__}"
    if id(value) in containers:
        return f"a {kind.__name__} that contains itself"
    containers |= {id(value)}
    parts = itertools.chain(value, value.values()) if kind is dict else value
    return next((why for each in parts if (why := cannot_keep(each, containers))), "")
