"""What a strategy owns: the device, how the module is placed on it, and what ranks agree on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from hookline.distributed.comm import Ranks
from hookline.distributed.precision import Precision
from hookline.engine._methods import StrategyMethods
from hookline.engine.checks import parse_precision
from hookline.util.errors import OptionError
from hookline.util.uncopied import Uncopied


class Strategy(StrategyMethods):
    """Base of strategies. It is a listener too: override any event in its methods.

    A strategy may also stand around an action: define `training_step(self, call)` (or validation_step,
    test_step, predict_step, backward, optimizer_step) and do the module's own by `call()`; further parameters
    are facts.
    """

    __hookline_base__: ClassVar[bool] = True

    restore_after_setup: bool = False
    """Whether a checkpoint is restored after the module was placed and wrapped, not before."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    shards: bool = False
    """Whether a process holds only a part of the parameters and gradients."""
    shards_data: bool = True
    """Whether loaders are dealt out to ranks; False: what a rank's loader yields is meant for that rank
    already.
    """
    forward_communicates: bool = False
    """Whether a forward alone makes ranks wait for each other, so that all must run the same number of
    batches.
    """

    differentiate: Callable[..., None] | None = None
    """What computes the gradients of a loss, if it is not the loss itself."""

    def __init__(self, device: torch.device, precision: str | int = 32) -> None:
        self.device = device
        self.precision = Precision(parse_precision(precision), device)
        self.ranks = Ranks()
        """What the processes say to each other; complete once `connect` was called."""

    def __repr__(self) -> str:
        ranks = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return f"<{type(self).__name__}: {self.device}, precision {self.precision.name}{ranks}>"

    def connect(self) -> None:
        """Find the other ranks, if there are any. Called when a run begins, once or often."""

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """This rank only looks at a run, which the others may not do: nobody is asked anything meanwhile."""
        ranks, self.ranks = self.ranks, Ranks(self.rank, self.local_rank, self.world_size)
        try:
            yield
        finally:
            self.ranks = ranks

    def place(self, module: nn.Module) -> nn.Module:
        """Move the module to where it runs; what is returned is what is run."""
        raise NotImplementedError

    def prepare_optimizers(self, optimizers: list[Any]) -> list[Any]:
        """The optimizers as they are run."""
        return optimizers

    def sync_gradients(self, now: bool) -> None:
        """Whether the next backward brings the ranks' gradients together, or keeps them for the window's last
        batch.
        """

    def skip_batch(self) -> None:
        """This rank leaves a batch out in the middle of a window, and others may not."""

    def reopen_window(self) -> None:
        """A resumed run begins in the middle of an accumulation window."""

    def sync_without_batch(self, after_forward: bool) -> None:
        """Take part in bringing gradients together although this rank's step gave no loss, or was not even
        run.
        """

    def begin_evaluation(self, module: nn.Module) -> None:
        """Batches are about to be measured: see to it that every rank measures the same model."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """The value over all ranks."""
        return value


# ---- The module in a coat whose forward is whatever step is to be run


class StepModule(nn.Module):
    """What a wrapper wraps, so that it sees all that a step does.

    A training step may call the module, parts of it, or the same part often, and wrappers look at `forward`
    only.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the step; with anything else, as hooks may call what they get as `wrapped_model`, the module
        itself.
        """
        if len(inputs) == 1 and type(inputs[0]) is functools.partial and not named:
            return inputs[0]()
        return self.module(*inputs, **named)


def unwrapped(module: nn.Module) -> Any:
    """The shell that the module got in an earlier run, or None."""
    return module.__dict__.get("_hookline_worn", Uncopied()).value


def refuse_sharded(module: nn.Module, strategy: Any) -> None:
    """What an earlier run has cut in pieces can be run by what knows of pieces only."""
    if unwrapped(module) is not None:
        raise OptionError(
            f"{type(module).__name__} was sharded by FSDP in an earlier run and stays so; "
            f"{type(strategy).__name__} needs it whole. Go on with strategy='fsdp', or load the weights of a "
            "checkpoint into a new one (hookline.load_weights)."
        )


def wrap_step(module: nn.Module, shell: Any) -> None:
    """Remember it."""
    module.__dict__["_hookline_worn"] = Uncopied(shell)
