"""Write docs/reference/: an entry for every public name, command and exit code, from the code itself.

An entry has the docstring, the signature, a table of parameters with types, defaults and allowed values, and
a link to the first example in the docs. Methods and attributes that a class inherits are part of its entry,
unless the base has an entry of its own.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import commands
from arguments import _Bare
from docstrings import (
    attribute_texts,
    following_text,
    inherited_texts,
    names_of,
    own_docs,
    parameter_texts,
    parameters_of,
)
from markdown_links import escaped, lines_with_heading, python_blocks, sentence

from hookline.engine._methods import HookMethods
from hookline.engine.checks import rule_of
from hookline.engine.hook import Hook
from hookline.util.errors import OptionError, Signal

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GENERATED = "<!-- Generated from the docstrings in src/hookline by tools/reference.py. -->"


@dataclass
class Page:
    """One generated page: the modules whose public names it describes, or the names themselves."""

    title: str
    about: str
    modules: dict[str, list[str]] = field(default_factory=dict)
    """By module: its public names. Empty: all of `__all__`."""


PAGES = {
    "hookline": Page(
        "API reference: hookline",
        "The names of the package `hookline`: trainer, modules, hooks, filters, signals, errors, strategies.",
        {"hookline": []},
    ),
    "hooks": Page(
        "API reference: built-in hooks",
        "Parameters and defaults of every built-in hook (callback), a [`Hook`](hookline.md#hook). "
        "[Built-in hooks](../builtin-hooks.md) has them by purpose, with examples.",
        {"hookline.hooks": []},
    ),
    "loggers": Page(
        "API reference: loggers",
        "Loggers and experiment trackers. [Logging](../logging.md) explains how to use them.",
        {"hookline.loggers": []},
    ),
    "testing": Page(
        "API reference: testing",
        "Tools for tests of hooks. [Testing hooks](../testing-hooks.md) explains them.",
        {"hookline.testing": []},
    ),
    "configuration": Page(
        "API reference: configuration, strategies and data",
        "Configuration files, strategies by name, and mixtures of loaders.",
        {
            "hookline.config": [],
            "hookline.distributed": ["make_strategy"],
            "hookline.data.mixing": ["schedule"],
        },
    ),
    "tools": Page(
        "API reference: reports, traces and control",
        "Functions behind the commands `hookline report`, `runs`, `summary`, `watch`, `trace`, `replay` and "
        "`control`, for programs.",
        {
            "hookline.report": [],
            "hookline.report.summary": ["summarize"],
            "hookline.watch": [],
            "hookline.tracing.reader": ["read_trace"],
            "hookline.tracing.report": ["count", "beside"],
            "hookline.tracing.replay": ["replay", "NotRecorded"],
            "hookline.control.client": ["ask"],
            "hookline.data.samples": ["Sample"],
            "hookline.cli": ["main"],
        },
    ),
    "interop": Page(
        "API reference: other trainers",
        "Hookline's hooks inside other trainers, and the interfaces of other trainers on Hookline.",
        {
            "hookline.interop.hosts": [],
            "hookline.interop.lightning": [],
            "hookline.interop.trainers": [],
            "hookline.interop.kempnerforge": [],
            "hookline.interop.model_training_framework": [],
            "hookline.interop.demo": ["BoringModel"],
        },
    ),
}

SECTIONS = {
    "hookline": {
        "Trainer and modules": ["Trainer", "Module", "DataModule", "Line", "State", "StepContext", "Metrics"],
        "Hooks and filters": [
            "Hook",
            "on",
            "every",
            "once",
            "after",
            "before",
            "when",
            "no_event",
            "observer",
            "explain",
            "declare_event",
            "EVENTS",
            "Recorder",
        ],
        "Signals that a hook returns or raises": [
            "SKIP_BATCH",
            "SKIP_STEP",
            "STEP_DONE",
            "END_EPOCH",
            "Signal",
            "StopTraining",
        ],
        "Checkpoints, weights and data": [],
        "Strategies": ["Strategy", "SingleDevice", "DDP", "FSDP", "Accelerated"],
        "Loggers": ["Logger", "JSONLines"],
        "Errors": [
            "HooklineError",
            "HookError",
            "OptionError",
            "LossError",
            "NonFiniteLoss",
            "ObserverError",
            "CheckpointError",
            "RunLockedError",
            "HangError",
            "PeerError",
            "Preempted",
        ],
    }
}
"""The order of the names on a page, under headings. The section without names gets the rest."""

OPTIONS = ("hookline.training.trainer.Trainer",)
"""Classes whose parameters are the options of the trainer, which have a page of their own."""
IN_DETAIL = {
    "Trainer", "Module", "DataModule", "Line", "Metrics", "Hook", "Recorder", "Logger", "Config", "Parts",
    "Played", "Mixture", "HooksConfig",
}  # fmt: skip
"""Classes whose methods have entries of their own; those of the others are rows of a table."""

GUIDES = {
    "hookline.loggers": ("logging", "../logging.md"),
    "hookline.testing": ("testing hooks", "../testing-hooks.md"),
    "hookline.config": ("configuration files", "../configuration.md"),
    "hookline.distributed": ("strategies", "../ranks.md#strategies"),
    "hookline.report": ("the report of a run", "../report.md"),
    "hookline.watch": ("the live page", "../watch.md"),
    "hookline.interop.hosts": ("your own loop and other trainers", "../hosts.md"),
    "hookline.interop.lightning": ("coming from Lightning", "../migrating-lightning.md"),
    "hookline.interop.trainers": ("coming from trainers", "../migrating-trainers.md"),
    "hookline.interop.kempnerforge": ("coming from KempnerForge", "../migrating-kempnerforge.md"),
    "hookline.interop.model_training_framework": (
        "coming from model_training_framework",
        "../migrating-model-training-framework.md",
    ),
}
"""The page about a module, for names of it that no code block imports."""
SEE = {
    "EVENTS": ("all events", "../lifecycle.md"),
    "State": ("all facts", "../lifecycle.md#facts"),
    "Metrics": ("logging", "../logging.md"),
    "HooklineError": (
        "an error before the first step",
        "../troubleshooting.md#an-error-before-the-first-step",
    ),
    "Report": ("the report of a run", "../report.md"),
    "list_runs": ("compare training runs", "../runs.md"),
    "Strategy": ("strategies", "../ranks.md#strategies"),
    "SingleDevice": ("strategies", "../ranks.md#strategies"),
}
"""Where names of `hookline` are explained that no page shows in code or names in its text."""
ALIASES: dict[str, ast.expr] = {"Mode": ast.parse('Literal["auto", "min", "max"]', mode="eval").body}
"""Names of types that a reader would have to look up."""
LONGEST_DEFAULT = 80
"""Characters of a default that is shown."""
ELSEWHERE = ("hookline.engine._methods", "hookline.run.state_parts")
"""Modules of bases whose methods and attributes are events and facts, which docs/lifecycle.md lists."""


def public_names(page: Page) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every entry of a page."""
    for module, names in page.modules.items():
        for name in names or importlib.import_module(module).__all__:
            yield module, name


