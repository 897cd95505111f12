"""Errors of a configuration, with the file, the key, the value, the allowed values and the closest name."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from hookline.util.errors import HooklineError, OptionError, closest
from hookline.util.text import redact

T = TypeVar("T")

# ---- limits ------------------------------------------------------------------------------------------------

BYTES = 2**20
MOST_LEVELS = 50
ALIASES = 1000
NODES = 100_000
"""Keys and values, with every alias counted as the values that it expands to."""
TOO_DEEP = f"it is nested more than {MOST_LEVELS} levels deep."
DIGITS = 1000
"""Digits of a number. Reading takes time quadratic in the length, and Python does not print longer ones."""
TOO_LONG = f"it has a number of more than {DIGITS} digits."
_NUMBER = re.compile(r"[-+]?[0-9.][0-9a-fA-FxXoO_:.+-]*")
"""A number, also hexadecimal or YAML's `59:59:59`, which is in base 60."""
_ENDS = re.compile(r"([=,{}\[\]\n])")
_DOT = re.compile(r"""[\w"'-][ \t]*\.[ \t]*(?=[\w"'-])""")


class TooMuch(ValueError):
    """A configuration that exceeds a limit."""


def check_size(text: str | bytes) -> None:
    """Refuse a text that is too long for a configuration."""
    if len(text) > BYTES:
        raise TooMuch(f"it has more than {BYTES // 2**20} MB, which is the limit for a configuration.")


def check_depth(values: Any) -> None:
    """Refuse values that are nested too deeply, and numbers with too many digits."""
    level = [values]
    for _ in range(MOST_LEVELS + 1):
        if any(isinstance(each, int) and abs(each) >= 10**DIGITS for each in level):
            raise TooMuch(TOO_LONG)
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise TooMuch(TOO_DEEP)


def check_toml(text: str) -> None:
    """Refuse keys of very many parts, such as `a.a.a = 1`, because reading them takes minutes."""
    parts = _ENDS.split(text)
    if any(
        end in "=]" and len(_DOT.findall(key)) > MOST_LEVELS
        for key, end in zip(parts[::2], parts[1::2], strict=False)
    ):
        raise TooMuch(TOO_DEEP)


def check_yaml(text: str) -> None:
    """Refuse YAML that is too large with its aliases expanded. Raises yaml.YAMLError if it is not YAML."""
    import yaml  # type: ignore[import-untyped]

    check_size(text)
    aliases, sizes = 0, dict[str, int]()
    stack = [("", 0)]  # anchor and number of nodes of every open container
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        added = 0
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
            if event.anchor in [anchor for anchor, _ in stack]:
                raise TooMuch(f"the alias *{event.anchor} is inside of the value that it stands for.")
            added = sizes.get(event.anchor, 1)  # an undefined one raises an error later
        elif isinstance(event, yaml.ScalarEvent):
            is_text = event.style in ("'", '"', "|", ">") and event.tag is None  # a plain one has None or ''
            if len(event.value) > DIGITS and not is_text and _NUMBER.fullmatch(event.value):
                raise TooMuch(TOO_LONG)
            added = sizes[event.anchor or ""] = 1
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            stack.append((event.anchor or "", 1))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            anchor, added = stack.pop()
            sizes[anchor] = added
        stack[-1] = (stack[-1][0], stack[-1][1] + added)
        if aliases > ALIASES:
            raise TooMuch(f"it has more than {ALIASES} aliases: write the values out.")
        if stack[-1][1] > NODES:
            raise TooMuch(f"it has more than {NODES} values, with its {aliases} aliases expanded.")
        if len(stack) > MOST_LEVELS + 1:
            raise TooMuch(TOO_DEEP)


_TYPE_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "nothing (null)",
    Path: "a path",
    dict: "a table",
    list: "a list",
    datetime.timedelta: "a length of time",
    Any: "anything",
    object: "anything",
    IO[str]: "an open file",
}


SECRET = re.compile(
    r"(?:^|[_.])(?:url|urls|token|password|passwd|secret|credentials?|key|dsn)$", re.IGNORECASE
)
"""Keys whose values are never shown. The address of a webhook is a password."""


class ConfigError(OptionError):
    """A configuration that is refused before anything runs.

    problem: what is wrong. where: the file and the line. key: the key, such as `trainer.max_epochs`. value:
    its value. has_value: whether to show the value.
    """

    def __init__(
        self, problem: str, *, where: str = "", key: str = "", value: Any = None, has_value: bool = False
    ) -> None:
        value = "(not shown)" if SECRET.search(key) else value
        value = redact(value) if isinstance(value, str) and not isinstance(value, Override) else value
        place = [
            part for part in (where, f"{key} = {format_value(value)}" if key and has_value else key) if part
        ]
        super().__init__(redact(": ".join([*place, problem])), option=key, value=value if has_value else None)
        self.problem, self.where, self.key = problem, where, key
        self.problems: list[ConfigError] = [self]
        """All problems of the configuration, if this error reports several."""

    def data(self) -> dict[str, Any]:
        """Return the error as plain data."""
        value = plain_values(_mask(self.value))
        several = [each.data() for each in self.problems] if len(self.problems) > 1 else []
        return {
            "where": self.where,
            "key": self.key,
            "value": redact(value) if isinstance(value, str) else value,
            "problem": redact(self.problem),
            **({"problems": several} if several else {}),
        }


