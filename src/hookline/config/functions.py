"""Resolve functions by their dotted names where a parameter's type is a callable. Permissions are those of
classes.
"""

from __future__ import annotations

import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hookline.config.files import Source
from hookline.config.permissions import PATH, Permissions
from hookline.config.problems import ConfigError, nearest


def import_path(
    source: Source,
    key: str,
    path: str,
    permissions: Permissions,
    fits: Callable[[Any], bool],
    given: str = "",
    *,
    function: bool = False,
) -> Any:
    """Return the object that `package.module.name` (or `package.module:name`) names.

    fits: which names to suggest if there is no such name. given: the text in the file, if it is not the path.
    function: a function is accepted as well as a class.
    """
    dotted, given = path.replace(":", "."), given or path
    if refusal := permissions.refusal(dotted):
        raise source.wrong(key, refusal, given)
    permissions.open_folder()
    found = _look_up(source, key, dotted, fits, given)
    if refusal := permissions.refusal_of(dotted, found, function=function):
        raise source.wrong(key, refusal, given)
    return found


def _look_up(source: Source, key: str, dotted: str, fits: Callable[[Any], bool], given: str) -> Any:
    module, _, name = dotted.rpartition(".")
    try:
        return pkgutil.resolve_name(f"{module}:{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
            error.add_note(f"while importing {dotted} for {key} of {source.name}")
            raise  # the module exists and imports another one that does not
        if module.rpartition(".")[0] and error.name == module:  # perhaps something inside a class
            try:
                return pkgutil.resolve_name(f"{module.rpartition('.')[0]}:{module.rpartition('.')[2]}.{name}")
            except (ModuleNotFoundError, AttributeError):
                pass
        problem = f"there is no module {error.name!r}. Is it installed, or beside the file?"
        raise source.wrong(key, problem, given) from None
    except AttributeError as error:
        if "has no attribute" not in str(error):
            raise
        there = pkgutil.resolve_name(module)
        names = [
            each for each in dir(there) if not each.startswith("_") and callable(getattr(there, each, None))
        ]
        fitting = [each for each in names if fits(getattr(there, each))]
        own = [each for each in fitting if getattr(getattr(there, each), "__module__", "") == module]
        # suggest only the names that a single file defines, but all names that a package re-exports
        offered = (fitting if hasattr(there, "__path__") else own) or fitting or names
        raise source.wrong(
            key, f"{module} has no {name!r}.{nearest(name, offered, 'It has')}", given
        ) from None


def is_a(kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    """Return a function that tells whether an object is a subclass of one of these."""
    return lambda found: inspect.isclass(found) and issubclass(found, kinds)


class Functions:
    """Replaces paths of functions by the functions."""

    def __init__(self, source: Source, permissions: Permissions) -> None:
        self.source, self.permissions = source, permissions
        self.doubts: dict[str, str] = {}
        """Key -> why the text there does not name a function. It may be plain text."""

    def within(self, hint: Any, value: Any, key: str) -> Any:
        """Return the value with paths replaced wherever its type has a callable."""
        kinds = list(members(hint))
        if isinstance(value, str):
            wanted = [each for each in kinds if is_function_type(each)]
            if not wanted or not PATH.fullmatch(value) or not {".", ":"} & set(value):
                return value
            try:
                return self._find(str(value), key, wanted)
            except ConfigError as error:
                if str not in kinds:
                    raise
                self.doubts[key] = error.problem
                return value
        for each in kinds:
            origin, inner = typing.get_origin(each), typing.get_args(each)
            if (
                isinstance(value, Mapping)
                and "class_path" not in value
                and len(inner) == 2
                and _is(origin, Mapping)
            ):
                return {name: self.within(inner[1], item, f"{key}.{name}") for name, item in value.items()}
            if isinstance(value, list) and inner and _is(origin, Sequence):
                return [self.within(inner[0], item, f"{key}.{place}") for place, item in enumerate(value)]
        return value

    def _find(self, path: str, key: str, wanted: list[Any]) -> Any:
        """Return the function, or the path of a class, which jsonargparse instantiates."""
        dotted = path.replace(":", ".")
        found = import_path(self.source, key, path, self.permissions, inspect.isroutine, function=True)
        if inspect.isclass(found):
            made = [typing.get_args(each)[-1] for each in wanted if typing.get_args(each)]
            if any("__call__" in vars(each) for each in found.__mro__) or any(
                _is(found, each) for each in made
            ):
                return dotted
            raise self.source.wrong(
                key, f"{dotted} is a class whose objects cannot be called; needed is a function.", path
            )
        if not callable(found):
            kind = "a module" if inspect.ismodule(found) else f"{found!r:.60} ({type(found).__name__})"
            raise self.source.wrong(
                key, f"{dotted} is {kind}, which cannot be called; needed is a function.", path
            )
        return found


def members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        yield from members(typing.get_args(hint)[0])
    elif origin in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from members(each)
    else:
        yield hint


def is_function_type(hint: Any) -> bool:
    """Return whether a type is `Callable`, with or without parameters."""
    return Callable in (hint, typing.get_origin(hint))


def is_text(hint: Any) -> bool:
    """Return whether the type accepts any text."""
    return any(each in (str, Any, object) for each in members(hint))


def _is(origin: Any, kind: Any) -> bool:
    return inspect.isclass(origin) and inspect.isclass(kind) and issubclass(origin, kind)
