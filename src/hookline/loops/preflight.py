"""What can be known to go wrong before the first step: validations that never come, and metrics that nothing will log."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hookline.errors import OptionError
from hookline.loops.run import Run
from hookline.options import Options

OF_VALIDATION = re.compile(r"val(?:idation)?[/_]")
"""How the names of metrics begin that come from validations."""
NOT_IN_TRAINING = re.compile(r"on_(?:val|eval|test|predict|sanity|pre_perf|post_perf)\w*|(?:validation|test|predict)_step|"
                             r"(?:val|test|predict)_dataloader|configure_(?:optimizers|hooks|callbacks)|"
                             r"needs_metrics|monitors?")  # fmt: skip
"""What a run without validation data does not call, and what names metrics only to watch them."""
ENOUGH = 3
"""Letters of a text from which on it may be the beginning of a metric's name, as in `f"val/{name}"`."""


def check_before_training(run: Run, length: int | None) -> None:
    """Refuse what can never come. The loaders are known, and nothing was trained yet; `length` is that of a training epoch."""
    if run.loaders["val"]:
        batches_between(run.options, length)
        return
    for who, hook in ((type(entry.hook).__name__, entry.hook) for entry in run.state.hooks.entries() if entry.enabled):
        if getattr(hook, "needs_validation", False):
            raise OptionError(f"{who} acts after validations, and {_why_none(run)}. Pass a validation loader to fit, or have it "
                              "act at the end of training epochs.")  # fmt: skip
        for name in getattr(hook, "needs_metrics", ()):
            _check_metric(run, who, name, "strict=False")
    for schedule in run.schedules:
        if schedule.monitor is not None and schedule.strict and not run.is_manual:
            _check_metric(run, f"lr_scheduler {type(schedule.scheduler).__name__}", schedule.monitor, "'strict': False")


def batches_between(options: Options, length: int | None) -> int:
    """Batches between two validations of one epoch of this length; 0: only at its end."""
    every = options.val_check_interval
    if isinstance(every, int):
        if length is not None and every > length:
            raise OptionError(f"val_check_interval={every} would never come: an epoch has {length} batches. Batches are counted "
                              f"within an epoch: pass at most {length}, or validate every n epochs by "
                              "check_val_every_n_epoch.")  # fmt: skip
        return every
    if length is None:
        if every != 1.0:
            raise OptionError(f"val_check_interval={every} is a fraction of an epoch, but the training loader has no length; "
                              "pass a whole number of batches.")  # fmt: skip
        return 0
    return max(1, int(length * every))


def _check_metric(run: Run, who: str, name: str, otherwise: str) -> None:
    if OF_VALIDATION.match(name) and not _may_be_logged(run, name):
        raise OptionError(f"{who} needs the metric {name!r}, which can never be logged: {_why_none(run)}. Pass a validation "
                          "loader to fit, or name a metric of training, such as 'train/loss'. If code of your own logs "
                          f"{name!r}, pass {otherwise}.")  # fmt: skip


def _why_none(run: Run) -> str:
    if run.options.limit_val_batches == 0:
        return f"limit_val_batches={run.options.limit_val_batches} switches validation off"
    return "this run has no validation data"


# ---- does any code of the user's log it? --------------------------------------------------------------------------


def _may_be_logged(run: Run, name: str) -> bool:
    """Whether the name, or a beginning of it, is anywhere in the user's code that a run without validation can call.

    A module or a hook may log a metric of any name, also one that looks like a validation's.
    """
    hooks = [entry.given for entry in run.state.hooks.entries()]
    owners = [run.module, run.datamodule, *vars(run.steps).values(), *hooks, *(getattr(each, "function", None) for each in hooks)]
    own = {_package(each) for each in owners} - {"hookline", "torch", "builtins"}
    return any(name.startswith(text) and len(text) >= ENOUGH for text in _texts(owners, own))


def _texts(owners: Iterable[Any], own: set[str]) -> Iterator[str]:
    """Every text in objects, classes and functions of these packages, and in what they use of the same packages."""
    seen: set[int] = set()
    waiting = list(owners)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, str):
            yield each
        else:
            waiting += _inside(each, own)


def _inside(thing: Any, own: set[str]) -> list[Any]:
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, Mapping) and type(thing).__module__ in ("builtins", "collections"):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.CodeType):
        return list(thing.co_consts)
    if isinstance(thing, types.FunctionType):
        return _of_function(thing)
    if isinstance(thing, staticmethod | classmethod):
        return [thing.__func__]
    if isinstance(thing, property):
        return [thing.fget]
    if isinstance(thing, types.ModuleType) or _package(thing) not in own:
        return []
    attributes = vars(thing).items() if hasattr(thing, "__dict__") else ()
    own_values = [each for name, each in attributes if not NOT_IN_TRAINING.fullmatch(name)]
    return [*own_values, *thing.__bases__] if isinstance(thing, type) else [*own_values, type(thing)]


def _of_function(function: types.FunctionType) -> list[Any]:
    """Its constants, defaults and closure, and what it uses of its module."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    used = [function.__globals__.get(name) for name in _names(function.__code__)]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, *cells, *used]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _package(thing: Any) -> str:
    """The package that a class, a function or an object's class is from."""
    kind = thing if isinstance(thing, type | types.FunctionType) else type(thing)
    return str(kind.__module__).partition(".")[0]
