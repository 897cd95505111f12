"""Functions by their dotted names, wherever a parameter takes something to call; under the same permissions
as classes.
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

# ---- From a dotted path to what it names


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
    """What `package.module.name` (or `package.module:name`) names. `fits` tells which names to offer if there
    is no such one.

    `given` is what the file says, if that is not the path itself; `function`: a function will do, and not
    only a class.
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
            raise  # the module is there, and needs another one that is not
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
        # of a single file only its own; a package is there to offer what its files have
        offered = (fitting if hasattr(there, "__path__") else own) or fitting or names
        raise source.wrong(
            key, f"{module} has no {name!r}.{nearest(name, offered, 'It has')}", given
        ) from None


def is_a(kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    """Whether something is a subclass of one of these."""
    return lambda found: inspect.isclass(found) and issubclass(found, kinds)


class Functions:
    """Puts functions in the place of the paths that name them."""

    def __init__(self, source: Source, permissions: Permissions) -> None:
        self.source, self.permissions = source, permissions
        self.doubts: dict[str, str] = {}
        """Key -> why the text there, which may also be just text, names no function."""

    def within(self, hint: Any, value: Any, key: str) -> Any:
        """The value with its paths replaced, as deep as the type says that functions can be."""
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
        """The function; of a class its path, which jsonargparse makes an object of."""
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
    """The types that a union is made of; any other type is its own only one."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        yield from members(typing.get_args(hint)[0])
    elif origin in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from members(each)
    else:
        yield hint


def is_function_type(hint: Any) -> bool:
    """`Callable`, with or without what it takes and returns."""
    return Callable in (hint, typing.get_origin(hint))


def is_text(hint: Any) -> bool:
    """Whether any text will do."""
    return any(each in (str, Any, object) for each in members(hint))


def _is(origin: Any, kind: Any) -> bool:
    return inspect.isclass(origin) and inspect.isclass(kind) and issubclass(origin, kind)
