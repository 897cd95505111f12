"""Read the code of a hook when it is added: its function and name, the names in its source text.
Code without source text is not checked.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself, without partials and bound methods around it."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function with its class, and of an object with `__call__` that of its class."""
    function = plain_function(function)
    return getattr(function, "__qualname__", type(function).__qualname__)


def attributes_read(
    owners: tuple[str, ...], hook: Any, is_base: Callable[[type], bool]
) -> Iterator[tuple[str, str]]:
    """Yield the attributes that the hook's methods read from these owners (`trainer`, `self.model`), each
    with its method.

    Classes are read up to the first base. An attribute that the hook checks with `hasattr` is left out.
    """
    for cls in type(hook).__mro__:
        if is_base(cls) or cls is object:
            return
        if (tree := parse_source(cls)) is None:
            continue  # defined at run time; the owner raises when a missing attribute is read
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and _dotted_name(node.func) == "hasattr"
        ]
        checked = {each.value for call in calls for each in call.args if isinstance(each, ast.Constant)}
        for method in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            read = [
                node
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            ]
            for name in [node.attr for node in read if _dotted_name(node.value) in owners]:
                if name not in checked:
                    yield name, f"{cls.__name__}.{method.name}"


def parse_source(thing: Any) -> ast.Module | None:
    """Return the syntax tree of a class, function or module; None if it has no source text."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if inspect.ismodule(thing) or _defines(tree, inspect.unwrap(thing)) else None


def _defines(tree: ast.Module, thing: Any) -> bool:
    """Return whether a text is that of this class or function. For code made by `exec`, inspect returns the
    text of whatever else is called `<string>`: since Python 3.13 that is the text of `python -c`.
    """
    name = thing.__name__ if inspect.isclass(thing) else thing.__code__.co_name
    if name == "<lambda>":
        return any(isinstance(each, ast.Lambda) for each in ast.walk(tree))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(each, kinds) and each.name == name for each in tree.body)


def words_of(tree: ast.AST) -> set[str]:
    """Return the names and string constants in a tree."""
    nodes = list(ast.walk(tree))
    texts = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    return texts | names | {each.attr for each in nodes if isinstance(each, ast.Attribute)}


def passes_arguments_on(function: Any, method: str) -> bool:
    """Return whether a function mentions the method and calls something with `*` or `**`:
    `super().on_step_end(*args)`. One that changes them, `*args[:-1]`, does not pass them on.

    A function without source text counts as one that does, because most overrides with `*args, **kwargs` do.
    """
    if (tree := parse_source(function)) is None:
        return True
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    starred = [given.value for call in calls for given in call.args if isinstance(given, ast.Starred)]
    return (
        method in words_of(tree)
        and not any(isinstance(each, ast.Subscript) for each in starred)
        and (bool(starred) or any(each.arg is None for call in calls for each in call.keywords))
    )


def function_in_closure(
    function: FunctionType, method: str, outer: tuple[FunctionType, ...] = ()
) -> FunctionType | None:
    """Return the function of this name that a function calls from its closure, through any number of
    decorators. outer: the functions whose closures lead to it, because a wrapper may refer to itself.
    """
    if function.__name__ == method or function in outer:
        return None
    cells = [each.cell_contents for each in function.__closure__ or () if each != EMPTY_CELL]
    inner = [each for each in cells if inspect.isfunction(each)]
    named = next((each for each in inner if each.__name__ == method), None)
    outer = (*outer, function)
    return named or next(filter(None, (function_in_closure(each, method, outer) for each in inner)), None)


EMPTY_CELL = CellType()
"""A variable of a closure that has no value yet."""


def _dotted_name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
