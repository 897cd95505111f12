"""What a strategy owns: the device, how the module is placed on it, and what ranks agree on."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from hookline._methods import StrategyMethods
from hookline.ranks import Ranks
from hookline.strategies.precision import Precision


class Strategy(StrategyMethods):
    """Base of strategies. It is a listener too: override any event in its methods.

    A strategy may also stand around an action: define `training_step(self, call)` (or validation_step, test_step,
    predict_step, backward, optimizer_step) and do the module's own by `call()`; further parameters are facts.
    """

    __hookline_base__: ClassVar[bool] = True

    restore_after_setup: bool = False
    """Whether a checkpoint is restored after the module was placed and wrapped, not before."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    def __init__(self, device: torch.device, precision: str = "32") -> None:
        self.device = device
        self.precision = Precision(precision, device)
        self.ranks = Ranks()
        """What the processes say to each other; complete once `connect` was called."""

    def connect(self) -> None:
        """Find the other ranks, if there are any. Called when a run begins, once or often."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move the module to where it runs; what is returned is what is run."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all ranks."""

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """The value over all ranks."""
        return value
