"""Compute statistics of many tensors with few kernels, without reading the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.distributed.sharded_norms import over_shards


def local_values(tensor: Tensor) -> Tensor:
    """Return the dense real values that this rank holds of a sharded, sparse or complex tensor."""
    values: Any = tensor.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    dense: Tensor = torch.view_as_real(values) if values.is_complex() else values
    return dense


def tensors_in(name: str, value: Any, path: str = "{}.{}") -> list[tuple[str, Tensor]]:
    """Return the tensors in nested containers by name. path: the format of a container's name and a key."""
    if isinstance(value, Tensor):
        return [(name, value)]
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    return [found for key, inner in pairs for found in tensors_in(path.format(name, key), inner, path)]


def with_gradients(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of an optimizer that have a gradient, with their names in the module."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if id(parameter) in own and parameter.grad is not None
    ]


def between_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Exclude a module's hook from torch.compile, so that it runs between the compiled graphs."""
    disable: Any = torch.compiler.disable
    made: Callable[..., None] = disable(function)
    return made


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norms of the tensors as a vector, in float32 or wider, so that they do not overflow."""
    held = [
        each if each.numel() else each.new_zeros(1) for each in map(local_values, tensors)
    ]  # an empty shard has no largest value
    dtype = torch.float64 if any(each.dtype is torch.float64 for each in held) else torch.float32
    found = torch._foreach_norm(held, order, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    vector = torch.stack([each.to(held[0].device) for each in found])
    return over_shards(vector, tensors, order)


def samples_of(tensors: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Return about `limit` values of all tensors, in proportion to their sizes, or all if there are fewer."""
    held = [local_values(each) for each in tensors]
    total = sum(each.numel() for each in held)
    parts: list[Tensor] = []
    for values in held:
        stride = max(1, math.ceil(total / limit))
        while stride > 1 and values.numel() and values.ndim and math.gcd(stride, values.shape[-1]) != 1:
            stride += 1  # so that every column of a matrix is sampled
        parts.append(values.flatten()[::stride].to(held[0].device, torch.float32))
    return parts


def percentiles(rows: Sequence[Tensor], wanted: Sequence[float]) -> Tensor:
    """Return the percentiles of each row as a matrix (rows, wanted), with one sort."""
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=math.inf)
    ordered = padded.sort(dim=1).values
    last = torch.tensor([len(row) - 1 for row in rows], dtype=torch.float32)[:, None]
    places = last * torch.tensor(wanted, dtype=torch.float32) / 100
    below, share = places.floor(), places - places.floor()
    low = ordered.gather(1, below.long().to(ordered.device))
    high = ordered.gather(1, places.ceil().long().to(ordered.device))
    return torch.lerp(low, high, share.to(ordered.device))
