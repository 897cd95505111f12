"""Name the module in which a run failed, from the traceback and the gradients that a failure leaves behind.

Nothing is recorded while the run trains. The traceback names the methods; where several modules share one,
the autograd graph tells which of them have run.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hookline.run.parameter_groups import WRAPPERS

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CALL = os.path.join(_TORCH, "nn", "modules", "module.py")
_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")
_OPTIMIZER = os.path.join(_TORCH, "optim", "optimizer.py")
_CALLEE = re.compile(r"self((?:\.\w+|\[\w+\]|\[['\"]\w+['\"]\])+)(\()?")
"""The module that an expression such as `self.blocks[3].mlp(x)` calls."""
_PART = re.compile(r"\.(\w+)|\[['\"]?(\w+)['\"]?\]")

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

Frames = Sequence[traceback.FrameSummary]


@dataclass(frozen=True, slots=True)
class FailedPlace:
    """Where a run failed."""

    phase: str
    """'forward', 'backward', 'update', or empty if it was none of them."""
    modules: list[str]
    """The names of the module; several if it may be any of them; none if it is not known."""
    where: str
    """The innermost line of the user's code."""


def find_failed_place(error: BaseException, module: nn.Module, optimizers: Iterable[Any]) -> FailedPlace:
    """Return the phase, the module and the line in which an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith((_TORCH, _OURS, "<"))]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    backward = _index_of(frames, _BACKWARD, "_engine_run_backward")
    if backward is not None:
        again = _modules_of(frames[backward:], module)  # activation checkpointing runs a forward again
        return FailedPlace("backward", again or _unfinished_backward(module), where)
    if _index_of(frames, _OPTIMIZER) is not None:
        return FailedPlace("update", _unfinished_update(module, optimizers), where)
    modules = _modules_of(frames, module)
    return FailedPlace("forward" if modules else "", modules, where)


def _index_of(frames: Frames, file: str, name: str = "") -> int | None:
    found = (n for n, each in enumerate(frames) if each.filename == file and name in ("", each.name))
    return next(found, None)


# ---- forward: from the traceback ---------------------------------------------------------------------------


def _modules_of(frames: Frames, module: nn.Module) -> list[str]:
    """Return the names of the module whose method is the innermost one of a traceback."""
    tree = dict(module.named_modules())
    methods = _Methods(tree.values())
    current: list[str] = []
    callee, is_called = "", False
    is_training = [frame.name for frame in frames if frame.name in _STEPS][:1] == ["training_step"]
    for frame in frames:
        if frame.filename == _CALL:
            is_called = is_called or frame.name == "_call_impl"
            continue
        owner = methods.class_of(frame)
        if owner is None:
            continue
        known = [name for name, each in tree.items() if isinstance(each, owner)]
        if not current:
            current = [""] if "" in known else known
        elif is_called or not any(name in known for name in current):
            known = [name for name in known if _defines(type(tree[name]), frame.name) is owner] or known
            inner = [name for name in known if any(_is_below(name, outer) for outer in current)]
            current = _narrow(inner, current, callee) or inner or known
        else:  # a method of the same module: `super().forward(x)`, `self.attend(x)`
            current = [name for name in current if name in known]
        callee, is_called = _expression(frame), False
    return [_shown(name) for name in _still_to_run(current, tree, is_training)]


class _Methods:
    """The methods of the classes of modules, by file, name and line."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found: dict[tuple[str, str], list[tuple[FunctionType, type]]] = {}
        classes = {cls for kind in {type(each) for each in modules} for cls in kind.__mro__}
        for cls in classes - {nn.Module, object}:
            for value in vars(cls).values():
                function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
                if isinstance(function, FunctionType):
                    code = function.__code__
                    self._found.setdefault((code.co_filename, code.co_name), []).append((function, cls))

    def class_of(self, frame: traceback.FrameSummary) -> type | None:
        """Return the class whose method a frame runs, or None."""
        line = frame.lineno or 0
        above = [
            (function.__code__.co_firstlineno, function, cls)
            for function, cls in self._found.get((frame.filename, frame.name), ())
            if function.__code__.co_firstlineno <= line
        ]
        if not above:
            return None
        first, function, cls = max(above, key=lambda each: each[0])
        try:
            length = len(inspect.getsourcelines(function)[0])
        except (OSError, TypeError):  # the source is gone
            return cls
        return cls if line < first + length else None


def _defines(kind: type, method: str) -> type | None:
    """Return the class from which a class has a method."""
    return next((cls for cls in kind.__mro__ if method in vars(cls)), None)


def _is_below(name: str, outer: str) -> bool:
    return bool(name) and (not outer or name.startswith(f"{outer}."))


def _expression(frame: traceback.FrameSummary) -> str:
    """Return the call that a frame was in the middle of, as its source has it."""
    line = linecache.getline(frame.filename, frame.lineno or 0).encode()
    return line[frame.colno or 0 :].decode(errors="replace")


