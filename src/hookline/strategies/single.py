"""One process, one device."""

from __future__ import annotations

from torch import nn

from hookline.strategies.base import Strategy
from hookline.strategies.device import pick_device as pick_device


class SingleDevice(Strategy):
    """The module on one device: the CPU, a GPU, or `meta`."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move the parameters once; modules that are there already are left alone."""
        module.to(self.device)
        return module
