"""Derive the types of `Trainer`'s arguments for type checkers, and the tables of the docs, from their
declarations.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from docstrings import attribute_texts
from markdown_links import escaped, sentence

from hookline.run.option_tables import OLD_NAMES, TABLES
from hookline.run.options import DECLARATIONS, GROUPS, TrainerParts, documentation

ROOT = Path(__file__).resolve().parent.parent
HEAD = '''"""Generated from run/options.py by tools/generate.py; edit the declarations there."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from hookline.distributed.base import Strategy
    from hookline.engine.foreign import LoggerLike
    from hookline.loggers.base import Logger
'''


class _Bare(ast.NodeTransformer):
    """Converts a type to what a user writes: aliases expanded, no `Annotated`, no quotes."""

    def __init__(self, aliases: dict[str, ast.expr]) -> None:
        self.aliases = aliases

    def visit_Name(self, node: ast.Name) -> Any:
        """Replace an alias such as `Time` by its type."""
        return self.visit(self.aliases[node.id]) if node.id in self.aliases else node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """Replace `Annotated[int, AtLeast(1)]` by `int`."""
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == "Annotated"
            and isinstance(node.slice, ast.Tuple)
        ):
            return self.visit(node.slice.elts[0])
        return node if ast.unparse(node.value) == "Literal" else self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Replace `bool | (str | Path)` by `bool | str | Path`."""
        members = [self.visit(node.left), self.visit(node.right)]
        return ast.parse(" | ".join(map(ast.unparse, members)), mode="eval").body

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace `"str | Strategy"` by `str | Strategy`."""
        return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node


def types_of(cls: type) -> dict[str, str]:
    """Return the types of the arguments that a class declares, as text."""
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    aliases = {
        each.targets[0].id: each.value
        for each in module.body
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Name)
        and ast.unparse(each.value).startswith("Annotated[")
    }
    body = next(
        each.body for each in module.body if isinstance(each, ast.ClassDef) and each.name == cls.__name__
    )
    return {
        ast.unparse(each.target): ast.unparse(_Bare(aliases).visit(each.annotation)).replace("'", '"')
        for each in body
        if isinstance(each, ast.AnnAssign)
    }


def typed() -> str:
    """Return the source of `hookline/run/_arguments.py`."""
    docs, out = documentation(), [HEAD]
    for cls in DECLARATIONS:
        out += [
            "",
            f"class {cls.__name__}Arguments(TypedDict, total=False):",
            f'    """{_title(cls)}."""',
            "",
        ]
        for name, kind in types_of(cls).items():
            doc = textwrap.wrap(f'"""{docs[name]}"""', 122)
            out += [f"    {name}: {kind}", *(f"    {line}" for line in doc)]
        out += [""]
    out += ["", "class OptionArguments(", *(f"    {cls.__name__}Arguments," for cls in GROUPS), "):"]
    out += ['    """`Options` as keyword arguments."""', "", ""]
    out += [f"class TrainerArguments(OptionArguments, {TrainerParts.__name__}Arguments):"]
    out += ['    """All keyword arguments of `Trainer`."""']
    return "\n".join(out) + "\n"


def _title(cls: type) -> str:
    return (cls.__doc__ or "").rstrip(".")


def _default(cls: type, name: str) -> str:
    field = next(each for each in fields(cls) if each.name == name)
    assert field.default is not MISSING
    return f"`{field.default!r}`".replace("'", '"')


def page() -> str:
    """Return the text of docs/options.md."""
    docs = documentation()
    out = [
        "# Options of the trainer",
        "",
        "<!-- Generated from src/hookline/run/options.py by tools/generate.py. -->",
        "",
        "Every keyword argument of `hookline.Trainer`, apart from [older names](#older-names), which are "
        "still accepted. [Training](training.md#options) explains how the options work together.",
        "",
        "- In a [configuration](configuration.md) the options are keys of the section `trainer`, except "
        "`hooks`, `callbacks`,",
        "  `logger` and `config`, which have sections of their own.",
        "- A value that is not allowed raises `hookline.OptionError` when the trainer is created. The error "
        "has the attributes",
        "  `option`, `value` and `allowed`.",
    ]
    for cls in DECLARATIONS:
        out += [
            "",
            f"## {_title(cls)}",
            "",
            "| option | what it does | type | default |",
            "|---|---|---|---|",
        ]
        for name, kind in types_of(cls).items():
            out.append(f"| `{name}` | {escaped(docs[name])} | `{escaped(kind)}` | {_default(cls, name)} |")
    return "\n".join([*out, *tables(), *older_names()]) + "\n"


def tables() -> list[str]:
    """Return the keys of the options that may be dictionaries."""
    out = []
    for option, cls in TABLES.items():
        about = (cls.__doc__ or "").partition(": what")[0]
        out += ["", f"## Keys of {option}", "", f"{about}: `Trainer({option}={{...}})`.", ""]
        out += ["| key | what it does | type | default |", "|---|---|---|---|"]
        for name, kind in types_of(cls).items():
            said = sentence(attribute_texts(cls)[name])
            out.append(f"| `{name}` | {escaped(said)} | `{escaped(kind)}` | {_default(cls, name)} |")
    return out


def older_names() -> list[str]:
    """Return the options that are keys of others now."""
    out = ["", "## Older names", "", "Options that are keys of others now. They are still accepted.", ""]
    out += ["| older name | now |", "|---|---|"]
    return [*out, *(f'| `{old}` | `{new}={{"{key}": ...}}` |' for old, (new, key) in OLD_NAMES.items())]


def overview() -> str:
    """Return the text of docs/training.md with a current table of options."""
    path = ROOT / "docs/training.md"
    rows = ["| | |", "|---|---|"]
    for cls in DECLARATIONS:
        title = _title(cls)
        anchor = re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
        rows.append(
            f"| [{title}](options.md#{anchor}) | {', '.join(f'`{name}`' for name in types_of(cls))} |"
        )
    begin, end = "<!-- options: generated by tools/generate.py -->\n", "<!-- end of options -->\n"
    before, _, rest = path.read_text().partition(begin)
    return before + begin + "\n" + "\n".join(rows) + "\n\n" + end + rest.partition(end)[2]
