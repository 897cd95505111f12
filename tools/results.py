"""Write docs/reference/results.md: the classes of objects that functions return and attributes hold.

Users do not make these objects, so an entry has no signature: only what returns it, its attributes and its
methods.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from docstrings import inherited_texts, parameters_of
from markdown_links import escaped, sentence
from reference import PAGES, defined, public_names

RESULTS = {
    "hookline.engine.hook_list": ["Handle", "HookList"],
    "hookline.engine.cost": ["Costs", "Cost"],
    "hookline.engine.changes": ["HookChange"],
    "hookline.engine.explain": ["Explanation"],
    "hookline.run.timings": ["Timings"],
    "hookline.run.optimizers": ["Schedule"],
    "hookline.run.parameter_groups": ["ParameterGroups"],
    "hookline.run.predictions": ["Predictions"],
    "hookline.data.mixture": ["MixedLoader"],
    "hookline.training.trial": ["BatchSizes"],
    "hookline.tracing.session": ["Tracing"],
    "hookline.tracing.replay": ["Replayed"],
    "hookline.tracing.report": ["TraceCounts"],
    "hookline.checkpoint.weights": ["WeightsReport"],
    "hookline.checkpoint.export": ["Exported"],
    "hookline.checkpoint.foreign_files": ["Imported"],
    "hookline.digests.file": ["RunDigests"],
    "hookline.digests.diverge": ["DivergeReport"],
    "hookline.report.runs": ["Listing", "ListedRun"],
    "hookline.hooks.model_summary": ["Summary"],
    "hookline.interop.accelerate": ["AcceleratedLine"],
}
"""The classes, by module."""
HELD = {
    "HookList": "`trainer.hooks` and `line.hooks`",
    "Cost": "the rows of `Costs`",
    "HookChange": "`trainer.hooks.changes()`",
    "MixedLoader": "`trainer.loaders` in a run with a mixture",
    "ListedRun": "the `runs` of a `Listing`",
}
"""Where an object is found that no public function is declared to return."""
MOST = 5
"""Functions that an entry names."""


def result_classes() -> Iterator[type]:
    """Yield the classes of the page."""
    for module, names in RESULTS.items():
        yield from (getattr(importlib.import_module(module), name) for name in names)


@functools.cache
def returned_by() -> dict[str, list[str]]:
    """Return, by the name of a class, the public functions and attributes whose declared type has it."""
    found: dict[str, list[str]] = {}
    for page in PAGES.values():
        for module, name in public_names(page):
            for label, function in functions_of(name, getattr(importlib.import_module(module), name)):
                for word in re.findall(r"\b[A-Z]\w+", str(inspect.signature(function).return_annotation)):
                    if label not in found.setdefault(word, []):
                        found[word].append(label)
    return found


def functions_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a public name calls: itself, or the methods and properties of a class."""
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value) and not issubclass(value, enum.Enum):
        for method, given in defined(value).items():
            function = getattr(given, "__func__", getattr(given, "fget", getattr(given, "func", given)))
            if inspect.isfunction(function):
                yield f"{name}.{method}", function


def entry(cls: type) -> list[str]:
    """Return the entry of one class."""
    name = cls.__name__
    found = returned_by().get(name, [])
    where = HELD.get(name) or ", ".join(f"`{each}`" for each in found[:MOST]) + ", ..." * (len(found) > MOST)
    doc = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    attributes, methods = dict(field_texts(cls)), list[str]()
    for key, value in sorted(vars(cls).items()):
        function = getattr(value, "__func__", value)
        if key.startswith("_") or not inspect.getdoc(value):
            continue
        said = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        if isinstance(value, property | functools.cached_property):
            attributes[key] = said
        elif inspect.isfunction(function):
            given = ", ".join(each.name for each in parameters_of(function))
            methods.append(f"| `{key}({given})` | {escaped(sentence(said))} |")
    out = ["", f"## {name}", "", sentence(" ".join(doc.split())), "", f"From: {where.removesuffix('.')}."]
    if attributes:
        out += ["", "| attribute | what it is |", "|---|---|"]
        out += [f"| `{key}` | {escaped(sentence(said))} |" for key, said in attributes.items()]
    if methods:
        out += ["", "| method | what it does |", "|---|---|", *methods]
    return out


def field_texts(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the public fields of a dataclass or named tuple, and their texts."""
    declared = fields(cls) if is_dataclass(cls) else ()
    names = [each.name for each in declared if not each.name.startswith("_")]
    texts = inherited_texts(cls, names)
    yield from ((name, texts.get(name, "")) for name in names)


def page() -> str:
    """Return the text of docs/reference/results.md."""
    out = [
        "# API reference: objects that functions return",
        "",
        "<!-- Generated from the docstrings in src/hookline by tools/results.py. -->",
        "",
        "Attributes and methods of the objects that functions return and that `trainer` holds.",
    ]
    for cls in sorted(result_classes(), key=lambda each: each.__name__.lower()):
        out += entry(cls)
    return "\n".join(out) + "\n"
