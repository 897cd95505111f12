"""Whether the loss that hooks are told is the one that transformers trains on: a compute_loss of its Trainer
may make another.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from hookline.errors import HookError
from hookline.hosts.hosted_run import HostedRun
from hookline.plan import noop

log = logging.getLogger("hookline")


class ToldLoss:
    """The losses of one run, as the model returned them."""

    def __init__(self, line: HostedRun) -> None:
        self.line = line
        self.is_awaited = False
        """Whether this batch's was told, and is not differentiated yet."""
        self.is_elsewhere = False
        """Whether something else is differentiated than what the model returns."""
        self._is_compared = False
        self._sum: Any = 0.0
        """Of what was told in so many steps, until transformers first logs its own."""
        self._steps = 0

    def is_asked_for(self) -> bool:
        """Whether a hook would be told something wrong."""
        plan = self.line.plan
        return plan.on_before_backward is not noop or bool(plan.wanted & {"loss", "grad_norm"})

    def refuse(self, why: str) -> None:
        """Callbacks cannot see it: an error, if there is a hook that asks for it."""
        if self.is_asked_for():
            raise HookError(f"A hook asks for the loss, but {type(self.line.module).__name__} {why}.")

    def end_batch(self) -> None:
        """By now it must have been differentiated."""
        if self.is_awaited:
            self.is_awaited, self.is_elsewhere = False, True
            self.refuse(
                "returned one that was not differentiated (a compute_loss of the Trainer's own makes another)"
            )
            self.line.batch.forget_loss()

    def end_step(self) -> None:
        """An update is made."""
        if not self._is_compared and (loss := self.line.state.mean_of_window()) is not None:
            self._sum, self._steps = self._sum + loss, self._steps + 1

    def compare(self, loss: float) -> None:
        """With what transformers logs, once: it has just waited for the device itself."""
        if self._is_compared:
            return
        self._is_compared = True
        if not self._steps or self.line.state.world_size > 1 or not self.is_asked_for():
            return  # what transformers logs is the mean over all ranks
        mean = float(self._sum) / self._steps
        if math.isfinite(mean) and abs(mean - loss) > 0.01 * max(abs(mean), abs(loss)) + 0.001:
            log.warning(
                "Hooks are told a loss of %.4g, but transformers trains on %.4g: a compute_loss of the "
                "Trainer's own makes more of the model's loss than callbacks can see.",
                mean,
                loss,
            )
