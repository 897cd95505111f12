"""Make a strategy from its name."""

from __future__ import annotations

import os
from typing import Any

import torch

from hookline.distributed.base import SingleDevice, Strategy
from hookline.distributed.launch import find_rank, pick_device
from hookline.util.errors import OptionError, closest

STRATEGY_NAMES = ("auto", "single", "ddp", "fsdp", "accelerate")


def print_errors_once() -> None:
    """Make an uncaught error that all ranks of a job raise be printed by one of them."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from hookline.distributed.error_output import print_uncaught_errors_once

        print_uncaught_errors_once()


def refuse_second_choice(strategy: Strategy, activation_checkpointing: Any) -> None:
    """Raise if both the trainer and the strategy choose the layers of activation checkpointing."""
    if activation_checkpointing and strategy.activation_checkpointing:
        raise OptionError(
            f"activation_checkpointing is given twice: to the trainer and to {type(strategy).__name__}. "
            "Leave out the strategy's.",
            option="activation_checkpointing",
            value=activation_checkpointing,
        )


def make_strategy(strategy: str | Strategy, device: str | torch.device, precision: str | int) -> Strategy:
    """Return the strategy of this name, or the given object. 'auto' is DDP in a job of several processes.

    strategy: a name ('auto', 'single', 'ddp', 'fsdp', 'accelerate'), or an object. device, precision: as of
    the trainer; of an object, the defaults.
    """
    if isinstance(strategy, Strategy):
        for name, value, default in (("device", device, "auto"), ("precision", str(precision), "32")):
            if value != default:
                raise OptionError(
                    f"{name}={value!r} cannot be combined with a strategy object: "
                    f"{type(strategy).__name__} brings its own.",
                    option=name,
                    value=value,
                )
        return strategy
    if strategy not in STRATEGY_NAMES:
        raise OptionError(
            f"strategy={strategy!r}, allowed: {', '.join(map(repr, STRATEGY_NAMES))} or a Strategy object."
            f"{closest(str(strategy), STRATEGY_NAMES)}",
            option="strategy",
            value=strategy,
            allowed=STRATEGY_NAMES,
        )
    if strategy == "auto":
        strategy = "single" if find_rank().alone else "ddp"
    if strategy == "single":
        return SingleDevice(pick_device(device), precision)
    if strategy == "ddp":
        from hookline.distributed.ddp import DDP

        return DDP(device=device, precision=precision)
    if strategy == "fsdp":
        from hookline.distributed.fsdp import FSDP

        return FSDP(device=device, precision=precision)
    from hookline.distributed.accelerate import Accelerated

    return Accelerated(device=device, precision=precision)
