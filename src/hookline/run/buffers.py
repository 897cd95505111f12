"""Buffers that stay finite: the averages of batch norm, which one batch with a NaN would spoil for good."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.distributed.sharded_norms import local_part
from hookline.util.text import list_some

log = logging.getLogger("hookline")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Place(NamedTuple):
    """Where a buffer is. A module may replace the tensor at every step."""

    name: str
    owner: dict[str, Any]
    key: str

    def tensor(self) -> Tensor | None:
        """Return this rank's part of the buffer; None if it is not a plain tensor of numbers, or is gone."""
        whole = self.owner.get(self.key)
        if not isinstance(whole, Tensor) or whole.dtype not in FLOATS:
            return None
        part = local_part(whole)
        is_plain = type(part) is Tensor and part.layout is torch.strided and not part.is_meta
        # .data has no version: to put a value back must not refuse a backward pass that is still to come
        return part.data if is_plain and part.numel() else None


def find_places(module: nn.Module) -> list[Place]:
    """Return the places of the floating-point buffers that a checkpoint holds."""
    places = [
        Place(f"{prefix}.{key}" if prefix else key, layer._buffers, key)
        for prefix, layer in module.named_modules()
        for key, each in layer._buffers.items()
        if each is not None and key not in layer._non_persistent_buffers_set
    ]
    return [each for each in places if each.owner[each.key].is_floating_point()]


def find_nonfinite_buffers(places: Sequence[Place]) -> list[str]:
    """Return the names of buffers with a NaN or an infinity, with one read of each device."""
    found: list[str] = []
    for named in _by_device(places).values():
        flags = torch.stack([each.isfinite().all() for _, each in named]).tolist()
        found += [name for (name, _), is_finite in zip(named, flags, strict=True) if not is_finite]
    return found


def _by_device(places: Sequence[Place]) -> dict[torch.device, list[tuple[str, Tensor]]]:
    found: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for place in places:
        if (tensor := place.tensor()) is not None:
            found.setdefault(tensor.device, []).append((place.name, tensor))
    return found


class KeptBuffers:
    """A copy of the newest finite values of a module's buffers, for a run that skips or stops at a NaN.

    The forward pass of a batch with a NaN changes buffers before the loss is checked. In the running
    averages of batch norm a NaN stays, so the model would return NaN in eval mode.
    """

    def __init__(self, module: nn.Module, agree: Callable[[bool], bool] = bool) -> None:
        """Copy the buffers. agree: returns whether a flag is set on every rank that puts its buffers back."""
        self._places = find_places(module)
        self._agree = agree
        self._kept: dict[torch.device, Tensor] = {}
        self._has_warned = False
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present values that are finite, without a device sync."""
        if not self._places:
            return
        for device, named in _by_device(self._places).items():
            flat = torch.cat([each.reshape(-1) for _, each in named])
            before = self._kept.get(device)
            if before is not None and len(before) == len(flat):
                flat = torch.where(flat.isfinite(), flat, before)
            self._kept[device] = flat

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Put the kept values back if a buffer has become non-finite; return the names of such buffers.

        It reads from each device once.
        """
        if not self._places:
            return []
        names: list[str] = []
        usable: list[tuple[Tensor, Tensor]] = []
        for device, named in _by_device(self._places).items():
            kept, sizes = self._kept.get(device), [each.numel() for _, each in named]
            if kept is None or len(kept) != sum(sizes):
                continue  # a buffer is new or has another shape
            parts = torch.split(kept, sizes)
            usable += [(each, part) for (_, each), part in zip(named, parts, strict=True)]
            broken = [
                (part.isfinite() & ~each.reshape(-1).isfinite()).any()
                for (_, each), part in zip(named, parts, strict=True)
            ]
            flags = torch.stack(broken).tolist()
            names += [name for (name, _), is_broken in zip(named, flags, strict=True) if is_broken]
        if self._agree(not names):
            return []
        for tensor, part in usable:
            tensor.copy_(part.view_as(tensor))
        return names

    def put_back_and_warn(self) -> None:
        """Put the kept values back, and warn the first time."""
        if (names := self.put_back()) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: not finite after a batch whose update is skipped. They have the values of the update "
                "before it again.",
                list_some(names),
            )


class FiniteBuffers:
    """The buffers that were finite when the run began; a mask with infinities is not one of them."""

    def __init__(self, module: nn.Module) -> None:
        places = find_places(module)
        bad = set(find_nonfinite_buffers(places))
        self._places = [each for each in places if each.name not in bad]
        self.broken: list[str] = []
        """The names of those that were not finite at the newest save."""
        if nans := [each.name for each in places if each.name in bad and _has_nan(each)]:
            log.warning(
                "%s: NaN before the first step. In eval mode the outputs of such layers are NaN; resume from "
                "an earlier checkpoint, or make the module again.",
                list_some(nans),
            )

    def check(self) -> None:
        """Warn before a save if one of them is not finite any more, once for each."""
        before, self.broken = self.broken, find_nonfinite_buffers(self._places)
        if new := [each for each in self.broken if each not in before]:
            log.warning(
                "%s: not finite, and saved so. In eval mode the outputs of such layers are not finite, and "
                "training does not mend the averages of batch norm. Go back to an earlier checkpoint, and "
                "leave out the batch that made them so: Trainer(nonfinite='skip') and NaNGuard() put buffers "
                "back.",
                list_some(new),
            )


def _has_nan(place: Place) -> bool:
    tensor = place.tensor()
    return tensor is not None and bool(tensor.isnan().any())
