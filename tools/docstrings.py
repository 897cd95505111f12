"""Read docstrings: the texts of parameters, fields, attributes and constants.

The docstrings name parameters in the middle of the text (`monitor: the metric's name. mode: ...`);
`parameter_texts` finds them there.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

BETWEEN = r", | and | or "
"""What separates the names of parameters that share a text."""


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or class without `self`."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return []
    if found and (found[0].name == "self" or (found[0].name == "cls" and "." in function.__qualname__)):
        found = found[1:]
    return [each for each in found if "Never" not in str(each.annotation)]


def names_of(function: Any) -> list[str]:
    """Return the names of the parameters of a function or class without `self`."""
    return [each.name for each in parameters_of(function)]


def parameter_texts(doc: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """Return the docstring without its parameters, and the text of each parameter.

    A parameter begins with `name: ` or `one, two: `, quoted or not, at the start of a paragraph or sentence.
    A name may have an example of its value in parentheses: `interval ('10 minutes'): `.
    """
    if not names:
        return doc, {}
    one = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    one = rf"`?\*{{0,2}}(?:{one})`?(?: \([^()]*\))?"
    starts = re.compile(rf"(?:(?<=^)|(?<=[.;] )|(?<=\.\) ))({one}(?:(?:{BETWEEN}){one})*): ")
    prose, found = list[str](), dict[str, str]()
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        if paragraph.lstrip().startswith(">>>"):
            code = re.sub(r" *# doctest:.*(\n *\+ELLIPSIS)?", "", textwrap.dedent(paragraph).strip())
            prose.append(f"```py\n{code}\n```")
            continue
        if re.search(r"^( {2,}|- |\|)", paragraph, re.MULTILINE):  # a block or a list stays as it is
            prose.append(paragraph)
            continue
        text = " ".join(paragraph.split())
        matches = list(starts.finditer(text))
        before = text[: matches[0].start()] if matches else text
        if before.strip():
            prose.append(before.strip())
        for match, after in itertools.zip_longest(matches, matches[1:]):
            said = text[match.end() : after.start() if after else None].strip()
            found |= shared_text(match.group(1), said)
    return "\n\n".join(prose), found


def shared_text(given: str, said: str) -> dict[str, str]:
    """Return the text of each parameter before a colon: `one, two ('10 minutes')`."""
    found = {}
    for each in re.split(rf"(?:{BETWEEN})(?![^(]*\))", given):
        name, _, example = each.partition(" (")
        found[name.strip("`*")] = f"{example[:-1]}: {said}" if example else said
    return found


def own_docs(cls: type) -> list[str]:
    """Return the docstrings of a class and of its own `__init__`."""
    made = vars(cls).get("__init__")
    return [inspect.cleandoc(each.__doc__ or "") for each in (cls, made) if each is not None]


def inherited_texts(cls: type, names: list[str]) -> dict[str, str]:
    """Return the texts of parameters that a class and its bases document; a class comes before its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("hookline"):
            continue
        found |= attribute_texts(base) | refused_fields(base)
        for doc in own_docs(base):
            found |= parameter_texts(doc, [*names, *names_of(base)])[1]
    return {name: said for name, said in found.items() if name in names}


def refused_fields(cls: type) -> dict[str, str]:
    """Return what a settings class of another system says of each field that it does not take."""
    found = fields(cls) if is_dataclass(cls) else ()
    return {each.name: f"Refused: {each.metadata['instead']}" for each in found if "instead" in each.metadata}


def attribute_texts(cls: type) -> dict[str, str]:
    """Return the text under each annotated field or attribute in the body of a class."""
    return class_bodies(cls.__module__).get(cls.__name__, {})


@functools.cache
def class_bodies(module: str) -> dict[str, dict[str, str]]:
    """Return the texts under the attributes of every class of a module."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {each.name: dict(texts_of(each.body)) for each in tree.body if isinstance(each, ast.ClassDef)}


def texts_of(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield each name that a line assigns to and the text on the line below."""
    for line, after in itertools.pairwise(body):
        if isinstance(target := assigned(line), ast.Name) and (said := constant_of(after)):
            yield target.id, said


def assigned(line: ast.stmt) -> ast.expr | None:
    """Return what a line assigns a value or a type to."""
    if isinstance(line, ast.Assign):
        return line.targets[0]
    return line.target if isinstance(line, ast.AnnAssign) else None


def constant_of(line: ast.stmt) -> str:
    """Return the text of a line that is nothing but text."""
    if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
        return " ".join(str(line.value.value).split())
    return ""


def following_text(module: ModuleType, name: str) -> str:
    """Return the docstring under an assignment, in the module or where it imports the name from."""
    body = ast.parse(inspect.getsource(module)).body
    for line in body:
        if isinstance(line, ast.ImportFrom) and line.module and name in [each.name for each in line.names]:
            return following_text(importlib.import_module(line.module), name)
    return dict(texts_of(body)).get(name, "")