# ---- signatures --------------------------------------------------------------------------------------------


def bare(annotation: Any) -> str:
    """Return a type as a user writes it, without `Annotated`."""
    if annotation is inspect.Parameter.empty:
        return ""
    if isinstance(annotation, typing.ForwardRef):  # of a named tuple, up to Python 3.13
        annotation = annotation.__forward_arg__
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    try:
        tree = _Bare(ALIASES).visit(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return text
    return ast.unparse(tree).replace("'", '"')


def allowed_values(function: Any, name: str) -> str:
    """Return what the rule of a parameter allows, in the words of its error."""
    try:
        hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except Exception:  # a name that is imported for type checkers only
        return ""
    rule = rule_of(hints.get(name))
    if rule is None or "bool" in str(hints[name]) or "Literal" in str(hints[name]):
        return ""
    try:
        rule(name, object())
    except OptionError as error:
        return error.allowed if isinstance(error.allowed, str) else ""
    except Exception:
        return ""
    return ""


def shown_default(value: Any) -> str:
    """Return a default as code."""
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, enum.Enum):
        return f"`{type(value).__name__}.{value.name}`"
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"`{value.__name__}`"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    text = "..." if "factory" in text or len(text) > LONGEST_DEFAULT else text
    text = text.replace("'", '"')
    return f"`{text}`".replace("|", "\\|")


