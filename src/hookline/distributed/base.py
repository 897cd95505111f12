"""The base class of strategies, which owns the device, the placement of the module and the communication; and
the strategy for one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from hookline.distributed.comm import Ranks
from hookline.distributed.layer_choice import default_layers
from hookline.distributed.precision import make_precision
from hookline.engine._methods import StrategyMethods
from hookline.util.errors import OptionError
from hookline.util.uncopied import Uncopied


class Strategy(StrategyMethods):
    """The base class of strategies. A strategy is also a listener: it may override any event method.

    A strategy may also wrap an action: define `training_step(self, call)` (or validation_step, test_step,
    predict_step, backward, optimizer_step) and run the module's own method with `call()`. Further parameters
    are facts.

    device: the device of the module. precision: '32', '16-mixed', 'bf16-mixed' or another name of the
    trainer's option `precision`.
    """

    __hookline_base__: ClassVar[bool] = True

    restore_after_setup: bool = False
    """Whether a checkpoint is restored after the module is placed and wrapped, instead of before."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    shards: bool = False
    """Whether a process holds only a part of the parameters and gradients."""
    shards_data: bool = True
    """Whether Hookline shards the loaders over the ranks. False: each rank's loader yields its own shard."""
    forward_communicates: bool = False
    """Whether a forward runs collectives, so that all ranks must run the same number of batches."""

    activation_checkpointing: Any = False
    """The option of the trainer, given to the strategy: True or choices of layers. False: the trainer's."""

    mesh: Any = None
    """The DeviceMesh of all ranks, from before the model is made; None if the strategy has none."""

    before_collective: Callable[[str], None] | None = None
    """Called with the name of a method that needs all ranks; raises if not all of them will call it."""

    differentiate: Callable[..., None] | None = None
    """The function that computes the gradients of a loss. None: `loss.backward()`."""

    def __init__(self, device: torch.device, precision: str | int = 32) -> None:
        self.device = device
        self.precision = make_precision(precision, device)
        self.ranks = Ranks()
        """The communication between the ranks; usable after `connect`."""

    def __repr__(self) -> str:
        ranks = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return f"<{type(self).__name__}: {self.device}, precision {self.precision.name}{ranks}>"

    def connect(self) -> None:
        """Connect to the other ranks, if there are any. Called at the start of every run."""

    @property
    def tensor_mesh(self) -> Any:
        """The DeviceMesh for tensor parallelism, for `configure_model`; None without tensor parallelism."""
        return None

    @property
    def mesh_text(self) -> str:
        """The dimensions of the mesh as text; empty without a mesh."""
        return ""

    def make_mesh(self) -> None:
        """Make the device mesh, after all ranks were compared and before the model is made."""

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Disconnect this rank from the others inside the `with`, for work that the other ranks do not do."""
        ranks, self.ranks = self.ranks, Ranks(self.rank, self.local_rank, self.world_size)
        try:
            yield
        finally:
            self.ranks = ranks

    def place(self, module: nn.Module) -> nn.Module:
        """Move the module to its device and return the module that the loops call."""
        raise NotImplementedError

    def layers_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks of a model, outermost first: the items of every ModuleList."""
        return default_layers(module)

    def prepare_optimizers(self, optimizers: list[Any]) -> list[Any]:
        """Return the optimizers that the loops step."""
        return optimizers

    def sync_gradients(self, now: bool) -> None:
        """Set whether the next backward reduces gradients over ranks. False until a window's last batch."""

    def skip_batch(self) -> None:
        """Match the collectives of a batch that this rank skips and other ranks may run."""

    def reopen_window(self) -> None:
        """Prepare for a resume in the middle of an accumulation window."""

    def drop_window(self) -> None:
        """Drop an open accumulation window, because the run goes back to a state before it."""

    def sync_without_batch(self, after_forward: bool) -> None:
        """Take part in the gradient reduction although this rank's step returned no loss or did not run."""

    def begin_evaluation(self, module: nn.Module) -> None:
        """Prepare an evaluation, so that every rank evaluates the same model."""

    def evaluate(self, call: functools.partial[Any]) -> Any:
        """Run a function that computes with the module outside of its steps, without gradients.

        If `forward_communicates`, all ranks call it.
        """
        return call()

    def barrier(self) -> None:
        """Wait for all ranks."""

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Return the value reduced over all ranks."""
        return value


class StepModule(nn.Module):
    """A module whose forward runs a whole step, so that a wrapper (DDP, FSDP) covers the step.

    Wrappers cover `forward` only, but a training step may call the module, parts of it, or one part often.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the step that is passed as a partial. Any other input goes to the module itself.

        Hooks may call `wrapped_model` with plain inputs.
        """
        if len(inputs) == 1 and type(inputs[0]) is functools.partial and not named:
            return inputs[0]()
        return self.module(*inputs, **named)


def step_module_of(module: nn.Module) -> Any:
    """Return the step module that an earlier run made for the module, or None."""
    return module.__dict__.get("_hookline_step_module", Uncopied()).value


def keep_step_module(module: nn.Module, step_module: Any) -> None:
    """Store the step module on the module for later runs."""
    module.__dict__["_hookline_step_module"] = Uncopied(step_module)


def refuse_sharded(module: nn.Module, strategy: Any) -> None:
    """Raise if an earlier run sharded the module, because only FSDP can run it then."""
    if step_module_of(module) is not None:
        raise OptionError(
            f"{type(module).__name__} was sharded by FSDP in an earlier run and stays sharded; "
            f"{type(strategy).__name__} needs the whole module. Use strategy='fsdp' again, or load the "
            "weights of a checkpoint into a new module (hookline.load_weights)."
        )


class SingleDevice(Strategy):
    """The module on one device: the CPU, a GPU, or `meta`."""

    def place(self, module: nn.Module) -> nn.Module:
        """Move the module to the device."""
        refuse_sharded(module, self)
        module.to(self.device)
        return module
