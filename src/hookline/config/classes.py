"""Make a part of a run from its class path: look the class up, check its kind and its parameters, call it."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from hookline.config.files import ConfigSource
from hookline.config.permissions import PATH, Permissions
from hookline.config.problems import (
    SECRET,
    ConfigError,
    Override,
    Problems,
    choices,
    describe_type,
    format_value,
    nearest,
)
from hookline.util.errors import HooklineError, closest


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """The classes that a key of a configuration accepts."""

    word: str
    kinds: tuple[type, ...]
    home: str = ""
    """The module in which a name without a dot is looked up."""
    skip: frozenset[str | int] = frozenset()
    """Parameters that the run fills in itself."""
    adopts: Callable[[type], bool] = lambda cls: False
    """Return whether a class of another package is accepted as well."""
    settings: tuple[str, ...] = ()
    """Keys beside class_path and init_args that configure the part and are not passed to its class."""

    @property
    def wanted(self) -> str:
        """Return the accepted classes in words."""
        return " or ".join(_public_path(each) for each in self.kinds)


def _public_path(cls: type) -> str:
    """Return the public path of a class: hookline.Hook, torch.nn.Module, torch.optim.Optimizer."""
    depth = 2 if cls.__module__.startswith("torch.") else 1
    return ".".join([*cls.__module__.split(".")[:depth], cls.__name__])


@dataclass(slots=True)
class ConfigPart:
    """A class path with its arguments and the key of each argument in the file."""

    key: str
    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    """Key -> why a text does not name a function; added to the error if the class refuses the text."""


def read_part(
    source: ConfigSource, key: str, given: Any, place: ConfigKey, default_path: str = ""
) -> ConfigPart:
    """Read `"pkg.Class"`, or a table with class_path and either init_args or the arguments themselves."""
    if isinstance(given, str):
        return ConfigPart(key, str(given))
    if not isinstance(given, dict):
        raise source.wrong(
            key, f"must be a class path, or a table with class_path and init_args, for {place.word}.", given
        )
    path = given.get("class_path", default_path)
    if not isinstance(path, str) or not path:
        near = next((each for each in given if closest(each, ["class_path"])), None)
        hint = (
            f" Did you mean 'class_path' instead of {near!r}?"
            if near is not None and near != "class_path"
            else ""
        )
        raise source.wrong(key, f"class_path is missing: the dotted name of {place.word}.{hint}", given)
    part = ConfigPart(key, str(path))
    inner = given.get("init_args", {})
    if inner is None:
        inner = {}
    if not isinstance(inner, dict):
        raise source.wrong(f"{key}.init_args", "must be a table of arguments.", inner)
    for name, value in inner.items():
        part.init_args[name], part.keys[name] = value, f"{key}.init_args.{name}"
    for name, value in given.items():
        if name in ("class_path", "init_args"):
            continue
        if name in part.init_args:
            raise source.wrong(f"{key}.{name}", f"this is given twice, here and in {key}.init_args.", value)
        part.init_args[name], part.keys[name] = value, f"{key}.{name}"
    return part


def resolve(source: ConfigSource, part: ConfigPart, place: ConfigKey, permissions: Permissions) -> Any:
    """Return the class that a path names. Check the permission first, then import, then check its kind."""
    path = part.class_path
    key = f"{part.key}.class_path"
    if not PATH.fullmatch(path):
        problem = f"this is not the dotted name of {place.word}, such as 'package.module.Class'."
        raise source.wrong(key, _about_file(path) or problem, path)
    if "." not in path and ":" not in path:
        if not place.home:
            raise source.wrong(key, f"a class path needs its module: 'module.{path}'.", path)
        path = f"{place.home}.{path}"
    found = import_path(source, key, path, permissions, is_subclass_of(place.kinds), part.class_path)
    if not inspect.isclass(found):
        if hasattr(found, "__hookline_on__") and not part.init_args and place.word == "a hook":
            return found
        kind = "a module" if inspect.ismodule(found) else f"a {type(found).__name__}"
        raise source.wrong(
            key, f"this is {kind}, not a class; needed is a subclass of {place.wanted}.", part.class_path
        )
    if not issubclass(found, place.kinds) and not place.adopts(found):
        bases = ", ".join(each.__name__ for each in found.__mro__[1:3] if each is not object) or "object"
        raise source.wrong(
            key,
            f"{found.__name__} (derived from {bases}) is not {place.word}: needed is a subclass of "
            f"{place.wanted}.",
            part.class_path,
        )
    if inspect.isabstract(found):
        raise source.wrong(
            key, f"{found.__name__} is abstract; name a class derived from it.", part.class_path
        )
    return found


# ---- parameters --------------------------------------------------------------------------------------------


def parameters(cls: type) -> list[str]:
    """Return the names of a class's parameters, with those that it passes to its parents by **kwargs."""
    return _parser(cls, frozenset())[1]


