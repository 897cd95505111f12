"""One process, one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookline.errors import OptionError, closest
from hookline.options import parse_precision
from hookline.strategies.base import Strategy

STRATEGIES = ("auto", "single")


class SingleDevice(Strategy):
    """The module on one device: the CPU, a GPU, or `meta`."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters once; modules that are there already are left alone."""
        module.to(self.device)
        return module


def make_strategy(strategy: str | Strategy, device: str | torch.device, precision: str | int) -> Strategy:
    """A strategy from its name, or the user's own object."""
    if isinstance(strategy, Strategy):
        for name, value, default in (("device", device, "auto"), ("precision", str(precision), "32")):
            if value != default:
                raise OptionError(f"{name}={value!r} cannot be combined with a strategy object: "
                                  f"{type(strategy).__name__} brings its own.")  # fmt: skip
        return strategy
    if strategy not in STRATEGIES:
        raise OptionError(f"strategy={strategy!r}, allowed: {', '.join(map(repr, STRATEGIES))} or a Strategy object."
                          f"{closest(str(strategy), STRATEGIES)}")  # fmt: skip
    return SingleDevice(pick_device(device), parse_precision(precision))


def pick_device(device: Any) -> torch.device:
    """The device asked for; 'auto' takes an accelerator if there is one."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={device!r} is no device: {str(error).splitlines()[0]}") from None
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(f"device={device!r} is not available here: {str(error).splitlines()[0]}") from None
    return chosen
