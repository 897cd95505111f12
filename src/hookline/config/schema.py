"""Make the JSON schema of a configuration, for editors."""

from __future__ import annotations

import datetime
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hookline.config.classes import annotation, parameters
from hookline.config.hooks import HOOK_SETTINGS, HooksConfig, switch_names
from hookline.config.load import SECTIONS
from hookline.data.mixing import Mixture
from hookline.engine.registry import BUILTIN_HOOKS, hook_class, offered_hooks
from hookline.run.options import documentation

_PATH_SCHEMA = {"type": "string", "description": "a class path: package.module.Class"}


def schema() -> dict[str, Any]:
    """Return a JSON schema (draft 2020-12), with the parameters of built-in hooks and the paths of other
    classes.
    """
    from hookline.config.sections import TrainerSection

    sections: dict[str, Any] = {
        name: {**_part_schema(), "description": doc} for name, doc in SECTIONS.items()
    }
    trainer = _parameters_schema(TrainerSection)
    trainer["properties"]["strategy"] = {"anyOf": [{"type": "string"}, _part_schema()], "default": "auto"}
    for name, doc in documentation().items():
        if name in trainer["properties"]:
            trainer["properties"][name]["description"] = doc
    sections["trainer"] = {**trainer, "description": SECTIONS["trainer"]}
    sections["loggers"] = {
        "anyOf": [
            {"type": "boolean"},
            _PATH_SCHEMA,
            {"type": "array", "items": _part_schema()},
            {"type": "object", "additionalProperties": _part_schema()},
        ],
        "description": SECTIONS["loggers"],
    }
    sections["hooks"] = {
        "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/hook"}}, _named_hooks()],
        "description": SECTIONS["hooks"],
    }
    sections["lr_scheduler"]["anyOf"][1]["properties"].update(
        interval={"enum": ["step", "epoch"]},
        frequency={"type": "integer", "minimum": 1},
        monitor={"type": "string"},
        strict={"type": "boolean"},
        name={"type": "string"},
    )
    sections["optimizer"]["anyOf"][1]["properties"].update(
        groups={
            "type": "object",
            "description": "settings by pattern: 'norms', 'biases', 'class:Embedding' or a name pattern",
            "additionalProperties": {"type": "object", "minProperties": 1},
        },
        layer_decay={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        layers={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    )
    sections["checkpoint"] = {
        "anyOf": [{"type": "string"}, {"const": False}],
        "description": SECTIONS["checkpoint"],
    }
    sections["mixture"] = {**_parameters_schema(Mixture), "description": SECTIONS["mixture"]}
    sections["config"] = {"type": "object", "description": SECTIONS["config"]}
    sections["allow"] = {"type": "array", "items": {"type": "string"}, "description": SECTIONS["allow"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Hookline configuration",
        "type": "object",
        "properties": sections,
        "required": ["module"],
        "additionalProperties": False,
        "$defs": {"hook": _hook_schema()},
    }


def _part_schema() -> dict[str, Any]:
    """Return the schema of a part: a class path, or a table with class_path and arguments."""
    table = {
        "type": "object",
        "properties": {"class_path": _PATH_SCHEMA, "init_args": {"type": "object"}},
        "required": ["class_path"],
    }
    return {"anyOf": [dict(_PATH_SCHEMA), table]}


def _named_hooks() -> dict[str, Any]:
    switches = _parameters_schema(HooksConfig)["properties"]
    own = {name: _hook_table(name, needs_path=False) for name in BUILTIN_HOOKS}
    properties = {
        name: {"anyOf": [{"$ref": "#/$defs/hook"}, table, {"type": "boolean"}]} for name, table in own.items()
    }
    properties.update({name: switches[name] for name in switch_names()})
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": {"anyOf": [{"$ref": "#/$defs/hook"}, {"const": False}]},
    }


def _hook_schema() -> dict[str, Any]:
    names = {"enum": sorted(offered_hooks()), "description": "a hook's name"}
    return {
        "anyOf": [
            names,
            dict(_PATH_SCHEMA),
            *(_hook_table(name, needs_path=True) for name in BUILTIN_HOOKS),
            _part_schema()["anyOf"][1],
        ]
    }


def _hook_table(name: str, needs_path: bool) -> dict[str, Any]:
    """Return the schema of a built-in hook, with parameters beside class_path or in init_args."""
    cls = hook_class(name)
    inner = _parameters_schema(cls)
    own = inner["properties"]
    settings: dict[str, Any] = {setting: {} for setting in HOOK_SETTINGS if setting not in own}
    paths = [name, f"{cls.__module__}.{cls.__name__}", f"hookline.hooks.{cls.__name__}"]
    properties = {**own, **settings, "class_path": {"enum": paths}, "init_args": {**inner, "required": []}}
    return {
        "type": "object",
        "description": (cls.__doc__ or "").partition("\n")[0],
        "properties": properties,
        "additionalProperties": False,
        "required": ["class_path"] if needs_path else [],
    }


def _parameters_schema(cls: type) -> dict[str, Any]:
    """Return the schema of a class's parameters. jsonargparse would list all imported subclasses."""
    signature = inspect.signature(cls).parameters
    properties: dict[str, Any] = {}
    for name in parameters(cls):
        properties[name] = of_type(annotation(cls, name))
        default = signature[name].default if name in signature else None
        if isinstance(default, bool | int | float | str):
            properties[name]["default"] = default
    return {"type": "object", "properties": properties, "additionalProperties": False}


_TYPE_NAMES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    dict: "object",
    list: "array",
    Path: "string",
    datetime.timedelta: "string",
}


def of_type(hint: Any) -> dict[str, Any]:
    """Return the schema of a type, or an empty one for a type that JSON cannot describe."""
    if hint is Any or hint is object:
        return {}
    if hint in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        limits = (getattr(note, "schema", None) for note in hint.__metadata__)
        return of_type(arguments[0]) | next((each for each in limits if isinstance(each, dict)), {})
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        union_members = [of_type(each) for each in arguments]
        if all(set(each) == {"type"} and isinstance(each["type"], str) for each in union_members):
            return {"type": list(dict.fromkeys(each["type"] for each in union_members))}
        return {"anyOf": union_members} if all(union_members) else {}
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return {"type": "object"}
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        return {"type": "array", "items": of_type(arguments[0]) if arguments else {}}
    if Callable in (origin, hint):
        return {"type": ["string", "object"]}
    return _part_schema() if inspect.isclass(hint) else {}
