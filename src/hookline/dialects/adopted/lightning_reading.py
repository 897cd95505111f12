"""What a Lightning callback asks of its trainer, read from its code, so that it is refused
when it is added.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from hookline.asking import parsed, words_of
from hookline.dialects.adopted.lightning_view import TrainerView, is_lightnings, is_of_trainer
from hookline.dialects.lightning.table import CALLBACK_ROWS

OWN = "self.trainer"
DEEPEST = 2
"""Functions of Lightning that a method hands the trainer on to are read as well, and those that these call.
"""
ASKS_FIRST = ("isinstance", "hasattr", "getattr", "issubclass")
"""Code that asks one of these about the trainer knows that not every trainer has what it is after."""


def out_of_reach(callback: Any, base: type) -> list[tuple[str, str]]:
    """Attributes of the trainer that the view has not, each with the method that wants it."""
    found: dict[str, str] = {}
    given: set[str] = set()
    for where, function in _functions(callback, base):
        for path, is_set in _asks(function, where.rpartition(".")[2]):
            found.setdefault(path, where)
            given |= {path} if is_set else set()
    package = base.__module__.removesuffix(".callbacks.callback")
    own = {path for path in given if path.count(".") == 1 and not is_known(package, path.rpartition(".")[2])}
    return [(path, where) for path, where in found.items() if path not in own]


def is_known(package: str, name: str) -> bool:
    """Whether the view or Lightning's own trainer has it; what neither has, a callback may put there for its
    own use.
    """
    return hasattr(TrainerView, name) or is_of_trainer(package, name)


def owner_of(path: str) -> type:
    """The part of the view that should have the last name of `trainer.a.b`."""
    part: Any = TrainerView
    for name in path.split(".")[1:-1]:
        part = part.PARTS.get(name, part)
    return part  # type: ignore[no-any-return]


def mentions(callback: Any, base: type, name: str) -> bool:
    """Whether the callback's source text has this name in it."""
    trees = [parsed(function) for _, function in _functions(callback, base)]
    return any(name in words_of(tree) for tree in trees if tree is not None)


def _functions(callback: Any, base: type) -> Iterator[tuple[str, Any]]:
    """What the callback's classes define, down to Lightning's base; each name once."""
    seen: set[str] = set()
    for cls in type(callback).__mro__:
        if cls is base:
            return
        for name, value in vars(cls).items():
            if name not in seen and (function := _function(value)) is not None:
                yield f"{cls.__name__}.{name}", function
            seen.add(name)


def _function(value: Any) -> Any:
    value = getattr(value, "__func__", getattr(value, "fget", value))
    return inspect.unwrap(value) if inspect.isfunction(value) else None


def _asks(function: Any, name: str, depth: int = 0) -> Iterator[tuple[str, bool]]:
    """What is missing, and whether it is set."""
    source = parsed(function)
    if source is None or not source.body:
        return  # written at run time, or in C: then the view says so when it comes to it
    tree = source.body[0]
    if isinstance(tree, ast.FunctionDef):
        reader = _Reader(_trainers(tree, name))
        for node in tree.body:
            reader.visit(node)
        yield from reader.missing
        for called in reader.called if depth < DEEPEST else ():
            helper = _function(function.__globals__.get(called))
            if helper is not None and is_lightnings(helper):
                yield from _asks(helper, called, depth + 1)


def _trainers(tree: ast.FunctionDef, method: str) -> set[str]:
    """The parameters that are the trainer: by their name or type, and the first one of a hook."""
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    types = {
        each.arg: ast.unparse(each.annotation) if each.annotation is not None else "" for each in parameters
    }
    named = {name for name, kind in types.items() if name == "trainer" or "Trainer" in kind}
    return named | ({parameters[1].arg} if method in CALLBACK_ROWS and len(parameters) > 1 else set())


class _Reader(ast.NodeVisitor):
    """Follows `trainer.a.b` through the view's parts; what is asked about first is left out."""

    def __init__(self, trainers: set[str]) -> None:
        self.trainers = trainers
        self.missing: list[tuple[str, bool]] = []
        self.called: list[str] = []
        """Functions that were given the trainer."""

    def visit_Call(self, node: ast.Call) -> None:
        given = [*node.args, *(each.value for each in node.keywords)]
        if isinstance(node.func, ast.Name) and any(
            isinstance(each, ast.Name) and each.id in self.trainers for each in given
        ):
            self.called.append(node.func.id)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path, root = _path(node)
        if path[0] in ("trainer", "_trainer") and len(path) > 1:  # self.trainer, pl_module.trainer
            path, root = path[1:], ast.Name(OWN)
        if isinstance(root, ast.Name) and root.id in (*self.trainers, OWN):
            is_set = isinstance(node.ctx, ast.Store)
            where = _missing(path, is_set)
            if where:
                self.missing.append(("trainer." + ".".join(where), is_set))
        else:
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        for each in node.orelse if self._asks_first(node.test) else [node.test, *node.body, *node.orelse]:
            self.visit(each)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if not self._asks_first(node):
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not self._asks_first(node.test):
            self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        handled = " ".join(ast.unparse(each.type) for each in node.handlers if each.type is not None)
        for each in [
            *([] if "AttributeError" in handled else node.body),
            *node.handlers,
            *node.orelse,
            *node.finalbody,
        ]:
            self.visit(each)

    def _asks_first(self, test: ast.expr) -> bool:
        calls = [
            each for each in ast.walk(test) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        ]
        asking = [each for each in calls if each.func.id in ASKS_FIRST]  # type: ignore[attr-defined]
        return any(
            isinstance(each, ast.Name) and each.id in self.trainers
            for call in asking
            for each in ast.walk(call)
        )


def _path(node: ast.expr) -> tuple[list[str], ast.expr]:
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return path, node


def _missing(path: list[str], is_set: bool) -> list[str]:
    """The shortest beginning of the path that the view has not; empty if it has it all."""
    part: Any = TrainerView
    for index, name in enumerate(path):
        is_last = index == len(path) - 1
        if name in part.PARTS:
            part = part.PARTS[name]
        elif not hasattr(part, name) or (
            is_set and is_last and getattr(getattr(part, name), "fset", None) is None
        ):
            return path[: index + 1]
        else:
            return []
    return path if is_set else []
