"""What a loop that is not Hookline's passes: its model, its optimizers and schedulers, and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hookline.engine.hook import Hook
from hookline.interop.hosted.host import RAW_LOOP, Host
from hookline.loggers import Logger
from hookline.run.optimizers import bare
from hookline.run.options import ARGUMENT_NAMES
from hookline.util.errors import OptionError, closest, described


def own_module(module: nn.Module) -> nn.Module:
    """Return the user's module without its wrappers for distribution or compilation."""
    while True:
        is_spread = isinstance(module, DistributedDataParallel)
        inner: Any = (
            module.module if is_spread else vars(module).get("_modules", {}).get("_orig_mod")
        )  # torch.compile's
        if inner is None:
            return module
        module = inner


def has_uneven_batches(model: Any) -> bool:
    """Return whether ranks may have different numbers of batches (torch's `Join`), so that they cannot
    synchronize after each.
    """
    return isinstance(model, DistributedDataParallel) and model._join_config.enable


def needs_equal_batches(model: Any) -> bool:
    """Return whether a model waits in every batch for all ranks."""
    return isinstance(model, DistributedDataParallel) and not has_uneven_batches(model)


def own_optimizers(given: Any) -> list[Any]:
    """Return the optimizers without their wrappers; anything else is rejected."""
    for each in given if isinstance(given, list | tuple) else [given]:
        if isinstance(each, LRScheduler | ReduceLROnPlateau):  # which looks like a wrapper of its optimizer
            raise OptionError(
                f"{type(each).__name__} is a scheduler, not an optimizer: pass it by name, schedulers=[...]."
            )
    try:
        found = [bare(optimizer) for optimizer in list_steppables(given)]
    except TypeError:
        found = [given]
    for optimizer in found:
        if isinstance(optimizer, type) or not hasattr(optimizer, "register_step_post_hook"):
            what = (
                f"{optimizer.__name__}, a class" if isinstance(optimizer, type) else type(optimizer).__name__
            )
            raise OptionError(f"hooks need a torch.optim.Optimizer or a list of them, not {what}.")
    return found


def list_steppables(given: Any) -> list[Any]:
    """Return one optimizer or scheduler, or several, as a list."""
    if hasattr(given, "step"):
        return [given]
    return [each for each in given if each is not None] if given is not None else []


def own_schedulers(given: Any) -> list[Any]:
    """Return the schedulers; anything without `step` is rejected."""
    found = [given] if isinstance(given, str) else list_steppables(given)
    for each in found:
        if isinstance(each, type | Optimizer) or not hasattr(each, "step"):
            raise OptionError(
                f"schedulers={described(each)}: pass a scheduler of torch.optim.lr_scheduler, made for the "
                "optimizer, or a list of them."
            )
    return found


class HostLogger(Logger):
    """Sends rows to what the host itself logs with."""

    queued = False

    def __init__(self, write: Callable[[dict[str, float], int], Any]) -> None:
        """write: called with a row and its step."""
        self._write = write

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """Write one row."""
        self._write({"epoch": epoch, **metrics}, step)


HOST_OPTIONS = (
    "hooks",
    "logger",
    "run_dir",
    "config",
    "accounting",
    "log_every_n_steps",
    "max_epochs",
    "max_steps",
    "count_tokens",
    "on_save_error",
)
"""The options of every host, beside what it trains."""
INSTEAD = {
    "callbacks": " Use hooks=[...].",
    "accumulate_grad_batches": " Use line.backward(loss, divide_by=...).",
    "gradient_clip_val": " Use line.clip_gradients(...).",
    "precision": " Use torch.autocast in the loop.",
    "strategy": " Wrap the model, for example in DistributedDataParallel.",
    "resume": " Use line.load_checkpoint().",
}
"""What a loop does in place of an option that only the Trainer has."""


def refuse_other_options(host: Host, given: Iterable[str], known: Iterable[str] = HOST_OPTIONS) -> None:
    """Raise for the first name that is not an option of a host, with the closest right one."""
    names = tuple(known)
    for name in given:
        if name in names:
            continue
        is_trainers = name in ARGUMENT_NAMES
        why = " Only hookline.Trainer has it." if is_trainers else closest(name, names)
        if host is RAW_LOOP:
            why = INSTEAD.get(name, why)
        raise OptionError(
            f"{host.name} has no option {name!r}.{why} Options: {', '.join(names)}.",
            option=name,
            allowed=names,
        )


def refuse_more(more: Iterable[Any]) -> None:
    """Raise if a Line was given more than the model and its optimizers by position."""
    for each in more:
        if isinstance(each, Hook) or (isinstance(each, list) and each and isinstance(each[0], Hook)):
            raise OptionError("Line takes hooks by name: Line(model, optimizer, hooks=[...]).")
        raise OptionError(
            f"Line takes the model and its optimizers; {type(each).__name__} is one argument too many. Pass "
            "several optimizers as a list, and schedulers by name: Line(model, [optimizer, ...], "
            "schedulers=[...])."
        )


def check_loader(loader: Any) -> None:
    """Raise if `line.epoch` cannot iterate over the loader."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        hint = f" Without a loader: `for k in line.epoch(range({loader}))`." if type(loader) is int else ""
        raise OptionError(f"line.epoch takes a loader or any other iterable, not {described(loader)}.{hint}")


def check_epochs(n: Any) -> None:
    """Raise if `line.epochs` is not called with a number of epochs."""
    if not isinstance(n, int | np.integer) or isinstance(n, bool):
        hint = " The loader is for line.epoch(loader)." if hasattr(n, "__iter__") else ""
        raise OptionError(
            f"line.epochs takes the number of epochs in all, a whole number, not {described(n)}.{hint}"
        )