# One parser serves every load of the process: to make that of the trainer's options takes 20 ms. What may be
# imported is decided when a parser is used (`Permissions.enforced`), not when it is made.
@functools.lru_cache(maxsize=128)
def _parser(cls: type, skip: frozenset[str | int]) -> tuple[Any, list[str]]:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    return parser, parser.add_class_arguments(cls, fail_untyped=False, skip={*skip} or None)


def check_arguments(
    source: ConfigSource, part: ConfigPart, cls: type, place: ConfigKey, permissions: Permissions
) -> dict[str, Any]:
    """Return the arguments converted to their types, nested class paths as objects. Raise one error for all
    wrong ones.
    """
    with permissions.enforced():
        parser, names = _parser(cls, place.skip)
        functions, problems, values = Functions(source, permissions), Problems(), dict[str, Any]()
        for name, value in part.init_args.items():
            with problems.collect():
                if name not in names:
                    raise source.wrong(part.keys[name], _explain_unknown(cls, name, names, place), value)
                if name == "filename":
                    _check_filename(source, part.keys[name], value)
                for path in class_paths(value):
                    if "." in path and (refusal := permissions.refusal(path.replace(":", "."))):
                        raise source.wrong(part.keys[name], refusal, value)
                values[name] = _check_argument(functions, part, cls, name, value, {*names, *place.skip})
        part.doubts.update(functions.doubts)
        # checked here, because jsonargparse does not require a parameter without a type
        # a name that is unknown may be meant for one that is missing
        if part.init_args.keys() <= set(names) and (
            missing := [
                name for name in _required_arguments(cls) if name in names and name not in part.init_args
            ]
        ):
            with problems.collect():
                raise source.wrong(
                    part.key,
                    f"{cls.__name__} needs {', '.join(missing)}: write {part.key}.{missing[0]} = ...",
                )
        problems.raise_found()
        try:
            parsed = parser.parse_object(values)
        except (ArgumentError, TypeError, ValueError) as error:
            raise source.wrong(part.key, f"{cls.__name__} cannot be made: {_last_reason(error)}") from None
        for name, value in values.items():
            _check_resolved(source, part.keys[name], value, parsed[name], permissions)
        made = parser.instantiate(parsed)
        for name in values if not permissions.trusted else ():
            if left := class_paths(made[name]):  # also of a text that jsonargparse has read as YAML
                raise source.wrong(part.keys[name], _no_type(cls, name, left[0]), part.init_args[name])
        return {name: made[name] for name in values}


def _check_resolved(
    source: ConfigSource, key: str, given: Any, parsed: Any, permissions: Permissions
) -> None:
    """Refuse classes and functions that jsonargparse resolved by itself: from a bare name, or where a type
    cannot be read.
    """
    known = {id(each) for _, each in _all_items([given])}
    for name, item in _all_items([parsed]):
        if name == "class_path" and isinstance(item, str) and "." in item:
            import_path(source, key, item, permissions, inspect.isclass, function=True)
        elif inspect.isroutine(item) and id(item) not in known:
            path = f"{item.__module__}.{item.__qualname__}"
            if refusal := permissions.refusal_of(path, item, function=True):
                raise source.wrong(key, refusal, path)


def class_paths(value: Any) -> list[str]:
    """Return every class path in the tables of a value, at any depth; one that is not text as an empty
    string.
    """
    return [
        str(each) if isinstance(each, str) else "" for name, each in _all_items(value) if name == "class_path"
    ]


