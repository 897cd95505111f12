"""The DDP strategy: each rank has the whole model; torch's DistributedDataParallel averages gradients."""

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
from hookline.distributed.process_group import MultiRankStrategy
from hookline.util.errors import OptionError

UNUSED = "Expected to have finished reduction"
BUFFER_OPTION = next(
    each
    for each in ("forward_sync_buffers", "broadcast_buffers")
    if each in inspect.signature(DistributedDataParallel.__init__).parameters
)
"""The name of the option for buffers: newer versions of torch renamed it."""
is_trained = operator.attrgetter("requires_grad")


class DDP(MultiRankStrategy):
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
        """Take the options of DistributedDataParallel.

        find_unused_parameters: some steps do not use all parameters. static_graph: every step uses the same
        parameters. sync_buffers: broadcast rank zero's buffers (batch norm's averages) before a step and
        before an evaluation. bucket_cap_mb: the size of the gradient buckets. communication_hook: replaces
        the all-reduce, such as
        `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook`.
        sync_batchnorm: batch norm over the batches of all ranks, on accelerators only.
        """
        super().__init__(device, precision, timeout)
        self.sync_batchnorm, self.sync_buffers = sync_batchnorm, sync_buffers
        self.communication_hook = communication_hook
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            **({} if sync_buffers else {BUFFER_OPTION: False}),
        }
        self._wrapped: Any = None
        self._module: nn.Module | None = None
        self._parameters: list[Tensor] = []
        self._trained: list[bool] = []
        self._trains = self._is_manual = self._has_begun = False
        self._syncs = True

    def setup(self, stage: str) -> None:
        """Record whether this run trains, because only training needs the wrapper."""
        self._trains = stage == "fit"

    def place(self, module: nn.Module) -> nn.Module:
        """Move the module to its device, and wrap it if the run trains."""
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
        """Release the module and its wrapper, which has hooks on the module's parameters."""
        self._wrapped = self._module = None
        self._parameters = []

    def _wrap(self) -> None:
        """Wrap the module, again whenever `requires_grad` changes: the wrapper reads it only when made."""
        assert self._module is not None
        self._wrapped = None  # delete it before the next wrapper adds hooks to the same parameters
        self._has_begun = False
        self._parameters = list(self._module.parameters())
        self._trained = list(map(is_trained, self._parameters))
        if any(self._trained):
            self._wrapped = self.make_wrapper(StepModule(self._module))
            # it may be made inside an accumulation window; each manual_backward sets it
            self._wrapped.require_backward_grad_sync = self._syncs and not self._is_manual

    def make_wrapper(self, step_module: StepModule) -> Any:
        """Return the wrapper around a module that is on its device."""
        wrapped = DistributedDataParallel(step_module, **self.options)
        if self.communication_hook is not None:
            wrapped.register_comm_hook(None, self.communication_hook)
        return wrapped

    # ---- the actions ---------------------------------------------------------------------------------------

    def training_step(self, call: Callable[[], Any]) -> Any:
        """Run the step through the wrapper, which prepares the backward."""
        if self._wrapped is None:
            return call()
        if list(map(is_trained, self._parameters)) != self._trained:
            self._wrap()
        if self._is_manual:  # a forward whose backward is not synced by the wrapper would stop its broadcasts
            self._wrapped.require_forward_param_sync = True
        # with static_graph the wrapper records the graph in the first backward, which must therefore sync
        if self.options["static_graph"] and not self._is_manual:
            self._wrapped.require_backward_grad_sync = self._syncs or not self._has_begun
            self._has_begun = True
        try:
            return self._wrapped(call)
        except RuntimeError as error:
            if UNUSED in str(error):
                error.add_note(
                    "Some steps do not use all parameters: pass strategy=DDP(find_unused_parameters=True), "
                    "or freeze parameters that are never used (requires_grad_(False))."
                )
            raise

    def backward(self, call: Callable[[], Any], loss: Tensor) -> None:
        """Run the backward. In manual optimization each backward of a step averages over ranks."""
        if self._is_manual and self._wrapped is not None and self.world_size > 1:
            self._wrapped.require_backward_grad_sync = True
            # DDP rebuilds its buckets once, in a forward; between two backwards of a step none comes
            self._wrapped.reducer._rebuild_buckets()
            self._wrapped.reducer.prepare_for_backward(
                [loss] if self.options["find_unused_parameters"] else []
            )
            call()
            self._wrapped.require_backward_grad_sync = False
        else:
            call()

    def sync_gradients(self, now: bool) -> None:
        """Set whether the next backward averages gradients over ranks. False until a window's last batch."""
        self._syncs = now
        if self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = now

    def skip_batch(self) -> None:
        """Run an empty forward, because the wrapper broadcasts buffers and its bucket order in a forward."""
        if self._wrapped is not None:
            self._wrapped(functools.partial(bool))

    def reopen_window(self) -> None:
        """Skip the broadcast of buffers: only a window's first forward has it, and that one is over."""
        if self._wrapped is not None:
            self._wrapped.require_forward_param_sync = False

    def drop_window(self) -> None:
        """Broadcast buffers in the next forward, which begins a window."""
        if self._wrapped is not None:
            self._wrapped.require_forward_param_sync = True

    def sync_without_batch(self, after_forward: bool) -> None:
        """Take part in the averaging with gradients of zero."""
        if self._wrapped is None:
            return
        zero = self._zero() if after_forward else self._wrapped(functools.partial(self._zero))
        if after_forward:  # the forward has marked all parameters as unused
            self._wrapped.reducer.prepare_for_backward(
                [zero] if self.options["find_unused_parameters"] else []
            )
        zero.backward()

    def _zero(self) -> Tensor:
        return torch.stack([each.sum() * 0 for each in self._parameters if each.requires_grad]).sum()


def synced_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Replace batch norm layers by layers that average over the batches of all ranks."""
    if device.type in ("cpu", "meta"):
        raise OptionError(
            f"sync_batchnorm=True works on accelerators only; torch has no SyncBatchNorm for {device.type}."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return converted
