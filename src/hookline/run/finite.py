"""Detect NaN and infinite losses, gradients and weights, one step late so that the device need not sync."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.distributed.comm import Ranks
from hookline.distributed.sharded_norms import local_part
from hookline.run.buffers import FiniteBuffers, KeptBuffers
from hookline.run.optimizers import bare
from hookline.util.errors import NonFiniteLoss

log = logging.getLogger("hookline")


def all_finite(losses: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Return whether the losses and the local parts of the tensors are finite, with one device read."""
    on_device = [each for each in losses if isinstance(each, Tensor)]
    if len(on_device) < len(losses) and not all(
        math.isfinite(each) for each in losses if not isinstance(each, Tensor)
    ):
        return False
    here = [each._values() if each.is_sparse else each for each in map(local_part, tensors)]
    here = [each for each in here if each.numel()]
    if any(each.device.type == "meta" for each in (*on_device[:1], *here[:1])):
        return True  # meta tensors have no values
    # the largest element, because the 2-norm of finite gradients may be infinite
    found = list(torch._foreach_norm(here, math.inf)) if here else []  # pyright: ignore[reportPrivateImportUsage]
    found += [each.detach().reshape(()) for each in on_device]
    if len({each.device for each in found}) > 1:
        found = [each.to(found[0].device) for each in found]
    return not found or bool(torch.stack(found).isfinite().all().item())


def state_tensors(optimizer: Any) -> list[Tensor]:
    """Return the floating-point tensors of an optimizer's state, such as moments, without step counts."""
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                found.append(value.detach())
        elif isinstance(value, dict):
            for name, part in value.items():
                if name != "step":
                    collect(part)
        elif isinstance(value, list | tuple | deque):
            for part in value:
                collect(part)

    for state in optimizer.state.values():
        collect(state)
    return found


LOSS, PARAMETERS, STATE = "loss", "parameters", "state"
SUBJECTS = {LOSS: "The loss was", PARAMETERS: "The weights are", STATE: "The optimizer's state is"}
"""The beginning of a message for each kind of non-finite value; causes come before consequences."""


def find_nonfinite(optimizers: Sequence[Any], with_state: bool = True) -> str:
    """Return `PARAMETERS` or `STATE` if trained weights or optimizer state are not finite; else empty."""
    weights = [
        each.detach()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
        if each.requires_grad and (each.is_floating_point() or each.is_complex())
    ]  # a frozen mask may contain infinities
    state = [each for optimizer in optimizers for each in state_tensors(optimizer)] if with_state else []
    if all_finite([], [*weights, *state]):
        return ""
    return STATE if state and all_finite([], weights) else PARAMETERS


BROKEN_WEIGHTS = (
    " The weights of the module in memory are not finite any more: make the module again or load a "
    "checkpoint before the next fit."
)


def warn_of_nonfinite_weights(module: nn.Module, optimizers: Sequence[Any]) -> None:
    """Warn before the first step if trained weights are not finite, such as those of a run that failed."""
    if find_nonfinite(optimizers, with_state=False) != PARAMETERS:
        return
    trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    bad = [name for name, each in trained if not all_finite([], [each.detach()])]
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    log.warning(
        "%s%s are not finite before the first step: make the module again or load a checkpoint.",
        ", ".join(bad[:3]),
        more,
    )


