"""Read a configuration file and apply the overrides of the command line. Imports and builds nothing."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.config import problems
from hookline.config.problems import ConfigError, Override, Problems, check_depth
from hookline.util.urls import MANIFEST

CONFIG_SUFFIXES = (".toml", ".yaml", ".yml")
_OVERRIDE = re.compile(r"--(?P<key>[A-Za-z_][\w-]*(?:\.[\w:/-]+)*)(?:=(?P<value>.*))?", re.DOTALL)


class ConfigSource:
    """The values of a configuration and the origin of each value."""

    def __init__(self, values: dict[str, Any], path: Path | None = None, name: str = "") -> None:
        self.values = values
        self.path = path
        self.name = name or (str(path) if path is not None else "configuration")
        self.typed: dict[str, str] = {}
        """Key -> the command-line option that set it."""
        self.problems = Problems()
        """What is wrong so far. After a problem, the other parts are checked and not made."""

    @property
    def folder(self) -> Path | None:
        """Return the folder of the file. Class paths may name modules in it."""
        return self.path.resolve().parent if self.path is not None else None

    def where(self, key: str) -> str:
        """Return the file, with the option if the command line set this key."""
        known = [
            each
            for each in self.typed
            if each == key or key.startswith(f"{each}.") or each.startswith(f"{key}.")
        ]
        last = key.rpartition(".")[2]
        known += [
            each
            for each in self.typed
            if key.endswith(f".init_args.{last}") and each == key.replace(".init_args", "")
        ]
        return f"{self.name} with {self.typed[known[0]]}" if known else self.name

    def wrong(self, key: str, problem: str, *value: Any) -> ConfigError:
        """Return an error with the file, the option, the key and the value."""
        return ConfigError(
            problem, where=self.where(key), key=key, value=value[0] if value else None, has_value=bool(value)
        )

    def refused(self, key: str, error: Exception, *value: Any, more: str = "") -> ConfigError:
        """Return the configuration error for a part that raised `error`."""
        made = self.wrong(key, f"{error}{more}", *value)
        made.allowed = getattr(error, "allowed", ())
        return made


def read_config(path: str | Path) -> ConfigSource:
    """Read a TOML or YAML file as plain values."""
    path = Path(path)
    name = str(path)
    if path.is_dir() and any((path / each).exists() for each in (MANIFEST, "model.safetensors")):
        raise ConfigError(
            "this is a checkpoint. A configuration is never taken from a checkpoint: name the file the run "
            "was started with, and add --checkpoint to continue from here.",
            where=name,
        )
    if path.is_dir() or path.suffix not in CONFIG_SUFFIXES:
        kind = (
            "is a directory"
            if path.is_dir()
            else f"ends in {path.suffix!r}"
            if path.suffix
            else "has no ending"
        )
        raise ConfigError(
            f"the name of a configuration ends in {', '.join(CONFIG_SUFFIXES)}; this {kind}.", where=name
        )
    try:
        with path.open("rb") as file:
            data = file.read(problems.BYTES + 1)
        problems.check_size(data)
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        beside = (
            sorted(each.name for each in path.parent.glob("*") if each.suffix in CONFIG_SUFFIXES)
            if path.parent.is_dir()
            else []
        )
        raise ConfigError(
            f"there is no such file. In its folder: {', '.join(beside) or 'no configuration'}.", where=name
        ) from None
    except problems.TooMuch as error:
        raise ConfigError(str(error), where=name) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}", where=name) from None
    return ConfigSource(_read_toml(text, name) if path.suffix == ".toml" else read_yaml(text, name), path)


def _read_toml(text: str, name: str) -> dict[str, Any]:
    try:
        problems.check_toml(text)
        values = tomllib.loads(text)
        problems.check_depth(values)
        return values
    except (problems.TooMuch, RecursionError) as error:
        raise ConfigError(
            str(error) if isinstance(error, problems.TooMuch) else problems.TOO_DEEP, where=name
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"this is not valid TOML: {error}.{_toml_hint(text, str(error))}", where=name
        ) from None
    except ValueError:  # Python does not convert a text of thousands of digits
        raise ConfigError(problems.TOO_LONG, where=name) from None


def _toml_hint(text: str, error: str) -> str:
    """Return the line with the error, and a hint if it has text without quotes."""
    line = re.search(r"line (\d+)", error)
    lines = text.splitlines()
    if line is None or not 0 < int(line[1]) <= len(lines):
        return ""
    bad = lines[int(line[1]) - 1].strip()
    quotes = (
        " Text needs quotes."
        if re.search(r"=\s*[A-Za-z_./]", bad) and not re.search(r"=\s*(true|false)\b", bad)
        else ""
    )
    return f" The line is: {bad}.{quotes}"


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """Read YAML as plain values. `name` is the source for errors."""
    import yaml  # type: ignore[import-untyped]
    from jsonargparse import get_loader

    try:
        problems.check_yaml(text)
        _refuse_doubles(yaml.compose(text, Loader=yaml.SafeLoader), name)
        values = get_loader("yaml")(text)
    except problems.TooMuch as error:
        raise ConfigError(str(error), where=name) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not valid YAML: {' '.join(str(error).split())}", where=name) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("a configuration is a table of keys and values.", where=name)
    return _text_keys(values, name, "")


def _refuse_doubles(node: Any, name: str) -> None:
    """Refuse a key that occurs twice, because YAML silently keeps the last one."""
    lines: dict[str, list[int]] = {}
    for part in getattr(node, "value", ()) if not isinstance(getattr(node, "value", ""), str) else ():
        key, value = part if isinstance(part, tuple) else (None, part)
        if key is not None and isinstance(key.value, str):
            lines.setdefault(key.value, []).append(key.start_mark.line + 1)
        _refuse_doubles(value, name)
    for key, found in lines.items():
        if len(found) > 1:
            raise ConfigError(
                f"this key is there {len(found)} times; the last is in line {max(found)}.",
                where=name,
                key=key,
            )


def _text_keys(values: Mapping[Any, Any], name: str, above: str) -> dict[str, Any]:
    """Refuse keys that are not text: YAML reads `on:` as a boolean and `3:` as a number."""
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(
                f"the key {key!r} is read as {type(key).__name__}; put it in quotes.", where=name, key=above
            )
    return {
        key: _text_keys(each, name, f"{above}.{key}".lstrip(".")) if isinstance(each, Mapping) else each
        for key, each in values.items()
    }


def split_overrides(
    arguments: list[str], known: Iterable[str] = ()
) -> tuple[list[tuple[str, str]], list[str]]:
    """Split `--a.b 3 --c.d=4 --e.f` into pairs of key and text, and the remaining arguments."""
    settings: list[tuple[str, str]] = []
    rest: list[str] = []
    known = set(known)
    index = 0
    while index < len(arguments):
        each = arguments[index]
        index += 1
        if each == "--":
            rest += arguments[index - 1 :]
            break
        match = _OVERRIDE.fullmatch(each)
        if match is None or ("." not in match["key"] and match["key"] not in known):
            rest.append(each)
        elif match["value"] is not None:
            settings.append((match["key"], match["value"]))
        elif index < len(arguments) and not arguments[index].startswith("--"):
            settings.append((match["key"], arguments[index]))
            index += 1
        else:
            settings.append((match["key"], "true"))
    return settings, rest


def keys_named(name: str, arguments: Iterable[str]) -> list[str]:
    """Return the keys of this name, with their sections, in the file among the arguments; none if it cannot
    be read.
    """

    def find(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for key, value in values.items():
            if key == name:
                yield prefix + key
            elif isinstance(value, dict):
                yield from find(value, f"{prefix}{key}.")

    path = next((each for each in arguments if each.endswith(CONFIG_SUFFIXES)), "")
    try:
        return list(find(read_config(path).values, ""))
    except (OSError, ConfigError):
        return []


def short_name(path: str) -> str:
    """Return the name of a hook in a list: `pkg.hooks.MyHook` -> `my_hook`."""
    from hookline.engine.hook import snake_case

    return snake_case(re.split(r"[.:]", path)[-1])


def unique_name(base: str, taken: Container[str]) -> str:
    """Return a name that is not taken: `base`, or else `base_2`, `base_3` and so on."""
    numbered = (f"{base}_{number}" for number in itertools.count(2))
    return base if base not in taken else next(name for name in numbered if name not in taken)


def name_members(given: Any) -> Any:
    """Return a list of class paths as a mapping of names, so that each can be overridden; any other value
    unchanged.
    """
    if not isinstance(given, list):
        return given
    members: dict[str, Any] = {}
    for member in given:
        path = member.get("class_path", "") if isinstance(member, dict) else member
        base = short_name(path) if isinstance(path, str) and path else f"number_{len(members) + 1}"
        members[unique_name(base, members)] = {"class_path": member} if isinstance(member, str) else member
    return members


# ---- overrides of the command line -------------------------------------------------------------------------


PART_KEYS = (
    "module",
    "datamodule",
    "optimizer",
    "lr_scheduler",
    "loss",
    "step",
    "trainer",
    "trainer.strategy",
)
MAPPING_KEYS = ("hooks", "loggers")
"""Sections whose members are parts."""


def lay_over(source: ConfigSource, settings: Iterable[tuple[str, str]]) -> None:
    """Apply overrides: `("trainer.max_epochs", "3")`, or `("module", '{"class_path": "model.Net"}')`. One
    that cannot be applied is a problem of the source.
    """
    for key, text in settings:
        source.typed[key] = f"--{key}"
        path = key.split(".")
        with source.problems.collect():
            if not _is_part(key, path):
                _set(source, path, Override(text))
            elif text.strip().startswith("{"):
                _merge(source, path, _read_table(source, key, text))
            else:
                is_none = len(path) == 1 and Override(text).guess is None
                _set(source, path, None if is_none else Override(text))


def _is_part(key: str, path: list[str]) -> bool:
    return (
        key in PART_KEYS
        or (len(path) == 2 and path[0] in MAPPING_KEYS)
        or (len(path) > 1 and path[-1] == "init_args")
    )


def _read_table(source: ConfigSource, key: str, text: str) -> dict[str, Any]:
    """Read a table with the checks of a file: no key twice, and every key is text."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise source.wrong(f"{key}.{twice}", f"this key is there {names.count(twice)} times.")
        return table

    try:
        found: Any = json.loads(text, object_pairs_hook=once)
        check_depth(found)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        found = read_yaml(text, source.where(key))
    if not isinstance(found, dict):
        raise source.wrong(
            key, 'must be a table: {"class_path": "module.Class", "argument": 1}.', Override(text)
        )
    return found


