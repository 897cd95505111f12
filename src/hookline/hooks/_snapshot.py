"""A copy of the state of a module and its optimizers, for hooks that train for a trial and restore it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hookline.data.batch import map_tensors


class Snapshot:
    """A copy of weights, buffers, gradients, optimizers and schedulers that `restore` restores, any number of
    times.
    """

    def __init__(
        self, module: nn.Module, optimizers: list[Any], schedulers: list[Any], on_cpu: bool = False
    ) -> None:
        """Copy the state. on_cpu: keep the copy in the memory of the machine, not of the device."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", copy=True) if on_cpu else tensor.detach().clone()

        def state_of(stateful: Any) -> Any:
            state = stateful.state_dict()
            return map_tensors(state, copied) if on_cpu else copy.deepcopy(state)

        self.tensors = [(each, copied(each)) for each in (*module.parameters(), *module.buffers())]
        self.objects = [(each, state_of(each)) for each in (*optimizers, *schedulers)]
        self.grads = [
            (each, None if each.grad is None else each.grad.clone()) for each in module.parameters()
        ]

    def restore(self) -> None:
        """Restore the state, in place."""
        with torch.no_grad():
            for tensor, before in self.tensors:
                tensor.copy_(before)
        for stateful, state in self.objects:
            stateful.load_state_dict(copy.deepcopy(state))
        for parameter, grad in self.grads:
            parameter.grad = None if grad is None else grad.clone()