def _all_items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of all tables in a value; members of lists have an empty key."""
    inner: Any = ()
    if isinstance(value, list | tuple):
        inner = [("", each) for each in value]
    elif isinstance(value, Mapping):
        inner = value.items()
    elif type(value).__name__ == "Namespace":  # jsonargparse's tables
        inner = vars(value).items()
    for name, item in inner:
        yield name, item
        yield from _all_items(item)


def _no_type(cls: type, name: str, path: str) -> str:
    """Return the error about a class path for a parameter whose type is not a class."""
    hint = annotation(cls, name)
    takes = f"takes {describe_type(hint)}" if hint is not None else "has no type"
    return (
        f"{path!r} was not made: a class path is accepted where a parameter's type names the class, and "
        f"{name} of {cls.__name__} {takes}. Give it a type, such as `{name}: nn.Module`."
    )


def _required_arguments(cls: type) -> list[str]:
    """Return the parameters without a default, or an empty list if the signature cannot be read."""
    try:
        return [
            name for name, each in inspect.signature(cls).parameters.items() if each.default is each.empty
        ]
    except ValueError:
        return []


def _check_argument(
    functions: Functions, part: ConfigPart, cls: type, name: str, value: Any, names: set[str | int]
) -> Any:
    """Check one value alone, so that an error is about this value only."""
    first = value.guess if isinstance(value, Override) else value
    readings = [first, _gather_arguments(first), *([str(value)] if isinstance(value, Override) else [])]
    failure: Exception | None = None
    hint = annotation(cls, name)
    if isinstance(first, str) and not first.strip() and hint is not None and not accepts_text(hint):
        # YAML reads it as null: an option that a script left empty would silently be the default
        raise functions.source.wrong(
            part.keys[name], f"this is empty; {name} must be {describe_type(hint)}.", value
        )
    parser, _ = _parser(cls, frozenset(names - {name}))
    for reading in readings:
        reading = functions.within(hint, reading, part.keys[name])
        try:
            parser.parse_object({name: reading})
            return reading
        except (ArgumentError, TypeError, ValueError) as error:
            failure = failure or error
    assert failure is not None
    raise functions.source.wrong(part.keys[name], _explain_wrong(cls, name, readings[0], failure), value)


def _gather_arguments(value: Any) -> Any:
    """Move arguments beside a class_path into init_args, where jsonargparse expects nested ones."""
    if isinstance(value, list):
        return [_gather_arguments(each) for each in value]
    if not isinstance(value, dict):
        return value
    value = {name: _gather_arguments(each) for name, each in value.items()}
    inner = value.get("init_args") or {}
    beside = {name: each for name, each in value.items() if name not in ("class_path", "init_args")}
    if "class_path" not in value or not beside or not isinstance(inner, dict) or set(inner) & set(beside):
        return value
    return {"class_path": value["class_path"], "init_args": {**inner, **beside}}


def _explain_unknown(cls: type, name: str, names: list[str], place: ConfigKey) -> str:
    near = closest(name, [*names, *place.settings, "class_path", "init_args"])
    return (
        f"{cls.__name__} has no parameter {name!r}.{near} It has: "
        f"{', '.join([*names, *place.settings]) or 'none'}."
    )


def _explain_wrong(cls: type, name: str, value: Any, error: Exception) -> str:
    text = _last_reason(error)
    if denied := re.search(r"Importing '([\w.]+)' is not allowed", str(error)):
        top = denied[1].partition(".")[0]
        return f"{denied[1]!r} may not be imported from here, and was not. If you trust it: --allow {top}."
    hint = annotation(cls, name)
    if SECRET.search(name):  # jsonargparse quotes the value
        return f"{name} must be {describe_type(hint) if hint is not None else 'something else'}."
    if hint is None:
        return text
    near = closest(str(value), choices(hint))
    return f"{name} must be {describe_type(hint)}.{near}{f' ({text})' if isinstance(value, dict) else ''}"


def annotation(cls: Any, name: str) -> Any:
    """Return the type of a parameter, or None if it cannot be resolved."""
    for base in inspect.getmro(cls):
        owner = base if name in vars(base).get("__annotations__", {}) else vars(base).get("__init__")
        try:
            hints = typing.get_type_hints(owner, include_extras=True)
        except (NameError, TypeError, AttributeError):
            continue
        if name in hints:
            return hints[name]
    return None


def _last_reason(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    noise = (
        "Parser key",
        "Problem with",
        "Given value",
        "Subtypes",
        "Errors",
        "Does not validate",
        "Expected a <class 'NoneType'>",
    )
    telling = [line for line in lines if not line.startswith(noise)]
    return " ".join((telling or lines)[-1:] or [type(error).__name__])


def _check_filename(source: ConfigSource, key: str, value: Any) -> None:
    parts = PurePosixPath(str(value).replace("\\", "/"))
    if isinstance(value, str) and (parts.is_absolute() or ".." in parts.parts):
        raise source.wrong(
            key, "a file name cannot leave the run's directory: no '..', and not from the root.", value
        )


def is_made_to_check(cls: Any) -> bool:
    """Return whether an object is made even if the configuration has problems: its own checks find more.

    Code of the user is not run then. The constructors of Hookline's hooks and loggers only check arguments.
    """
    return str(cls.__module__).startswith(("hookline.hooks.", "hookline.loggers."))


def make_part(source: ConfigSource, part: ConfigPart, cls: Any, arguments: dict[str, Any]) -> Any:
    """Call the class. Report a refused value as an error of the configuration; let other errors through with
    a note.
    """
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except (HooklineError, ValueError) as error:
        name, dot, rest = getattr(error, "option", "").partition(".")
        key = part.keys[name] + dot + rest if name in part.keys else part.key
        doubt = f" As a function: {part.doubts[key]}" if key in part.doubts else ""
        raise source.refused(
            key, error, *([part.init_args[name]] if name in part.keys else []), more=doubt
        ) from error
    except Exception as error:
        given = f"{part.class_path} with {format_value(part.init_args)}"
        error.add_note(f"while making {part.key} ({given}) from {source.name}")
        raise


# ---- functions by their dotted names -----------------------------------------------------------------------


def import_path(
    source: ConfigSource,
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
        raise source.wrong(key, _about_file(given) or refusal, given)
    permissions.open_folder()
    found = _look_up(source, key, dotted, fits, given)
    if refusal := permissions.refusal_of(dotted, found, function=function):
        raise source.wrong(key, refusal, given)
    return found


def _look_up(source: ConfigSource, key: str, dotted: str, fits: Callable[[Any], bool], given: str) -> Any:
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
        raise source.wrong(key, _about_file(given) or problem, given) from None
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


def _about_file(given: str) -> str:
    """Return the class path that `FILE.py:CLASS` may stand for, as a sentence; empty for other text."""
    file = re.fullmatch(r"(?:\./)?(\w+(?:/\w+)*)\.py[:.](\w+)", given)
    if file is None:
        return ""
    right = f"{file[1].replace('/', '.')}.{file[2]}"
    return f"this is a file; a class path has the module, without '.py'. Did you mean {right!r}?"


def is_subclass_of(kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    """Return a function that tells whether an object is a subclass of one of these."""
    return lambda found: inspect.isclass(found) and issubclass(found, kinds)


class Functions:
    """Replaces paths of functions by the functions."""

    def __init__(self, source: ConfigSource, permissions: Permissions) -> None:
        self.source, self.permissions = source, permissions
        self.doubts: dict[str, str] = {}
        """Key -> why the text there does not name a function. It may be plain text."""

    def within(self, hint: Any, value: Any, key: str) -> Any:
        """Return the value with paths replaced wherever its type has a callable."""
        kinds = list(union_members(hint))
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
        for kind in kinds:
            origin, inner = typing.get_origin(kind), typing.get_args(kind)
            if (
                isinstance(value, Mapping)
                and "class_path" not in value
                and len(inner) == 2
                and _is_subclass(origin, Mapping)
            ):
                return {name: self.within(inner[1], item, f"{key}.{name}") for name, item in value.items()}
            if isinstance(value, list) and inner and _is_subclass(origin, Sequence):
                return [self.within(inner[0], item, f"{key}.{place}") for place, item in enumerate(value)]
        return value

    def _find(self, path: str, key: str, wanted: list[Any]) -> Any:
        """Return the function, or the path of a class, which jsonargparse instantiates."""
        dotted = path.replace(":", ".")
        found = import_path(self.source, key, path, self.permissions, inspect.isroutine, function=True)
        if inspect.isclass(found):
            made = [typing.get_args(each)[-1] for each in wanted if typing.get_args(each)]
            if any("__call__" in vars(each) for each in found.__mro__) or any(
                _is_subclass(found, each) for each in made
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


def union_members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        yield from union_members(typing.get_args(hint)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from union_members(member)
    else:
        yield hint


def is_function_type(hint: Any) -> bool:
    """Return whether a type is `Callable`, with or without parameters."""
    return Callable in (hint, typing.get_origin(hint))


def accepts_text(hint: Any) -> bool:
    """Return whether the type accepts any text."""
    return any(each in (str, Any, object) for each in union_members(hint))


def _is_subclass(origin: Any, kind: Any) -> bool:
    return inspect.isclass(origin) and inspect.isclass(kind) and issubclass(origin, kind)
