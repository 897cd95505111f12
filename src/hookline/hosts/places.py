"""What a loop hands to its hooks, and what it is inside: the user's own module, the optimizers one by one."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookline.errors import OptionError
from hookline.optimizers import bare


def own_module(module: nn.Module) -> nn.Module:
    """What the user wrote, without what distributes or compiles it."""
    while True:
        is_spread = isinstance(module, DistributedDataParallel)
        inner: Any = (
            module.module if is_spread else vars(module).get("_modules", {}).get("_orig_mod")
        )  # torch.compile's
        if inner is None:
            return module
        module = inner


def joins(model: Any) -> bool:
    """Whether ranks may have different numbers of batches (torch's `Join`): then they cannot
    meet after each.
    """
    return isinstance(model, DistributedDataParallel) and model._join_config.enable


def own_optimizers(given: Any) -> list[Any]:
    """The optimizers themselves, without their coats; something else is refused."""
    try:
        found = [bare(each) for each in listed(given)]
    except TypeError:
        found = [given]
    for each in found:
        if isinstance(each, type) or not hasattr(each, "register_step_post_hook"):
            what = each.__name__ + ", a class" if isinstance(each, type) else type(each).__name__
            raise OptionError(f"hooks hear torch.optim.Optimizer, one or a list of them, but got {what}.")
    return found


def listed(given: Any) -> list[Any]:
    """One optimizer or scheduler, or several."""
    if hasattr(given, "step"):
        return [given]
    return [each for each in given if each is not None] if given is not None else []