class Problems:
    """Collects the errors of a configuration, so that one error reports all of them."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keep an error that is raised inside the context, and continue after it."""
        try:
            yield
        except ConfigError as error:
            known = {str(each) for each in self.found}
            self.found += [each for each in error.problems if str(each) not in known]

    def attempt(self, read: Callable[..., T], *given: Any) -> T | None:
        """Return what the function returns for these arguments; None after an error, which is kept."""
        with self.collect():
            return read(*given)
        return None

    def raise_found(self) -> None:
        """Raise the error, or one that lists several, and forget them; do nothing without an error."""
        found, self.found = self.found, []
        if len(found) == 1:
            raise found[0]
        if found:
            error = ConfigError(
                f"the configuration has {len(found)} problems:" + "".join(f"\n  {each}" for each in found)
            )
            error.problems = found
            raise error


def key_below(key: str, error: HooklineError) -> str:
    """Return the key of the option that an error names, below `key`, or `key` itself if it names none."""
    return f"{key}.{error.option}" if isinstance(error, OptionError) and error.option else key


class Override(str):
    """The text of an override. The type of its parameter decides how it is read."""

    __slots__ = ()

    @property
    def guess(self) -> Any:
        """Return the number, boolean, null, list or table that the text looks like, else the text."""
        named = {"true": True, "false": False, "null": None, "none": None}
        if self.lower() in named:
            return named[self.lower()]
        for read in (int, float, json.loads):
            try:
                value = read(self)
                check_depth(value)
                return value
            except (ValueError, RecursionError):
                continue
        if self.startswith(("[", "{")):
            return _read_flow_yaml(str(self))
        return str(self)


def _read_flow_yaml(text: str) -> Any:
    import yaml
    from jsonargparse import get_loader

    try:
        check_yaml(text)
        return get_loader("yaml")(text)  # plain YAML reads 1e-3 as text
    except (yaml.YAMLError, TooMuch):
        return text


def plain_values(value: Any) -> Any:
    """Return a value as plain data, with overrides read by their looks."""
    if isinstance(value, Override):
        return value.guess
    if isinstance(value, dict):
        return {str(key): plain_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def format_value(value: Any) -> str:
    """Return a value as it would be written in a file, shortened."""
    if isinstance(value, Override) and value.startswith(("[", "{")):  # a table or a list may hold a secret
        value = value.guess
    text = redact(
        json.dumps(
            str(value) if isinstance(value, Override) else plain_values(_mask(value)), ensure_ascii=False
        )
    )
    return text if len(text) <= 80 else text[:77] + "..."


def _mask(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "(not shown)" if SECRET.search(str(key)) else _mask(each) for key, each in value.items()}
    if isinstance(value, Override) and value.startswith(("[", "{")):
        return _mask(value.guess)
    return [_mask(each) for each in value] if isinstance(value, list | tuple) else value


def has_secret(key: str, value: Any) -> bool:
    """Return whether a value holds a secret, so that it must not be shown."""
    known = plain_values(value)
    return SECRET.search(key) is not None or bool(_mask(known) != known)


MANY = 20
"""More names than this are a list that hides the hint."""


def nearest(name: str, allowed: Iterable[str], what: str) -> str:
    """Return ` Did you mean 'x'? <what>: a, b, c.` A long list is left out if there is a near name."""
    names = list(allowed)
    same = next((each for each in names if each.lower() == name.lower()), None)
    meant = f" Did you mean {same!r}?" if same is not None else closest(name, names)
    if meant and len(names) > MANY:
        return f"{meant} `hookline schema` has all {len(names)} names."
    return f"{meant} {what}: {', '.join(names) or 'none'}."


def describe_type(annotation: Any) -> str:
    """Return a type in words: `int | None` is 'a whole number or nothing (null)'."""
    if (known := _TYPE_WORDS.get(annotation) if isinstance(annotation, Hashable) else None) is not None:
        return known
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe_type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(format_value(each) for each in arguments)
    if origin in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(word for each in arguments for word in _member_words(each)))
        if "anything" in words:
            return "anything"
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if origin in (list, set, frozenset, tuple) or (inspect.isclass(origin) and issubclass(origin, Iterable)):
        inner = describe_type(arguments[0]) if arguments and arguments[0] is not Ellipsis else ""
        if origin is dict or (inspect.isclass(origin) and hasattr(origin, "keys")):
            return "a table"
        word, bracket, more = inner.partition(" (")
        several = (
            f"{word.removeprefix('a ').removeprefix('an ')}s" if word.startswith(("a ", "an ")) else word
        )
        return f"a list of {several}{bracket}{more}" if inner else "a list"
    if Callable in (annotation, origin):
        return "a function (its dotted name, such as 'module.function')"
    if origin is type or annotation is type:
        return "a class (its dotted name, such as 'module.Class')"
    if inspect.isclass(annotation) and annotation.__module__ == "torch":
        return f"a torch.{annotation.__name__}"  # a device or a dtype, which a table cannot describe
    if inspect.isclass(annotation):
        article = "an" if annotation.__name__[:1] in "AEIOU" else "a"
        return f"{article} {annotation.__name__} (a table with class_path and init_args)"
    return str(annotation).replace("typing.", "")


def _member_words(annotation: Any) -> list[str]:
    """Return the members of a union, each in words."""
    if annotation is bool:
        return ["true", "false"]
    if typing.get_origin(annotation) is typing.Literal:
        return [format_value(each) for each in typing.get_args(annotation)]
    return [describe_type(annotation)]


def choices(annotation: Any) -> list[str]:
    """Return the texts that the Literals in a type allow."""
    if typing.get_origin(annotation) is typing.Literal:
        return [each for each in typing.get_args(annotation) if isinstance(each, str)]
    return [text for each in typing.get_args(annotation) for text in choices(each)]
