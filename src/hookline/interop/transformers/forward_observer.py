"""Observes the calls of a model, for hosts whose callbacks receive neither batches nor losses."""

from __future__ import annotations

import logging
import math
from typing import Any, Protocol

from torch import Tensor

from hookline.engine.plan import noop
from hookline.interop.hosted.run import HostedRun
from hookline.util.errors import HookError


class ForwardListener(Protocol):
    """The methods that a `ForwardObserver` calls."""

    def forward_begins(self, batch: Any) -> None:
        """Handle a call of the model in training mode."""
        ...

    def forward_ends(self, outputs: Any) -> Any:
        """Handle its outputs; the return value, if not None, replaces them."""
        ...

    def evaluation_begins(self, batch: Any) -> None:
        """Handle a call of the model in eval mode."""
        ...

    def evaluation_ends(self, outputs: Any) -> None:
        """Handle its outputs."""
        ...

    def weights_are_read(self) -> None:
        """Handle a read of the model's state dict, which is about to be saved."""
        ...


class ForwardObserver:
    """Observes a model from `listen` to `release`. A copy of the model is not observed, because it is not
    trained.
    """

    def __init__(self, listener: ForwardListener | None = None) -> None:
        self.listener = listener
        self._handles: list[Any] = []

    def listen(self, module: Any) -> None:
        """Register hooks on the model."""
        self._handles = [
            module.register_forward_pre_hook(self.called, with_kwargs=True),
            module.register_forward_hook(self.returned, with_kwargs=True),
            module.register_state_dict_pre_hook(self.read),
        ]

    def release(self) -> None:
        """Remove the hooks from the model."""
        handles, self._handles = self._handles, []
        for each in handles:
            each.remove()

    def __deepcopy__(self, memo: Any) -> ForwardObserver:
        return ForwardObserver()

    def __reduce__(self) -> Any:
        return ForwardObserver, ()

    def called(self, module: Any, args: Any, kwargs: Any) -> None:
        """Report a call before the forward."""
        if self.listener is not None:
            begins = self.listener.forward_begins if module.training else self.listener.evaluation_begins
            begins(kwargs or args)

    def read(self, *given: Any) -> None:
        """Report a read of the state dict before it happens."""
        if self.listener is not None:
            self.listener.weights_are_read()

    def returned(self, module: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Report the outputs after the forward."""
        if self.listener is None:
            return None
        return (
            self.listener.forward_ends(outputs) if module.training else self.listener.evaluation_ends(outputs)
        )


def loss_in(outputs: Any) -> Tensor | None:
    """Return the loss among a model's outputs, or None."""
    if isinstance(outputs, dict):
        found = outputs.get("loss")
    else:
        found = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """Return the same outputs with another loss."""
    if isinstance(outputs, dict):
        outputs["loss"] = loss
        return outputs
    return type(outputs)([loss, *outputs[1:]]) if isinstance(outputs, tuple | list) else loss


# ---- Check that transformers trains on the loss that hooks see


log = logging.getLogger("hookline")


class ObservedLoss:
    """The losses of one run, as the model returned them."""

    def __init__(self, line: HostedRun) -> None:
        self.line = line
        self.awaits_backward = False
        """Whether hooks have received the loss of this batch, and it is not differentiated yet."""
        self.is_replaced = False
        """Whether transformers differentiates another value than the one that the model returns."""
        self._is_compared = False
        self._sum: Any = 0.0
        """The sum of the losses of `_steps` steps, until transformers first logs its own."""
        self._steps = 0

    def is_requested(self) -> bool:
        """Return whether a hook requests the loss or a value that depends on it."""
        plan = self.line.plan
        return plan.on_before_backward is not noop or bool(plan.wanted & {"loss", "grad_norm"})

    def refuse(self, why: str) -> None:
        """Raise an error if a hook requests the loss, which callbacks cannot see."""
        if self.is_requested():
            raise HookError(f"A hook requests the loss, but {type(self.line.module).__name__} {why}.")

    def end_batch(self) -> None:
        """Check that the loss of this batch was differentiated."""
        if self.awaits_backward:
            self.awaits_backward, self.is_replaced = False, True
            self.refuse(
                "returned one that was not differentiated (a custom compute_loss of the Trainer uses another)"
            )
            self.line.batch.forget_loss()

    def end_step(self) -> None:
        """Add the mean loss of an update."""
        if not self._is_compared and (loss := self.line.state.mean_of_window()) is not None:
            self._sum, self._steps = self._sum + loss, self._steps + 1

    def compare(self, loss: float) -> None:
        """Compare once with the loss that transformers logs, which has just synchronized the device
        itself.
        """
        if self._is_compared:
            return
        self._is_compared = True
        if not self._steps or self.line.state.world_size > 1 or not self.is_requested():
            return  # what transformers logs is the mean over all ranks
        mean = float(self._sum) / self._steps
        if math.isfinite(mean) and abs(mean - loss) > 0.01 * max(abs(mean), abs(loss)) + 0.001:
            log.warning(
                "Hooks see a loss of %.4g, but transformers trains on %.4g, because a custom compute_loss of "
                "the Trainer changes the loss that the model returns.",
                mean,
                loss,
            )
