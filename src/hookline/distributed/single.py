"""The strategy for one process and one device."""

from __future__ import annotations

from torch import nn

from hookline.distributed.base import Strategy, refuse_sharded


class SingleDevice(Strategy):
    """The module on one device: the CPU, a GPU, or `meta`."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move the module to the device."""
        refuse_sharded(module, self)
        module.to(self.device)
        return module
