"""Laying the command line's values over a file's: one at a time, or a whole part as a table
in JSON or YAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hookline.config.files import Source, named, read_yaml
from hookline.config.limits import check_depth
from hookline.config.problems import ConfigError, Override

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
