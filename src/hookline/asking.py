"""What a hook asks of an object it is given, read from its code: whoever cannot give it can say so when the hook is added."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def asked_of(owners: tuple[str, ...], hook: Any, is_base: Callable[[type], bool]) -> Iterator[tuple[str, str]]:
    """Attributes that the hook's methods read of these owners (`trainer`, `self.model`), each with its method.

    Classes are read down to the first base. What the hook asks `hasattr` about is left out: it knows that not all have it.
    """
    for cls in type(hook).__mro__:
        if is_base(cls) or cls is object:
            return
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):
            continue  # written at run time: then the owner says so when it comes to it
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "hasattr"]
        asked_first = {each.value for call in calls for each in call.args if isinstance(each, ast.Constant)}
        for method in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            read = [node for node in ast.walk(method) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
            for name in [node.attr for node in read if _name(node.value) in owners]:
                if name not in asked_first:
                    yield name, f"{cls.__name__}.{method.name}"


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
