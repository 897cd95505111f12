"""Methods of Lightning's modules that work on the model itself: freeze it, gather over ranks, export it."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed.nn import functional as differentiable

from hookline.data.batch import move
from hookline.engine.listener import overrides
from hookline.run.module import Module
from hookline.run.optimizers import bare
from hookline.util.errors import OptionError

BACKWARD = ("gradient", "retain_graph", "create_graph", "inputs")
"""The arguments of `Tensor.backward`, in their order."""


class ModuleTools(Module):
    """What a LightningModule can do with its model, its optimizers and its exports, besides hooks."""

    __hookline_base__: ClassVar[bool] = True

    example_input_array: Any = None
    """An input of `forward`, for exports and summaries: a tensor, a tuple or a dictionary of arguments."""
    device_mesh: ClassVar[None] = None
    """Hookline's strategies have no device mesh."""
    fabric: ClassVar[None] = None
    """Hookline does not run modules in Fabric."""

    # ---- parameters ----------------------------------------------------------------------------------------

    def freeze(self) -> Self:
        """Let no parameter require gradients, and put the module into eval mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Let all parameters require gradients, and put the module into train mode."""
        return self.requires_grad_(True).train()

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the first floating-point parameter or buffer."""
        tensors = (each for each in (*self.parameters(), *self.buffers()) if each.is_floating_point())
        return next((each.dtype for each in tensors), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """Return whether the module is on a CUDA device."""
        return any(each.is_cuda for each in self.parameters())

    # ---- the example input, as Lightning's ModelSummary prepares it ----------------------------------------

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return self._changed("on_before_batch_transfer", batch, dataloader_idx)

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = self.transfer_batch_to_device(batch, device or self.device, dataloader_idx)
        return self._changed("on_after_batch_transfer", batch, dataloader_idx)

    def _changed(self, method: str, batch: Any, dataloader_idx: int) -> Any:
        return getattr(self, method)(batch, dataloader_idx) if overrides(self, method) else batch

    # ---- ranks ---------------------------------------------------------------------------------------------

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, stacked; with one rank, the tensors themselves.

        data: a tensor or a number, or lists, tuples and dictionaries of them. All ranks must call it.
        sync_grads: whether gradients flow back to the other ranks.
        """
        if isinstance(data, Mapping):
            return {name: self.all_gather(each, group, sync_grads) for name, each in data.items()}
        if isinstance(data, list | tuple):
            return type(data)([self.all_gather(each, group, sync_grads) for each in data])
        if not isinstance(data, Tensor):
            data = torch.tensor(data, device=next((each.device for each in self.parameters()), None))
        if self._run.state.world_size == 1:
            return data
        data = data.contiguous()
        if sync_grads:
            world = group or torch.distributed.group.WORLD
            return torch.stack(differentiable.all_gather(data, world))  # type: ignore[no-untyped-call]
        gathered = [torch.zeros_like(data) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, data.detach(), group=group)
        return torch.stack(gathered)

    # ---- optimizers ----------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of optimizers, whose `step` and `zero_grad` emit the events.

        use_pl_optimizer: False returns the optimizers of `configure_optimizers` themselves.
        """
        found = self._run.manual.optimizers if use_pl_optimizer else self._run.state.optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of schedulers, or None."""
        schedulers = self._run.state.schedulers
        return schedulers[0] if len(schedulers) == 1 else list(schedulers) or None

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Run backward with its events; the arguments are those of `Tensor.backward`."""
        self._run.manual.backward(loss, **dict(zip(BACKWARD, args, strict=False)), **options)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> Tensor | None:
        """Clip by total norm or by value; what is not given is the trainer's."""
        options = self._run.options
        value = options.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or options.gradient_clip_algorithm
        return super().clip_gradients(bare(optimizer), value or None, algorithm)

    # ---- modes of the model --------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        """Clear the gradients before a validation in a fit."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Put the module into eval mode."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Put the module into train mode."""
        self.train()

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train

    # ---- export --------------------------------------------------------------------------------------------

    def to_onnx(
        self, file_path: str | PathLike[str] | None = None, input_sample: Any = None, **options: Any
    ) -> Any:
        """Export the model with `torch.onnx.export`, whose options these are.

        input_sample: the arguments of `forward`; by default `example_input_array`.
        """
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise OptionError(
                f"to_onnx needs an input of {type(self).__name__}.forward: pass input_sample=..., or set "
                "self.example_input_array."
            )
        device = next((each.device for each in self.parameters()), torch.device("cpu"))
        was_training = self.training
        try:
            with torch.no_grad():
                return torch.onnx.export(self, move(sample, device), file_path, **options)
        finally:
            self.train(was_training)

    def to_torchscript(self, *args: Any, **options: Any) -> Any:
        """Raise, because TorchScript reads every property of a module, also those of a run."""
        raise OptionError(
            f"{type(self).__name__}.to_torchscript is not available, because PyTorch replaces TorchScript: "
            "use torch.export.export(module, (example,)), or module.to_onnx(path, example)."
        )