def signature(name: str, function: Any) -> list[str]:
    """Return a block with the signature, one parameter per line if it is long."""
    parts, star = [], False
    for each in parameters_of(function):
        prefix = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        star |= prefix == "*"
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        kind = bare(each.annotation)
        default = "" if each.default is each.empty else shown_default(each.default).strip("`")
        default = default.replace("\\|", "|")
        text = prefix + each.name + (f": {kind}" if kind else "")
        parts.append(text + (f" = {default}" if default and kind else f"={default}" if default else ""))
    result = ""
    if isinstance(function, FunctionType):
        result = bare(inspect.signature(function).return_annotation)
    end = f" -> {result}" if result else ""
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in parts), f"){end}"])
    return ["```py", line, "```"]


def parameter_table(function: Any, texts: dict[str, str]) -> list[str]:
    """Return the table of the parameters, or nothing if the code says no more than the signature."""
    rows, known = [], False
    for each in parameters_of(function):
        kind = bare(each.annotation).replace("|", "\\|")
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name not in texts:
            continue
        says = sentence(texts.get(each.name, ""))
        if allowed := allowed_values(function.__init__ if inspect.isclass(function) else function, each.name):
            says = f"{says} Allowed: {allowed}.".strip()
        known |= bool(says)
        cell = f"`{kind}`" if kind else ""
        stars = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        default = "" if stars else shown_default(each.default)
        rows.append(f"| `{each.name}` | {escaped(says)} | {cell} | {default} |")
    if not known:  # the signature says as much
        return []
    return ["", "| parameter | what it is | type | default |", "|---|---|---|---|", *rows]


# ---- entries -----------------------------------------------------------------------------------------------


def entry(module: str, name: str, examples: dict[str, str], level: int) -> list[str]:
    """Return the entry of one public name."""
    value = getattr(importlib.import_module(module), name)
    out = ["", f"{'#' * level} {name}", "", f"`from {module} import {name}`", ""]
    where = ["", where_shown(module, name, examples)]
    if inspect.isclass(value):
        return [*out, *class_entry(name, value), *where, *methods(name, value, level)]
    elif isinstance(value, ModuleType):  # `hookline.explain` is a module that can be called
        out += callable_entry(name, getattr(value, name))
    elif callable(value) and hasattr(value, "__code__"):
        out += callable_entry(name, value)
    elif isinstance(value, Signal):
        out += [f"A signal. {sentence(signal_text(name))}"]
    else:
        out += [sentence(constant_text(module, name, value))]
    return [*out, *where]


def where_shown(module: str, name: str, examples: dict[str, str]) -> str:
    """Return a sentence with a link to an example, or to the page about the name."""
    own, other = examples.get(f"{module}.{name}", ""), examples.get(name, "")
    if module.startswith("hookline.interop"):  # a name such as Trainer has examples of another class
        other = ""
    guide = GUIDES.get(module) or SEE.get(name)
    page = f"See [{guide[0]}]({guide[1]})." if guide else ""
    shown = [each for each in (own, other) if each.startswith("Example")]
    return next(iter([*shown, *filter(None, [page, own, other])]), "")


def callable_entry(name: str, function: Any, overridden: Iterable[Any] = ()) -> list[str]:
    """Return the signature, the text and the parameters of a function. overridden: methods of bases."""
    prose, texts = function_texts(function, overridden)
    return [*signature(name, function), "", sentence(prose), *parameter_table(function, texts)]


def function_texts(function: Any, overridden: Iterable[Any] = ()) -> tuple[str, dict[str, str]]:
    """Return the docstring of a function without its parameters, and the text of each parameter."""
    names = names_of(function)
    texts: dict[str, str] = {}
    for each in overridden:
        texts |= parameter_texts(inspect.getdoc(each) or "", names)[1]
    prose, own = parameter_texts(inspect.getdoc(function) or "", names)
    return prose, {**texts, **own}