def _narrow(names: list[str], outer: list[str], expression: str) -> list[str]:
    """Return the names that an expression such as `self.mlp(x)` in a method of `outer` can have called."""
    found = _CALLEE.match(expression)
    if found is None:
        return names
    path, is_exact = [], found[2] is not None
    for attribute, index in _PART.findall(found[1]):
        if index and not index.isdigit() and "'" not in found[1] and '"' not in found[1]:
            is_exact = False  # the variable of a loop
            break
        path.append(attribute or index)
    starts = [".".join(filter(None, [each, *path])) for each in outer]
    return [
        name
        for name in names
        if any(name == each or (not is_exact and _is_below(name, each)) for each in starts)
    ]


# ---- forward: which of several modules, from the graph -----------------------------------------------------


def _still_to_run(names: list[str], tree: dict[str, nn.Module], is_training: bool) -> list[str]:
    """Return those of modules with the same method that can have been running.

    A parameter is in the autograd graph once its module has used it. Modules are taken to run in the order in
    which they are defined; if the graph contradicts that, or has no parameter, all names are returned.
    """
    if len(names) < 2:
        return names
    spans, used = _spans(tree), _parameters_in_graphs()
    names = sorted(names, key=lambda name: spans[name])
    first, last = spans[names[0]][0], max(spans[name][1] for name in names)
    known = [id(each) in used for one in tree.values() for each in _own_trainable(one)]
    done = first + known[first:last].count(True)
    is_stale = bool(known) and all(known)  # an earlier graph is still held
    if is_stale or not (is_training or any(known)) or not all(known[first:done]):
        return names
    if halfway := [name for name in names if spans[name][0] < done < spans[name][1]]:
        return halfway[-1:]  # the innermost
    ended = [name for name in names if spans[name][0] < spans[name][1] == done]
    if all(type(tree[name]).__module__.startswith("torch.nn.") for name in ended):
        ended = []  # these use their parameters last
    following = [name for name in names if done == spans[name][0]]
    is_empty = bool(following) and spans[following[0]][1] == done
    return [*ended, *(following if is_empty else following[:1])] or names


def _own_trainable(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module._parameters.values() if each is not None and each.requires_grad]


def _spans(tree: dict[str, nn.Module]) -> dict[str, tuple[int, int]]:
    """Return for each module the numbers of its first trainable parameter and of the first one after it."""
    starts, total = {}, 0
    for name, each in tree.items():
        starts[name] = total
        total += len(_own_trainable(each))
    counts = {
        name: sum(
            len(_own_trainable(each))
            for inner, each in tree.items()
            if inner == name or _is_below(inner, name)
        )
        for name in tree
    }
    return {name: (start, start + counts[name]) for name, start in starts.items()}


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python objects hold, without those of torch.compile that have no memory."""
    from torch._subclasses.fake_tensor import FakeTensor  # takes long to load, and only a failure needs it

    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    found = [each for each in found if not isinstance(each, FakeTensor) and not each.is_nested]
    return [each for each in found if all(type(size) is int for size in each.shape)]  # no symbols


def _parameters_in_graphs() -> set[int]:
    """Return the identities of the parameters in the autograd graphs of all live tensors."""
    nodes: list[Any] = [each.grad_fn for each in live_tensors() if each.grad_fn is not None]
    seen, found = set(nodes), set()
    while nodes:
        node = nodes.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


# ---- backward and update: from gradients and states --------------------------------------------------------


def _unfinished_backward(module: nn.Module) -> list[str]:
    """Return the modules between the last complete gradient and the first missing one, in backward order."""
    used = _parameters_in_graphs()
    trained = [pair for pair in module.named_parameters() if pair[1].requires_grad]
    trained = [pair for pair in trained if id(pair[1]) in used] or trained
    grads = [each.grad for _, each in trained]
    done = [each is not None for each in grads]
    if all(done):  # from earlier batches of the window; adding to a gradient counts a version of it
        versions = [each._version for each in grads if each is not None]
        done = [each > min(versions) for each in versions]
        if not any(done):
            return []
    last = max(n for n, is_done in enumerate(done) if not is_done)
    owners = [name.rpartition(".")[0] for name, _ in trained]
    tree = dict(module.named_modules())
    order = list(tree)
    begin = order.index(owners[last])
    end = order.index(owners[last + 1]) if last + 1 < len(owners) else len(order)
    between = [name for name in order[begin + 1 : end] if not any(tree[name].children())]
    return [_shown(name) for name in (*reversed(between), owners[last])]


def _unfinished_update(module: nn.Module, optimizers: Iterable[Any]) -> list[str]:
    """Return the module of the first parameter without an optimizer state, if others have one already."""
    names = {id(each): name for name, each in module.named_parameters()}
    for optimizer in optimizers:
        parameters = [
            each for group in optimizer.param_groups for each in group["params"] if each.grad is not None
        ]
        have = [bool(optimizer.state.get(each)) for each in parameters]
        if any(have) and not all(have):
            name = names.get(id(parameters[have.index(False)]), "")
            return [_shown(name.rpartition(".")[0])] if name else []
    return []


def _shown(name: str) -> str:
    """Return the name of a module without the wrappers of torch."""
    return WRAPPERS.sub("", f"{name}.").removesuffix(".")
