"""Losses, gradients and weights that are NaN or infinite: noticed one step late without making the device
wait, or looked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookline.distributed.comm import Ranks
from hookline.distributed.sharded_norms import held
from hookline.run.optimizers import bare
from hookline.util.errors import NonFiniteLoss


def all_finite(losses: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether these losses are, and what this process holds of the tensors: one read for all that is on a
    device.
    """
    on_device = [each for each in losses if isinstance(each, Tensor)]
    if len(on_device) < len(losses) and not all(
        math.isfinite(each) for each in losses if not isinstance(each, Tensor)
    ):
        return False
    here = [each._values() if each.is_sparse else each for each in map(held, tensors)]
    here = [each for each in here if each.numel()]
    if any(each.device.type == "meta" for each in (*on_device[:1], *here[:1])):
        return True  # there is nothing to read
    # the largest element, not the norm: that of finite gradients may be infinite
    found = list(torch._foreach_norm(here, math.inf)) if here else []  # pyright: ignore[reportPrivateImportUsage]
    found += [each.detach().reshape(()) for each in on_device]
    if len({each.device for each in found}) > 1:
        found = [each.to(found[0].device) for each in found]
    return not found or bool(torch.stack(found).isfinite().all().item())


def state_tensors(optimizer: Any) -> list[Tensor]:
    """Return the tensors of an optimizer's state that hold real numbers, such as moments; counts of steps are
    left out.
    """
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                found.append(value.detach())
        elif isinstance(value, dict):
            for name, each in value.items():
                if name != "step":
                    collect(each)
        elif isinstance(value, list | tuple | deque):
            for each in value:
                collect(each)

    for state in optimizer.state.values():
        collect(state)
    return found


LOSS, PARAMETERS, STATE = "loss", "parameters", "state"
SAID = {LOSS: "The loss was", PARAMETERS: "The weights are", STATE: "The optimizer's state is"}
"""What can be not finite, the cause before its consequences, and the beginning of a sentence about it."""


def find_nonfinite(optimizers: Sequence[Any], with_state: bool = True) -> str:
    """Return `PARAMETERS` or `STATE` if what these optimizers train, or keep about it, is not finite; nothing
    if all is.
    """
    weights = [
        each.detach()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
        if each.requires_grad and (each.is_floating_point() or each.is_complex())
    ]  # a frozen mask may hold what it likes
    state = [each for optimizer in optimizers for each in state_tensors(optimizer)] if with_state else []
    if all_finite([], [*weights, *state]):
        return ""
    return STATE if state and all_finite([], weights) else PARAMETERS


def describe_nonfinite(kind: str, optimizers: Sequence[Any]) -> str:
    """Return a sentence about what `find_nonfinite` has found."""
    if kind == PARAMETERS:
        return "The weights are not finite, though the loss was: a gradient, or a hook, made them so."
    names = {
        name
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for name, value in state.items()
        if isinstance(value, Tensor) and not all_finite([], [value.detach()])
    }
    kinds = ", ".join(dict.fromkeys(type(bare(each)).__name__ for each in optimizers))
    which = f" ({', '.join(sorted(names))})" if names else ""
    return (
        f"The optimizer's state is not finite, though the weights are: {kinds}{which}. A gradient that "
        "overflowed, or a hook, made it so."
    )


class FiniteWatch:
    """Looks at the loss of the step before, when reading it costs nothing any more."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        """Those who must hear of it before anybody may raise; None: nobody else is there, or comes along any
        more.
        """
        self.previous: Any = None
        self.broken = False
        self.optimizers: list[Optimizer] = []
        """Whose weights to look at before something is built on them: the loss may have been finite, and a
        gradient not.
        """
        self.look = {"cpu": self._look_on_cpu, "cuda": self._look_on_cuda}.get(device.type, self._remember)
        self._host: Tensor | None = None
        self._arrived: Any = None

    def _look_on_cpu(self, loss: Any) -> None:
        previous, self.previous = self.previous, loss
        if previous is not None and not math.isfinite(previous):
            self._complain(float(previous))

    def _look_on_cuda(self, loss: Tensor) -> None:
        """Copy into pinned memory without blocking; look once the copy has arrived, then send the next."""
        self.previous = loss
        if self._host is None:
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif not self._arrived.query():
            return
        elif not math.isfinite(self._host.item()):
            self._complain(self._host.item())
        self._host.copy_(loss.reshape(()), non_blocking=True)
        self._arrived.record()

    def _remember(self, loss: Tensor) -> None:
        self.previous = loss

    def check_now(self, with_state: bool = False) -> None:
        """Look now, before something is built on these weights: a save, or the end of the run.

        with_state: look at the optimizers' state as well, with the same one read of the device: it is what a
        save keeps.
        """
        bad = LOSS if self.broken or not self._is_finite() else find_nonfinite(self.optimizers, with_state)
        if self.ranks is not None:
            # by now one rank's loss may be in all ranks' weights: then the loss is what is to be named
            told = [number for each in SAID for number in (bad == each, (bad == each) * self.ranks.rank)]
            answers = iter(self.ranks.total(told).read())
            for each, (count, guilty) in zip(SAID, zip(answers, answers, strict=True), strict=True):
                if count:
                    self.broken = True
                    where = f"rank {guilty}" if count == 1 else f"{count} ranks"
                    raise NonFiniteLoss(
                        f"{SAID[each]} not finite on {where}. The run stops, and nothing made from it is "
                        f"saved."
                    )
        elif self.broken:
            raise NonFiniteLoss(
                "The loss, or the weights, were not finite, so nothing made from this run is saved any more."
            )
        elif bad == LOSS:
            self._complain(float(self.previous))
        elif bad:
            self.broken = True
            raise NonFiniteLoss(
                f"{describe_nonfinite(bad, self.optimizers)} The run stops, and nothing made from it is "
                f"saved."
            )

    def _is_finite(self) -> bool:
        on_meta = isinstance(self.previous, Tensor) and self.previous.device.type == "meta"
        return self.previous is None or on_meta or math.isfinite(self.previous)

    def _complain(self, value: float) -> None:
        self.broken = True
        if self.ranks is not None:
            return  # all raise together, when this window's update is settled
        raise NonFiniteLoss(
            f"The loss became {value}. The run stops, and nothing made from it is saved. "
            "Trainer(nonfinite='skip') leaves such updates out instead."
        )
