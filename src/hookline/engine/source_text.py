"""What the source text of a class mentions, for checks when a hook is added. What has no source text is not
checked.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def asked_of(
    owners: tuple[str, ...], hook: Any, is_base: Callable[[type], bool]
) -> Iterator[tuple[str, str]]:
    """Attributes that the hook's methods read of these owners (`trainer`, `self.model`), each with its
    method.

    Classes are read down to the first base. What the hook asks `hasattr` about is left out: it knows that not
    all have it.
    """
    for cls in type(hook).__mro__:
        if is_base(cls) or cls is object:
            return
        if (tree := parsed(cls)) is None:
            continue  # written at run time: then the owner says so when it comes to it
        calls = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "hasattr"
        ]
        asked_first = {each.value for call in calls for each in call.args if isinstance(each, ast.Constant)}
        for method in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            read = [
                node
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            ]
            for name in [node.attr for node in read if _name(node.value) in owners]:
                if name not in asked_first:
                    yield name, f"{cls.__name__}.{method.name}"


def parsed(thing: Any) -> ast.Module | None:
    """Return the source text of a class, a function or a module as a tree; None if there is none."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError, SyntaxError):
        return None


def words_of(tree: ast.AST) -> set[str]:
    """Return the names and texts in a tree: what it reads, calls, sets, or may look up by name."""
    nodes = list(ast.walk(tree))
    texts = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    return texts | names | {each.attr for each in nodes if isinstance(each, ast.Attribute)}


def passes_arguments_on(function: Any, method: str) -> bool:
    """Return whether a function calls something with `*` or `**` and mentions the method:
    `super().on_step_end(*args)`.

    One without source text counts as one that does: that is what most overrides with `*args, **kwargs` are
    for.
    """
    if (tree := parsed(function)) is None:
        return True
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    starred = any(isinstance(given, ast.Starred) for call in calls for given in call.args)
    return method in words_of(tree) and (
        starred or any(each.arg is None for call in calls for each in call.keywords)
    )


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
