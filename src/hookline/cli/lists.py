"""`hooks`, `events` and `schema`: lists, as text or JSON. Torch is imported only to describe a hook."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

from hookline.cli.output import OK, print_result
from hookline.config.problems import ConfigError
from hookline.engine.events import EVENTS, RECEIVERS, Event
from hookline.engine.registry import BUILTIN_HOOKS, hook_class, offered_hooks, package_hooks
from hookline.util.errors import HookError


def list_parts(chosen: argparse.Namespace) -> int:
    """Print a list, or one of its members."""
    if chosen.command == "schema":
        from hookline.config.schema import schema

        print(json.dumps(schema(), indent=2))
        return OK
    is_hook = chosen.command == "hooks"
    if not chosen.name:
        listed = list(map(listed_hook, sorted(offered_hooks())) if is_hook else map(event_data, EVENTS))
        return print_result(chosen, listed, _definitions([(row["name"], row["doc"]) for row in listed]))
    try:
        data = hook_data(chosen.name) if is_hook else event_data(EVENTS.named(chosen.name))
    except HookError as error:  # a name that does not exist
        raise ConfigError(str(error)) from None
    return print_result(chosen, data, _hook_text(data) if is_hook else _event_text(data))


def listed_hook(name: str) -> dict[str, Any]:
    """Return a hook's entry without importing it: the doc comes from the source, or names the package that
    offers it.
    """
    path = offered_hooks()[name]
    if name not in BUILTIN_HOOKS:
        offers = [each.dist.name for each in package_hooks() if each.name == name and each.dist is not None]
        package = ", ".join(offers) or "?"
        return {
            "name": name,
            "class_path": path.replace(":", "."),
            "builtin": False,
            "doc": f"offered by {package}: {path}",
        }
    module, _, cls = path.partition(":")
    file = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    found = next(
        each
        for each in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef) and each.name == cls
    )
    return {
        "name": name,
        "class_path": path.replace(":", "."),
        "builtin": True,
        "doc": " ".join((ast.get_docstring(found) or "").partition("\n\n")[0].split()),
    }


def hook_data(name: str) -> dict[str, Any]:
    """Return a hook with its parameters and its events."""
    from hookline.config.classes import annotation
    from hookline.config.problems import describe_type, plain_values
    from hookline.engine.listener import event_methods

    cls = hook_class(name)
    found = []
    for parameter in inspect.signature(cls).parameters.values():
        hint = annotation(cls, parameter.name)
        further = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        required = parameter.default is parameter.empty and not further
        kind = (
            "further arguments, by name"
            if further
            else describe_type(hint)
            if hint is not None
            else "anything"
        )
        found.append(
            {
                "name": str(parameter).partition(":")[0] if further else parameter.name,
                "type": kind,
                "required": required,
                "default": None if required or further else plain_values(parameter.default),
            }
        )
    bare = object.__new__(cls)
    names = {event.name for _, events in event_methods(bare, "H", EVENTS, check=False) for event in events}
    names |= {EVENTS.named(each).name for each in getattr(cls, "may_listen", ())}
    events = [event.name for event in EVENTS if event.name in names]
    return {
        "name": name,
        "class_path": offered_hooks()[name].replace(":", "."),
        "builtin": name in BUILTIN_HOOKS,
        "doc": "\n\n".join(each for each in (inspect.getdoc(cls), _own_doc(cls)) if each),
        "parameters": found,
        "events": events,
    }


def _own_doc(cls: Any) -> str:
    return inspect.cleandoc(vars(cls).get("__init__").__doc__ or "") if "__init__" in vars(cls) else ""


def event_data(event: Event) -> dict[str, Any]:
    """Return a row of the event table."""
    return {
        "name": event.name,
        "doc": event.doc,
        "heard_by": [RECEIVERS[each] for each in event.receivers],
        "action": event.action,
        "facts": {fact.name: fact.doc for fact in EVENTS.facts_at(event) if fact.name in event.facts},
        "known_everywhere": [fact.name for fact in EVENTS.facts_at(event) if fact.name not in event.facts],
        "returns": event.returns,
        "signals": list(event.signals),
        "spellings": list(event.spellings),
        "verbs": list(event.stages),
    }


def _width() -> int:
    return max(60, shutil.get_terminal_size((100, 20)).columns)


def _definitions(rows: list[tuple[str, str]]) -> str:
    wide = max((len(name) for name, _ in rows), default=0) + 2
    lines = [textwrap.wrap(doc, max(30, _width() - wide)) or [""] for _, doc in rows]
    return "\n".join(
        "\n".join([f"{name:<{wide}}{first}", *(" " * wide + each for each in more)])
        for (name, _), (first, *more) in zip(rows, lines, strict=True)
    )


def _hook_text(data: dict[str, Any]) -> str:
    rows = [(f"  {each['name']}", _parameter(each)) for each in data["parameters"]]
    needed = [f"{each['name']} = ...  # {each['type']}" for each in data["parameters"] if each["required"]]
    use = "\n".join([f"[hooks.{data['name']}]", f'class_path = "{data["name"]}"', *needed])
    listens = textwrap.wrap(f"Listens to {', '.join(data['events']) or 'nothing'}.", _width())
    return "\n\n".join(
        [
            f"{data['name']} ({data['class_path']})",
            data["doc"],
            f"Parameters:\n{_definitions(rows) or '  none'}",
            "\n".join(listens),
            f"In a configuration:\n{textwrap.indent(use, '  ')}",
        ]
    )


def _parameter(about: dict[str, Any]) -> str:
    """Return `a whole number (default: 3)`; "nothing" is Python's None and YAML's null."""
    words = about["type"].replace("nothing (null)", "nothing")
    if about["name"].startswith("*"):
        return str(words)
    default = "nothing" if about["default"] is None else json.dumps(about["default"])
    return f"{words}; required" if about["required"] else f"{words} (default: {default})"


def _event_text(data: dict[str, Any]) -> str:
    returned = {
        "nothing": "ignored",
        "signal": " or ".join(data["signals"]),
        "replace": "replaces the fact",
        "value": "used by the run",
    }[data["returns"]]
    parts = [
        f"{data['name']}: {data['doc']}",
        f"Received by: {', '.join(data['heard_by'])}. In: {', '.join(data['verbs'])}.",
        "Facts:\n" + (_definitions([(f"  {name}", doc) for name, doc in data["facts"].items()]) or "  none"),
        f"A returned value: {returned}.",
    ]
    if data["spellings"]:
        parts.append(f"Also written: {', '.join(data['spellings'])}.")
    parts.append(
        "\n".join(textwrap.wrap(f"Facts of every event: {', '.join(data['known_everywhere'])}.", _width()))
    )
    return "\n\n".join(parts)
