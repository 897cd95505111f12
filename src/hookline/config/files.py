"""Reading a configuration file, and telling the command line's values from its other words. Nothing is
imported or built here.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hookline.config import problems
from hookline.config.problems import ConfigError, Override, check_depth
from hookline.util.urls import MANIFEST

SUFFIXES = (".toml", ".yaml", ".yml")
_OVERRIDE = re.compile(r"--(?P<key>[A-Za-z_][\w-]*(?:\.[\w:/-]+)*)(?:=(?P<value>.*))?", re.DOTALL)


class Source:
    """The values of a configuration, and where each one came from."""

    def __init__(self, values: dict[str, Any], path: Path | None = None, name: str = "") -> None:
        self.values = values
        self.path = path
        self.name = name or (str(path) if path is not None else "configuration")
        self.typed: dict[str, str] = {}
        """Key -> the option on the command line that set it."""

    @property
    def folder(self) -> Path | None:
        """Where the file is: class paths may name modules beside it."""
        return self.path.resolve().parent if self.path is not None else None

    def where(self, key: str) -> str:
        """The file, or the option if the command line said it."""
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
        """The error, with everything that is known about the place."""
        return ConfigError(
            problem, where=self.where(key), key=key, value=value[0] if value else None, has_value=bool(value)
        )

    def refused(self, key: str, error: Exception, *value: Any, more: str = "") -> ConfigError:
        """The error of the configuration about a part that was refused."""
        made = self.wrong(key, f"{error}{more}", *value)
        made.allowed = getattr(error, "allowed", ())
        return made


def read(path: str | Path) -> Source:
    """A TOML or YAML file as plain values."""
    path = Path(path)
    name = str(path)
    if path.is_dir() and any((path / each).exists() for each in (MANIFEST, "model.safetensors")):
        raise ConfigError(
            "this is a checkpoint. A configuration is never taken from a checkpoint: name the file the run "
            "was started with, and add --checkpoint to continue from here.",
            where=name,
        )
    if path.is_dir() or path.suffix not in SUFFIXES:
        kind = (
            "is a directory"
            if path.is_dir()
            else f"ends in {path.suffix!r}"
            if path.suffix
            else "has no ending"
        )
        raise ConfigError(
            f"a configuration is a file that ends in {', '.join(SUFFIXES)}; this {kind}.", where=name
        )
    try:
        with path.open("rb") as file:
            data = file.read(problems.BYTES + 1)
        problems.check_size(data)
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        beside = (
            sorted(each.name for each in path.parent.glob("*") if each.suffix in SUFFIXES)
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
    values = _toml(text, name) if path.suffix == ".toml" else read_yaml(text, name)
    return Source(values, path)


def _toml(text: str, name: str) -> dict[str, Any]:
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
            f"this is no valid TOML: {error}.{_toml_hint(text, str(error))}", where=name
        ) from None
    except ValueError:  # Python converts no text of thousands of digits
        raise ConfigError(problems.TOO_LONG, where=name) from None


def _toml_hint(text: str, error: str) -> str:
    """The line it is about; text without quotes is what newcomers stumble over."""
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
    """YAML as plain values; `name` is where it stands."""
    import yaml  # type: ignore[import-untyped]
    from jsonargparse import get_loader

    try:
        problems.check_yaml(text)
        _refuse_doubles(yaml.compose(text, Loader=yaml.SafeLoader), name)
        values = get_loader("yaml")(text)
    except problems.TooMuch as error:
        raise ConfigError(str(error), where=name) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is no valid YAML: {' '.join(str(error).split())}", where=name) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("a configuration is a table of keys and values.", where=name)
    return _text_keys(values, name, "")


def _refuse_doubles(node: Any, name: str) -> None:
    """YAML lets a later key of the same name win in silence."""
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
    """YAML reads the keys `on:` and `3:` as something else than text."""
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
    """`--a.b 3 --c.d=4 --e.f` -> pairs of key and text, and the arguments that are none of these."""
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


def short_name(path: str) -> str:
    """`pkg.hooks.MyHook` -> `my_hook`: what a hook in a list is called."""
    from hookline.engine.hook import snake_case

    return snake_case(re.split(r"[.:]", path)[-1])


def _named(given: list[Any]) -> dict[str, Any]:
    """A list of class paths as a mapping of names, so that one of them can be overridden."""
    named: dict[str, Any] = {}
    for each in given:
        path = each if isinstance(each, str) else each.get("class_path", "") if isinstance(each, dict) else ""
        base = short_name(path) if isinstance(path, str) and path else f"number_{len(named) + 1}"
        name, number = base, 2
        while name in named:
            name, number = f"{base}_{number}", number + 1
        named[name] = {"class_path": each} if isinstance(each, str) else each
    return named


def named(given: Any) -> Any:
    """Lists as mappings of names; anything else as it is."""
    return _named(given) if isinstance(given, list) else given


# ---- Laying the command line's values over a file's


PARTS = ("module", "datamodule", "optimizer", "lr_scheduler", "loss", "step", "trainer", "trainer.strategy")
MAPPINGS = ("hooks", "loggers")
"""Their members are parts."""


def lay_over(source: Source, settings: Iterable[tuple[str, str]]) -> None:
    """`("trainer.max_epochs", "3")`, or `("module", '{"class_path": "model.Net", "width": 3}')`."""
    for key, text in settings:
        source.typed[key] = f"--{key}"
        path = key.split(".")
        if not _is_part(key, path):
            _set(source, path, Override(text))
        elif text.strip().startswith("{"):
            _merge(source, path, _table(source, key, text))
        else:
            _set(source, path, None if len(path) == 1 and Override(text).guess is None else Override(text))


def _is_part(key: str, path: list[str]) -> bool:
    return (
        key in PARTS
        or (len(path) == 2 and path[0] in MAPPINGS)
        or (len(path) > 1 and path[-1] == "init_args")
    )


def _table(source: Source, key: str, text: str) -> dict[str, Any]:
    """With the checks that a file gets: no key twice, and every key is text."""

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


def _merge(source: Source, path: list[str], table: dict[str, Any]) -> None:
    """Other arguments stay as they are, as long as the class stays the same."""
    *above, last = path
    present = _as_table(_inside(source, above).get(last)) or {}
    if not present or table.get("class_path", present.get("class_path")) != present.get("class_path"):
        _set(source, path, table)
        return
    for name, value in table.items():
        if name == "init_args" and isinstance(value, dict):
            for inner, each in value.items():
                _set(source, [*path, name, inner], each)
        else:
            _set(source, [*path, name], value)


def _set(source: Source, path: list[str], value: Any) -> None:
    *above, last = path
    table = _inside(source, above)
    inner = table.get("init_args")
    (inner if isinstance(inner, dict) and last in inner else table)[last] = value
    if above[-1:] == ["init_args"]:
        _inside(source, above[:-1]).pop(
            last, None
        )  # it takes the place of the same argument beside init_args
    elif last == "init_args" and isinstance(value, dict):
        for name in value:
            table.pop(name, None)


def _inside(source: Source, path: list[str]) -> dict[str, Any]:
    """The table at this place, made if there is none."""
    table: dict[str, Any] = source.values
    for depth, name in enumerate(path):
        inner = _as_table(table.get(name))
        if inner is None:
            key = ".".join(path[: depth + 1])
            raise source.wrong(key, "there is nothing below it that could be set.", table[name])
        table[name] = inner
        table = inner
    return table


def _as_table(value: Any) -> dict[str, Any] | None:
    """A class path alone is a table with nothing else in it; a list of them, a table of names. None if it can
    be none.
    """
    if isinstance(value, Override) and value.startswith(("[", "{")) and isinstance(value.guess, dict | list):
        value = value.guess
    if isinstance(value, list):
        value = named(value)
    elif isinstance(value, str):
        value = {"class_path": value}
    elif value is None or isinstance(value, bool):
        value = {}
    return value if isinstance(value, dict) else None