def _merge(source: ConfigSource, path: list[str], table: dict[str, Any]) -> None:
    """Keep the other arguments if the class stays the same, else replace the part."""
    *above, last = path
    present = _as_table(_table_at(source, above).get(last)) or {}
    if not present or table.get("class_path", present.get("class_path")) != present.get("class_path"):
        _set(source, path, table)
        return
    for name, value in table.items():
        if name == "init_args" and isinstance(value, dict):
            for inner, argument in value.items():
                _set(source, [*path, name, inner], argument)
        else:
            _set(source, [*path, name], value)


def _set(source: ConfigSource, path: list[str], value: Any) -> None:
    *above, last = path
    table = _table_at(source, above)
    inner = table.get("init_args")
    (inner if isinstance(inner, dict) and last in inner else table)[last] = value
    if above[-1:] == ["init_args"]:
        _table_at(source, above[:-1]).pop(last, None)  # replaces the same argument beside init_args
    elif last == "init_args" and isinstance(value, dict):
        for name in value:
            table.pop(name, None)


def _table_at(source: ConfigSource, path: list[str]) -> dict[str, Any]:
    """Return the table at this path, and create it if it does not exist."""
    table: dict[str, Any] = source.values
    for depth, name in enumerate(path):
        inner = _as_table(table.get(name))
        if inner is None:
            key = ".".join(path[: depth + 1])
            raise source.wrong(key, "this is a plain value, so no key below it can be set.", table[name])
        table[name] = inner
        table = inner
    return table


def _as_table(value: Any) -> dict[str, Any] | None:
    """Return a value as a table: a class path as a table with only class_path, a list as a table of names.
    Return None if it cannot be a table.
    """
    if isinstance(value, Override) and value.startswith(("[", "{")) and isinstance(value.guess, dict | list):
        value = value.guess
    if isinstance(value, list):
        value = name_members(value)
    elif isinstance(value, str):
        value = {"class_path": value}
    elif value is None or isinstance(value, bool):
        value = {}
    return value if isinstance(value, dict) else None
