"""The gradients of an accumulation window that is still open: where each kind of model keeps them, and how
they come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hookline.checkpoint.sharding import is_dtensor


def window_gradients(module: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    """By the names of the parameters. Plain ones are this rank's own: the ranks' are brought together when
    the window closes.
    """
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    for name, each in _fsdp_parameters(module, wrapped):
        # FSDP keeps whole gradients beside the parameters until they are added up over ranks
        held = each.unsharded_accumulated_grad
        if held is None and hasattr(each, "_unsharded_param"):
            held = each._unsharded_param.grad
        if held is not None:
            found[name] = held
    return found


def put_gradients(module: nn.Module, wrapped: nn.Module, gradients: dict[str, Tensor]) -> None:
    """The opposite."""
    kept_beside = dict(_fsdp_parameters(module, wrapped))
    for name, parameter in module.named_parameters():
        value = gradients.get(name)
        if value is None:
            continue
        if is_dtensor(value) or name not in kept_beside:
            parameter.grad = value.to(parameter.device)
        else:
            kept_beside[name].unsharded_accumulated_grad = value.to(parameter.device)


def _fsdp_parameters(module: nn.Module, wrapped: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP's own record of each parameter, by the parameter's name."""
    names = {id(each): name for name, each in module.named_parameters() if is_dtensor(each)}
    units: list[Any] = (
        [each for each in wrapped.modules() if hasattr(each, "_get_fsdp_state")] if names else []
    )
    for each in units:
        for group in each._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if id(parameter.sharded_param) in names:
                    yield names[id(parameter.sharded_param)], parameter
