"""Hears a model being called, for hosts whose callbacks are not told of batches and losses."""

from __future__ import annotations

import logging
import math
from typing import Any, Protocol

from torch import Tensor

from hookline.engine.plan import noop
from hookline.interop.hosted.run import HostedRun
from hookline.util.errors import HookError


class ForwardListener(Protocol):
    """Whoever wants to know of it."""

    def forward_begins(self, batch: Any) -> None:
        """The model is called, in training mode."""
        ...

    def forward_ends(self, outputs: Any) -> Any:
        """It has returned; other outputs may be returned in their place."""
        ...

    def evaluation_begins(self, batch: Any) -> None:
        """The model is called, in eval mode."""
        ...

    def evaluation_ends(self, outputs: Any) -> None:
        """It has returned."""
        ...

    def weights_are_read(self) -> None:
        """Somebody takes the model's state, to save it."""
        ...


class ForwardObserver:
    """On the model from `listen` to `release`. A copy of the model is deaf: it is not what is trained."""

    def __init__(self, listener: ForwardListener | None = None) -> None:
        self.listener = listener
        self._handles: list[Any] = []

    def listen(self, module: Any) -> None:
        """Hear this model."""
        self._handles = [
            module.register_forward_pre_hook(self.called, with_kwargs=True),
            module.register_forward_hook(self.returned, with_kwargs=True),
            module.register_state_dict_pre_hook(self.read),
        ]

    def release(self) -> None:
        """Leave the model as it was found."""
        handles, self._handles = self._handles, []
        for each in handles:
            each.remove()

    def __deepcopy__(self, memo: Any) -> ForwardObserver:
        return ForwardObserver()

    def __reduce__(self) -> Any:
        return ForwardObserver, ()

    def called(self, module: Any, args: Any, kwargs: Any) -> None:
        """Before the forward."""
        if self.listener is not None:
            begins = self.listener.forward_begins if module.training else self.listener.evaluation_begins
            begins(kwargs or args)

    def read(self, *given: Any) -> None:
        """Before its state is taken."""
        if self.listener is not None:
            self.listener.weights_are_read()

    def returned(self, module: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        """After it."""
        if self.listener is None:
            return None
        return (
            self.listener.forward_ends(outputs) if module.training else self.listener.evaluation_ends(outputs)
        )


def loss_in(outputs: Any) -> Tensor | None:
    """The loss among a model's outputs."""
    if isinstance(outputs, dict):
        found = outputs.get("loss")
    else:
        found = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """The same outputs with another loss."""
    if isinstance(outputs, dict):
        outputs["loss"] = loss
        return outputs
    return type(outputs)([loss, *outputs[1:]]) if isinstance(outputs, tuple | list) else loss


# ---- Whether the loss that hooks are told is the one that transformers trains on


log = logging.getLogger("hookline")


class ObservedLoss:
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