def class_entry(name: str, cls: type) -> list[str]:
    """Return the signature, the text and the parameters of a class."""
    if issubclass(cls, enum.Enum):
        members = [f"`{name}.{each.name}` (`{each.value!r}`)".replace("'", '"') for each in cls]
        return [sentence(inspect.getdoc(cls) or ""), "", "Members: " + ", ".join(members) + "."]
    if f"{cls.__module__}.{cls.__qualname__}" in OPTIONS:
        about = "The parameters are the [options of the trainer](../options.md)."
        head, _ = parameter_texts(inspect.getdoc(cls) or "", [""])
        return ["```py", f"{name}(**options)", "```", "", sentence(head), "", about]
    names = class_parameters(cls)
    head, _ = parameter_texts(inspect.getdoc(cls) or "", names)
    made = next((base for base in cls.__mro__ if "__init__" in vars(base)), object)
    of_init = own_docs(made)[-1] if made.__module__.startswith("hookline") else ""
    tail, _ = parameter_texts(of_init, [*names, *names_of(made)])
    out = signature(name, cls) if names else []
    out += ["", sentence(head)]
    if tail and not (head and len(tail) < 60):  # "Watch a metric." says nothing new
        out += ["", sentence(tail)]
    if issubclass(cls, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__mro__[1:] if base not in (object,))
        out += ["", f"Bases: {bases}."]
    elif above := [base for base in cls.__mro__[1:] if base in entries_of_classes() and base is not Hook]:
        out += ["", f"Base: {entries_of_classes()[above[0]]}."]
    if names:
        out += parameter_table(cls, inherited_texts(cls, names))
    return out


def class_parameters(cls: type) -> list[str]:
    """Return the parameters of a class that its entry lists."""
    own = "__init__" in vars(cls) or is_dataclass(cls) or not issubclass(cls, BaseException)
    return names_of(cls) if own else []


@functools.cache
def entries_of_classes() -> dict[type, str]:
    """Return a link to the first entry of every public class."""
    found: dict[type, str] = {}
    for key, page in PAGES.items():
        for module, name in public_names(page):
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value):
                found.setdefault(value, f"[`{name}`]({key}.md#{name.lower()})")
    return found


def methods(name: str, cls: type, level: int) -> list[str]:
    """Return the public methods, properties and attributes of a class that have a docstring."""
    if issubclass(cls, enum.Enum):
        return []
    out, short = list[str](), list[str]()
    attributes = own_attributes(cls) if has_detail(name, cls) else {}
    for method, value in sorted(defined(cls).items()):
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, property | functools.cached_property):
            attributes[method] = (inspect.getdoc(function) or "").partition("\n\n")[0]
        elif inspect.isfunction(function) and function.__doc__ and not has_detail(name, cls):
            given = ", ".join(each.name for each in parameters_of(function))
            said = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
            short.append(f"| `{method}({given})` | {escaped(sentence(said))} |")
        elif inspect.isfunction(function) and function.__doc__:
            text = callable_entry(method, function, overridden(cls, method))
            out += ["", f"{'#' * (level + 1)} {name}.{method}", "", *text]
    if short:
        out += ["", "| method | what it does |", "|---|---|", *short]
    if attributes:
        out += ["", "| attribute | what it is |", "|---|---|"]
        out += [f"| `{each}` | {escaped(sentence(said))} |" for each, said in sorted(attributes.items())]
    return out


def has_detail(name: str, cls: type) -> bool:
    """Return whether the methods of a class have entries of their own, not rows of a table."""
    return name in IN_DETAIL and ".interop.lightning" not in cls.__module__


def overridden(cls: type, method: str) -> list[Any]:
    """Return the methods of this name, the most basic first."""
    return [vars(base)[method] for base in reversed(cls.__mro__) if method in vars(base)]


def own_classes(cls: type) -> list[type]:
    """Return a class and its bases that have no entry of their own, the most basic first."""
    elsewhere = [base for base in cls.__mro__[1:] if base in entries_of_classes()]
    return [
        base
        for base in reversed(cls.__mro__)
        if base.__module__.startswith("hookline")
        and base.__module__ not in ELSEWHERE
        and not any(issubclass(other, base) for other in elsewhere)
    ]