def describe_nonfinite(kind: str, optimizers: Sequence[Any]) -> str:
    """Return a sentence about the result of `find_nonfinite`."""
    if kind == PARAMETERS:
        return "The weights are not finite. A loss or a gradient that was not, or a hook, made them so."
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
    """Checks the loss of the previous update, whose value can be read without a device sync."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        """The ranks that raise together. None: there is one process, or the other ranks have left."""
        self.previous: Any = None
        """The loss of the newest update; of several batches, perhaps their sum."""
        self.broken = False
        self.stops = True
        """Whether a value that is not finite ends the run; otherwise the first one is logged."""
        self.optimizers: list[Optimizer] = []
        """Their weights are checked too, because a gradient can be non-finite although the loss is finite."""
        self.buffers: FiniteBuffers | None = None
        """The buffers that a save checks; None before the module is set up."""
        self.kept: KeptBuffers | None = None
        """The newest finite values of the buffers, with nonfinite='skip'."""
        self.look = {"cpu": self._look_on_cpu, "cuda": self._look_on_cuda}.get(device.type, self._remember)
        self._where = ", in the batch before this one"
        # losses on the CPU are numbers; the sum of finite losses in float16 may be infinite
        self._widen: Callable[[Any], Any] = float if device.type == "cpu" else Tensor.float
        self._host: Tensor | None = None
        self._arrived: Any = None

    def _look_on_cpu(self, loss: Any) -> None:
        previous, self.previous = self.previous, loss
        if previous is not None and not math.isfinite(previous):
            self._fail(float(previous), self._where)

    def _look_on_cuda(self, loss: Tensor) -> None:
        """Copy the previous loss into pinned memory without blocking; look once the copy has arrived.

        Not this loss: its update may still be skipped.
        """
        previous, self.previous = self.previous, loss
        if self._host is None:
            self._host = torch.zeros((), dtype=torch.float32, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif not self._arrived.query():
            return
        elif not math.isfinite(self._host.item()):
            self._fail(self._host.item(), ", in an earlier batch")
        if previous is not None:
            self._host.copy_(previous.reshape(()), non_blocking=True)
            self._arrived.record()

    def add(self, loss: Any) -> None:
        """Add the loss of a further batch of the same update, which a hook may skip."""
        self._where = ", in the update before this one"
        self.previous = loss if self.previous is None else self._widen(self.previous) + loss

    def drop(self) -> None:
        """Drop the loss of an update that a hook has skipped: it has not reached the weights."""
        self.previous = None

    def forget(self) -> None:
        """Forget the losses so far, because the run goes back to a state before them."""
        self.previous, self.broken, self._host = None, False, None

    def keep_buffers(self, module: nn.Module, agree: Callable[[bool], bool]) -> KeptBuffers:
        """Keep the values of the module's buffers when an epoch begins. agree: see `KeptBuffers`."""
        if self.kept is None:
            self.kept = KeptBuffers(module, agree)
        else:
            self.kept.keep()
        return self.kept

    def _remember(self, loss: Tensor) -> None:
        self.previous = loss

    def check_now(self, with_state: bool = False) -> None:
        """Raise if the loss or the weights are not finite, before a save or the end of the run.

        with_state: check the optimizers' state too, with the same device read, because a save keeps it. Of
        buffers that are not finite a save only warns: the weights are good.
        """
        if not self.stops:
            return
        if with_state and self.buffers is not None:
            self.buffers.check()
        bad = LOSS if self.broken or not self._is_finite() else find_nonfinite(self.optimizers, with_state)
        if self.ranks is not None:
            # one rank's loss may have reached the weights of all ranks; then report the loss, the first cause
            flags = [number for each in SUBJECTS for number in (bad == each, (bad == each) * self.ranks.rank)]
            answers = iter(self.ranks.total(flags).read())
            for kind, (count, rank) in zip(SUBJECTS, zip(answers, answers, strict=True), strict=True):
                if count:
                    self.broken = True
                    where = f"rank {rank}" if count == 1 else f"{count} ranks"
                    raise NonFiniteLoss(
                        f"{SUBJECTS[kind]} not finite on {where}. The run stops, and nothing made from it is "
                        f"saved."
                    )
        elif self.broken:
            raise NonFiniteLoss(
                "The loss or the weights were not finite, so nothing of this run is saved any more."
            )
        elif bad == LOSS:
            self._fail(float(self.previous))
        elif bad:
            self.broken = True
            raise NonFiniteLoss(
                f"{describe_nonfinite(bad, self.optimizers)} The run stops, and nothing made from it is "
                f"saved."
            )

    def _is_finite(self) -> bool:
        on_meta = isinstance(self.previous, Tensor) and self.previous.device.type == "meta"
        return self.previous is None or on_meta or math.isfinite(self.previous)

    def _fail(self, value: float, where: str = "") -> None:
        """Raise, or warn once. where: how much earlier it was than the position that the run names."""
        if not self.stops:
            log.warning(
                "The loss became %s%s. The run continues; Trainer(nonfinite='stop') ends it.", value, where
            )
            self.look = self._remember
            return
        self.broken = True
        if self.ranks is not None:
            return  # all ranks raise together at the end of this window
        weights = "" if find_nonfinite(self.optimizers, with_state=False) != PARAMETERS else BROKEN_WEIGHTS
        raise NonFiniteLoss(
            f"The loss became {value}{where}.{weights} The run stops, and nothing made from it is saved. The "
            "hook NaNGuard() stops at the batch itself and names it; NaNGuard(check='activations') also "
            "names the module. Trainer(nonfinite='skip') skips such updates instead."
        )
