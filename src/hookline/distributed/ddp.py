"""The whole model on every rank, gradients averaged while they are computed: torch's
DistributedDataParallel.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.distributed.base import StepModule, refuse_sharded
from hookline.distributed.process_group import ManyRanks
from hookline.util.errors import OptionError

UNUSED = "Expected to have finished reduction"
BUFFERS = next(
    each
    for each in ("forward_sync_buffers", "broadcast_buffers")
    if each in inspect.signature(DistributedDataParallel.__init__).parameters
)
"""The option's newer name, where torch knows it."""
is_trained = operator.attrgetter("requires_grad")


class DDP(ManyRanks):
    """Each rank trains on its own batches with a copy of the model; all copies stay equal."""

    def __init__(
        self,
        device: str | torch.device = "auto",
        precision: str | int = 32,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        sync_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        sync_batchnorm: bool = False,
        communication_hook: Callable[[Any, Any], Any] | None = None,
        timeout: float = 1800,
    ) -> None:
        """What DistributedDataParallel takes.

        find_unused_parameters: some steps leave parameters out. static_graph: every step uses the same ones.
        sync_buffers: rank zero's buffers (batch norm's averages) go to all before a step and before an
        evaluation. bucket_cap_mb: gradients that are sent together. communication_hook: how, such as
        `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook`.
        sync_batchnorm: batch norm over the batches of all ranks; on accelerators only.
        """
        super().__init__(device, precision, timeout)
        self.sync_batchnorm, self.sync_buffers = sync_batchnorm, sync_buffers
        self.communication_hook = communication_hook
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            **({} if sync_buffers else {BUFFERS: False}),
        }
        self._wrapped: Any = None
        self._module: nn.Module | None = None
        self._parameters: list[Tensor] = []
        self._trained: list[bool] = []
        self._trains = self._is_manual = self._has_begun = False
        self._syncs = True

    def setup(self, stage: str) -> None:
        """Only training needs the wrapper."""
        self._trains = stage == "fit"

    def place(self, module: nn.Module) -> nn.Module:
        """Move the module; to train it, wrap it."""
        refuse_sharded(module, self)
        module.to(self.device)
        if self.sync_batchnorm and self.world_size > 1:
            module = synced_batchnorm(module, self.device)
        self._module = module
        self._is_manual = not getattr(module, "automatic_optimization", True)
        if self.world_size > 1 and self._trains:
            self._wrap()
        return module if self._wrapped is None else self._wrapped

    def teardown(self) -> None:
        """Let go of the module: the wrapper hears its backward."""
        self._wrapped = self._module = None
        self._parameters = []

    def _wrap(self) -> None:
        """Anew whenever other parameters are trained: the wrapper settles which ones when it is made."""
        assert self._module is not None
        self._wrapped = None  # it must be gone before the next one listens to the same parameters
        self._has_begun = False
        self._parameters = list(self._module.parameters())
        self._trained = list(map(is_trained, self._parameters))
        if any(self._trained):
            self._wrapped = self.make_wrapper(StepModule(self._module))
            if self._is_manual:
                self._wrapped.require_backward_grad_sync = False  # each manual_backward says so for itself

    def make_wrapper(self, shell: StepModule) -> Any:
        """The wrapper around a module that is on its device."""
        wrapped = DistributedDataParallel(shell, **self.options)
        if self.communication_hook is not None:
            wrapped.register_comm_hook(None, self.communication_hook)
        return wrapped

    # ---- the actions ---------------------------------------------------------------------------------------

    def training_step(self, call: Callable[[], Any]) -> Any:
        """Through the wrapper, which prepares for the backward that follows."""
        if self._wrapped is None:
            return call()
        if list(map(is_trained, self._parameters)) != self._trained:
            self._wrap()
        if (
            self.options["static_graph"] and not self._is_manual
        ):  # it learns the graph from the first backward, which must sync
            self._wrapped.require_backward_grad_sync = self._syncs or not self._has_begun
            self._has_begun = True
        try:
            return self._wrapped(call)
        except RuntimeError as error:
            if UNUSED in str(error):
                error.add_note(
                    "Some steps do not use all parameters: pass strategy=DDP(find_unused_parameters=True), "
                    "or freeze what is never used (requires_grad_(False))."
                )
            raise

    def backward(self, call: Callable[[], Any], loss: Tensor) -> None:
        """A manual step differentiates as often as it likes, each time over all ranks."""
        if self._is_manual and self._wrapped is not None and self.world_size > 1:
            self._wrapped.require_backward_grad_sync = True
            # between two backwards of one step; once, and nothing after that
            self._wrapped.reducer._rebuild_buckets()
            self._wrapped.reducer.prepare_for_backward(
                [loss] if self.options["find_unused_parameters"] else []
            )
            call()
            self._wrapped.require_backward_grad_sync = False
        else:
            call()

    def sync_gradients(self, now: bool) -> None:
        """Whether the next backward averages over ranks, or keeps its gradients for the window's last."""
        self._syncs = now
        if self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = now

    def skip_batch(self) -> None:
        """A forward of nothing: there the wrapper sends buffers, and once, after the first step, the order of
        its buckets.
        """
        if self._wrapped is not None:
            self._wrapped(functools.partial(bool))

    def reopen_window(self) -> None:
        """Only a window's first forward takes rank zero's buffers, and that one has been."""
        if self._wrapped is not None:
            self._wrapped.require_forward_param_sync = False

    def sync_without_batch(self, after_forward: bool) -> None:
        """Take part in the averaging with a gradient of zero: this rank had nothing to learn from."""
        if self._wrapped is None:
            return
        nothing = self._zero() if after_forward else self._wrapped(functools.partial(self._zero))
        if after_forward:  # the step has told the wrapper that it uses no parameter
            self._wrapped.reducer.prepare_for_backward(
                [nothing] if self.options["find_unused_parameters"] else []
            )
        nothing.backward()

    def _zero(self) -> Tensor:
        return torch.stack([each.sum() * 0 for each in self._parameters if each.requires_grad]).sum()


def synced_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Batch norm that counts the batches of all ranks."""
    if device.type in ("cpu", "meta"):
        raise OptionError(
            f"sync_batchnorm=True works on accelerators only; torch has no such batch norm for {device.type}."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return converted
