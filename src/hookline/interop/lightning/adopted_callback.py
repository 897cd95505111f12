"""Lightning's callbacks among Hookline's hooks, unchanged: EarlyStopping, ModelCheckpoint, and your own."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from hookline.engine.binding import Binding
from hookline.engine.events import EventTable
from hookline.engine.hook import TIERS
from hookline.engine.listener import Listener, refuse_misspelled
from hookline.engine.source_text import parse_source, words_of
from hookline.hooks.progress_bar import ProgressBar
from hookline.interop.adapter import AdoptedCallback
from hookline.interop.lightning.binder import bind
from hookline.interop.lightning.callback_list import FIRST, refuse_shared_keys
from hookline.interop.lightning.package import PACKAGES, is_a, is_lightning_module, is_lightnings
from hookline.interop.lightning.table import CALLBACK_ROWS
from hookline.interop.lightning.trainer_parts import missing
from hookline.interop.lightning.trainer_view import TrainerView, is_of_trainer, shown_to_callbacks
from hookline.interop.lightning.tuning import ends_tuning, is_tuner
from hookline.util.errors import CLASSES, HookError

# ---- The attributes that a Lightning callback uses of its trainer, read from its source


OWN = "self.trainer"
DEEPEST = 2
"""How deep to read functions of Lightning to which a method passes the trainer."""
TESTS = ("isinstance", "hasattr", "getattr", "issubclass")
"""Code that calls one of these with the trainer allows for trainers without the attribute."""


def missing_attributes(callback: Any, base: type) -> list[tuple[str, str]]:
    """Return attributes of the trainer that the view does not have, each with the method that uses it."""
    found: dict[str, str] = {}
    given: set[str] = set()
    for where, function in _functions(callback, base):
        for path, is_set in _missing_in(function, where.rpartition(".")[2]):
            found.setdefault(path, where)
            given |= {path} if is_set else set()
    package = base.__module__.removesuffix(".callbacks.callback")
    own = {path for path in given if path.count(".") == 1 and not is_known(package, path.rpartition(".")[2])}
    return [(path, where) for path, where in found.items() if path not in own]


def is_known(package: str, name: str) -> bool:
    """Return whether the view or Lightning's own trainer has it; otherwise a callback may set it for its own
    use.
    """
    return hasattr(TrainerView, name) or is_of_trainer(package, name)


def owner_of(path: str) -> type:
    """Return the part of the view that should have the last name of `trainer.a.b`."""
    part: Any = TrainerView
    for name in path.split(".")[1:-1]:
        part = part.PARTS.get(name, part)
    return part  # type: ignore[no-any-return]


def mentions(callback: Any, base: type, name: str) -> bool:
    """Return whether the callback's source text contains this name."""
    trees = [parse_source(function) for _, function in _functions(callback, base)]
    return any(name in words_of(tree) for tree in trees if tree is not None)


def _functions(callback: Any, base: type) -> Iterator[tuple[str, Any]]:
    """Yield the functions of the callback's classes below Lightning's base, each name once."""
    seen: set[str] = set()
    for cls in callback.__class__.__mro__:
        if cls is base:
            return
        for name, value in vars(cls).items():
            if name not in seen and (function := _function(value)) is not None:
                yield f"{cls.__name__}.{name}", function
            seen.add(name)


def _function(value: Any) -> Any:
    value = getattr(value, "__func__", getattr(value, "fget", value))
    return inspect.unwrap(value) if inspect.isfunction(value) else None