def defined(cls: type) -> dict[str, Any]:
    """Return what a class defines under public names, without the events that a hook listens to.

    The base of another system's hooks (`__hookline_base__`) has its events.
    """
    listens = issubclass(cls, HookMethods) and "__hookline_base__" not in vars(cls)
    events = set(dir(HookMethods)) if listens else set[str]()
    found = {key: value for base in own_classes(cls) for key, value in vars(base).items()}
    return {key: value for key, value in found.items() if not key.startswith("_") and key not in events}


def own_attributes(cls: type) -> dict[str, str]:
    """Return the documented attributes of a class that are not its parameters."""
    found: dict[str, str] = {}
    for base in own_classes(cls):
        found |= attribute_texts(base)
    names = class_parameters(cls)
    return {key: said for key, said in found.items() if not key.startswith("_") and key not in names}


def signal_text(name: str) -> str:
    """Return the docstring that follows a constant of util/errors.py."""
    import hookline.util.errors as errors

    return following_text(errors, name)


def constant_text(module: str, name: str, value: Any) -> str:
    """Return the text under a constant, or that of its class."""
    text = following_text(importlib.import_module(module), name)
    return text or f"An object of the class `{type(value).__name__}`. {inspect.getdoc(type(value)) or ''}"


# ---- examples ----------------------------------------------------------------------------------------------


def find_examples() -> dict[str, str]:
    """Return, by name, a sentence with a link to the first section of the docs that shows the name.

    A code block that imports the name comes before one that only uses it, then a mention in the text. The
    cookbook comes first, because its recipes are short.
    """
    pages = sorted(
        (each for each in DOCS.rglob("*.md") if "reference" not in each.relative_to(DOCS).parts),
        key=lambda each: ("cookbook" not in each.parts, "migrating" in each.name, str(each)),
    )
    imported: dict[str, str] = {}
    mentioned: dict[str, str] = {}
    for path in pages:
        text = path.read_text()
        for heading, code in python_blocks(text):
            for name in names_of_hookline(code):
                imported.setdefault(name, f"Example: {section_link(path, heading)}.")
        for heading, line in lines_with_heading(text):
            for name in re.findall(r"`@?(?:\w+\.)*([A-Za-z_]\w+)\b[^`]*`", line):
                mentioned.setdefault(name, f"See {section_link(path, heading)}.")
    return {**mentioned, **imported}


def section_link(path: Path, heading: tuple[str, str] | None) -> str:
    """Return a link from a page of the reference to a section."""
    title, anchor = heading or (path.stem, "")
    return f"[{title}](../{path.relative_to(DOCS)}{f'#{anchor}' if anchor else ''})"


def names_of_hookline(code: str) -> Iterator[str]:
    """Yield the names that a block imports from Hookline, with and without their module."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a block that shows a signature
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hookline":
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                yield alias.name
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("hookline."):
            yield ast.unparse(node)
            yield node.attr


# ---- pages -------------------------------------------------------------------------------------------------


def api_page(key: str) -> str:
    """Return the text of one page."""
    page, examples = PAGES[key], find_examples()
    out = [f"# {page.title}", "", GENERATED, "", page.about]
    modules = list(page.modules)
    for module in modules:
        names = [name for each, name in public_names(page) if each == module]
        sections = SECTIONS.get(module)
        if sections:
            listed = {name for group in sections.values() for name in group}
            for title, group in sections.items():
                out += ["", f"## {title}"]
                for name in group or [each for each in names if each not in listed]:
                    out += entry(module, name, examples, 3)
            continue
        if len(modules) > 1:
            doc = (inspect.getdoc(importlib.import_module(module)) or "").partition("\n\n")[0]
            out += ["", f"## {module}", "", " ".join(doc.split())]
        for name in names:
            out += entry(module, name, examples, 3 if len(modules) > 1 else 2)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of every generated page, by path."""
    found = {DOCS / "reference" / f"{key}.md": api_page(key) for key in PAGES}
    return {**found, DOCS / "reference" / "commands.md": commands.page()}


if __name__ == "__main__":
    sys.stdout.write("".join(pages().values()))
