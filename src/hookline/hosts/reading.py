"""What a hook asks of its trainer, read from its code, so that a host that has not got it can say so when the hook is added."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

TRAINERS = ("trainer", "state.trainer")
"""How hooks write it."""


def asked_of_trainer(hook: Any) -> Iterator[tuple[str, str]]:
    """Attributes of the trainer that the hook's methods use, each with its method; not those that `hasattr` is asked for."""
    for cls in type(hook).__mro__:
        if "__hookline_base__" in vars(cls) or cls is object:
            return
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):
            continue  # written at run time: then the trainer says so when it comes to it
        for method in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            nodes = list(ast.walk(method))
            careful = " ".join(_text(node) for node in nodes if isinstance(node, ast.Call) and _text(node.func) == "hasattr")
            asked = [node.attr for node in nodes if isinstance(node, ast.Attribute) and _text(node.value) in TRAINERS]
            yield from ((name, f"{cls.__name__}.{method.name}") for name in asked if repr(name) not in careful)


def _text(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else ""