def _missing_in(function: Any, name: str, depth: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield the missing attributes, and whether the code sets them."""
    source = parse_source(function)
    if source is None or not source.body:
        return  # generated at run time, or in C: then the view raises an error on access
    tree = source.body[0]
    if isinstance(tree, ast.FunctionDef):
        reader = _Reader(_trainers(tree, name))
        for node in tree.body:
            reader.visit(node)
        yield from reader.missing
        for called in reader.called if depth < DEEPEST else ():
            helper = _function(function.__globals__.get(called))
            if helper is not None and is_lightnings(helper):
                yield from _missing_in(helper, called, depth + 1)


def _trainers(tree: ast.FunctionDef, method: str) -> set[str]:
    """Return the parameters that are the trainer: by their name or type, and the first one of a hook."""
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    types = {
        each.arg: ast.unparse(each.annotation) if each.annotation is not None else "" for each in parameters
    }
    named = {name for name, kind in types.items() if name == "trainer" or "Trainer" in kind}
    return named | ({parameters[1].arg} if method in CALLBACK_ROWS and len(parameters) > 1 else set())


class _Reader(ast.NodeVisitor):
    """Follows `trainer.a.b` through the view's parts; attributes that the code tests for first are left
    out.
    """

    def __init__(self, trainers: set[str]) -> None:
        self.trainers = trainers
        self.missing: list[tuple[str, bool]] = []
        self.called: list[str] = []
        """Functions that were called with the trainer."""

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
        for inner in node.orelse if self._tests_first(node.test) else [node.test, *node.body, *node.orelse]:
            self.visit(inner)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if not self._tests_first(node):
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not self._tests_first(node.test):
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

    def _tests_first(self, test: ast.expr) -> bool:
        calls = [
            each for each in ast.walk(test) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        ]
        tests = [each for each in calls if each.func.id in TESTS]  # type: ignore[attr-defined]
        return any(
            isinstance(each, ast.Name) and each.id in self.trainers
            for call in tests
            for each in ast.walk(call)
        )


def _path(node: ast.expr) -> tuple[list[str], ast.expr]:
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return path, node


def _missing(path: list[str], is_set: bool) -> list[str]:
    """Return the shortest prefix of the path that the view does not have; empty if it has the whole path."""
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


MONITORS = ("EarlyStopping", "Checkpoint")
"""Classes whose callbacks Lightning calls after the module at the end of an epoch, because they act on
metrics.
"""

CHECKPOINT_ORDER = TIERS["monitor"] + 50
"""Checkpoint callbacks are called after all others, as in Lightning."""
AFTER_MODULE = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
"""Events at which they are called after the module, too, so that a resume is bit-exact."""


def _file_exists(callback: Any, path: str, trainer: Any) -> bool:
    """Return whether a checkpoint exists, from its request until the request that replaces it: by this a
    ModelCheckpoint chooses a name that no other one has.
    """
    exists = type(callback).file_exists(callback, path, trainer)
    return trainer.will_exist(path, exists) if type(trainer) is TrainerView else exists


class LightningCallback(AdoptedCallback):
    """Represents one callback. Only methods that it overrides are called; returned values are ignored, as in
    Lightning.
    """

    kind = "Lightning callback"

    def __init__(self, original: Any, *, checks: bool = True) -> None:
        """Check the attributes of the trainer that the callback uses, unless `checks` is False."""
        self.kinds = {cls.__name__ for cls in original.__class__.__mro__ if is_lightnings(cls)}
        super().__init__(original, PACKAGES, "Callback")
        if "Checkpoint" in self.kinds:  # what it saves includes the effect of all other hooks of the event
            self.order = CHECKPOINT_ORDER if self.order is None else self.order
            self.after_module = AFTER_MODULE
        if "ProgressBar" in self.kinds:
            self.only_one = ProgressBar.only_one  # the trainer then adds none of its own
        self.saves = mentions(original, self.base, "save_checkpoint")
        self.view = TrainerView(self.base.__module__.removesuffix(".callbacks.callback"), original)
        self._check(checks)

    def usual_tier(self) -> str:
        """Return 'monitor' for monitors, which are called after the module."""
        return "monitor" if self.kinds & set(MONITORS) else "user"

    def _check(self, attributes: bool) -> None:
        who = type(self.original).__name__
        refuse_misspelled(
            self.original,
            {name: len(row.arguments) for name, row in CALLBACK_ROWS.items()},
            is_hook=attributes,
        )
        if attributes and (tuner := next((each for each in FIRST if is_a(self.original, each)), "")):
            ours = CLASSES.get(tuner, f"hookline.hooks.{tuner}")
            raise HookError(
                f"{who} cannot run in Hookline: it needs the loop of Lightning's own trainer. Use "
                f"{ours}().find(trainer, module, loader), or the Trainer of hookline.interop.lightning."
            )
        if attributes and (asked := missing_attributes(self.original, self.base)):
            paths = ", ".join(f"{path} (in {where})" for path, where in asked)
            raise HookError(
                f"{who} cannot run in Hookline: it needs attributes of Lightning's own trainer: {paths}. "
                f"{missing(asked[0][0], owner_of(asked[0][0]))}"
            )
        for method in vars(self.base):
            if method.startswith("on_") and method not in CALLBACK_ROWS and self.overrides(method):
                raise HookError(
                    f"{who} listens to {method}, an event of Lightning that Hookline does not have. "
                    f"There are: {', '.join(CALLBACK_ROWS)}."
                )

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """Return one listener for each overridden method, and one that removes replaced checkpoints."""
        found = []
        for method, row in CALLBACK_ROWS.items():
            if method in vars(self.base) and self.overrides(method):
                function = getattr(self.original, method)
                if method == "on_fit_start" and is_tuner(self.original):
                    function = self._ending_quietly(function)
                binding = bind(function, method, row, table, self.view, answers=False)
                found.append(Listener("H", name, self, table[row.event], function, binding, []))
        if self.saves:
            moment = self.view.moment
            written = Binding(lambda s: moment.trainer.remove_replaced(s.path), ("path",))
            replaced = self.view.remove_replaced
            found.append(Listener("H", name, self, table["on_checkpoint_save"], replaced, written, []))
        return found

    def _ending_quietly(self, function: Callable[..., None]) -> Callable[..., None]:
        """Let a tuner end the stage before its loop starts, which is not a failure."""

        @functools.wraps(function)
        def wrapped(*given: Any) -> None:
            try:
                function(*given)
            except Exception as error:
                if not ends_tuning(error):
                    raise
                self.view._own.is_tuned = True

        return wrapped

    def begin_run(self, state: Any) -> None:
        """Attach the view to the run's trainer and module."""
        module = state.module
        names = module.__dict__ if is_lightning_module(module) else {}
        proxy = shown_to_callbacks(module, self.view)
        self.view.attach(state.trainer, proxy, names)
        if proxy is not None:  # Lightning sets these two on every callback
            self.original.log, self.original.log_dict = proxy.log, proxy.log_dict
        if "ModelCheckpoint" in self.kinds:
            given = [entry.given for entry in state.hooks.entries()]
            refuse_shared_keys([each for each in given if is_a(each, "ModelCheckpoint")], self.base)
            self.original.file_exists = types.MethodType(_file_exists, self.original)

    def before_optimizers(self) -> None:
        """Do what a callback does in on_fit_start, after which Lightning restores the optimizers.

        A finetuning callback adds its parameter groups; Lightning leaves what is in them frozen, here it is
        trained. Stochastic weight averaging that has begun removes the schedulers, and restores its own at
        the start of an epoch.
        """
        if "StochasticWeightAveraging" in self.kinds and self.original._scheduler_state is not None:
            contents = self.view._own._last.resume.contents
            contents["schedulers"] = self.view.lr_scheduler_configs[:] = []
            contents["kinds"] = contents["kinds"] and contents["kinds"][: len(contents["optimizers"])]
        for cls in self.original.__class__.__mro__:
            if is_lightnings(cls, "BaseFinetuning"):
                optimizers = self.view.optimizers
                known = [len(each.param_groups) for each in optimizers]
                cls.on_fit_start(self.original, self.view.moment.trainer, self.view.moment.proxy)
                for optimizer, groups in zip(optimizers, known, strict=True):
                    for parameter in itertools.chain(
                        *(each["params"] for each in optimizer.param_groups[groups:])
                    ):
                        parameter.requires_grad_(True)

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's own state, with the key under which Lightning stores it."""
        return {"state_key": str(self.original.state_key), "state": self.original.state_dict()}

    def find_state(self, states: dict[str, Any], name: str) -> Any:
        """Return the state that was saved under this callback's key, whatever the order of callbacks of one
        class.
        """
        key = str(self.original.state_key)
        known = (each for each in (states.get(name), *states.values()) if isinstance(each, dict))
        return next((each for each in known if each.get("state_key") == key), None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the callback's own state."""
        if state["state"]:
            self.original.load_state_dict(copy.deepcopy(state["state"]))
