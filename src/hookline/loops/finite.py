"""Notices a loss that is NaN or infinite, one step late, without making the device wait."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookline.errors import NonFiniteLoss
from hookline.ranks import Ranks


class FiniteWatch:
    """Looks at the loss of the step before, when reading it costs nothing any more."""

    def __init__(self, device: torch.device, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        """Those who must hear of it before anybody may raise; None: nobody else is there, or comes along any more."""
        self.previous: Any = None
        self.broken = False
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

    def settle(self) -> None:
        """Look now, before something is built on these weights: a save, or the end of the run."""
        if self.ranks is not None:
            is_bad = self.broken or not self._is_finite()
            bad, guilty = self.ranks.total([is_bad, is_bad * self.ranks.rank]).read()
            if bad:
                self.broken = True
                raise NonFiniteLoss(f"The loss was not finite on {f'rank {guilty}' if bad == 1 else f'{bad} ranks'}. "
                                    "The run stops, and nothing made from it is saved.")  # fmt: skip
        elif self.broken:
            raise NonFiniteLoss("The loss was not finite, so nothing made from this run is saved any more.")
        elif not self._is_finite():
            self._complain(float(self.previous))

    def _is_finite(self) -> bool:
        on_meta = isinstance(self.previous, Tensor) and self.previous.device.type == "meta"
        return self.previous is None or on_meta or math.isfinite(self.previous)

    def _complain(self, value: float) -> None:
        self.broken = True
        if self.ranks is not None:
            return  # all raise together, when this window's update is settled
        raise NonFiniteLoss(f"The loss became {value}. The run stops, and nothing made from it is saved. "
                            "Trainer(nonfinite='skip') leaves such updates out instead.")  # fmt: skip
