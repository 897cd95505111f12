"""The backward pass: the loss of a step, its events, and the factors that scale it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.engine.plan import noop
from hookline.run.module import name_of_step
from hookline.run.run import Run
from hookline.run.state import State, is_scalar, loss_in
from hookline.training.batch_events import BackwardEvents
from hookline.util.errors import LossError

Factor = Callable[[Tensor], Tensor]


class Backward(BackwardEvents):
    """Differentiate a loss and emit the events around it."""

    __slots__ = ("_detach", "_factors", "_restore")

    def __init__(
        self, run: Run, factors: tuple[Factor, ...] = (), restore: tuple[Callable[[], None], ...] = ()
    ) -> None:
        """Take the factors, applied to the loss in this order. restore: called after the backward pass."""
        super().__init__(run)
        self._factors = factors
        self._restore = restore
        # on the CPU a number costs less than a detached tensor, and 256 tensors that wait to be averaged
        # fragment the heap
        self._detach: Callable[[Tensor], Any] = Tensor.item if run.traits.on_cpu else Tensor.detach

    def __call__(self, loss: Tensor) -> Any:
        """Return the user's loss, not divided or scaled: a number on the CPU, else a detached tensor."""
        plan, s = self.plan, self.state
        if plan.on_before_backward is not noop:
            loss = self.before(loss)
        scaled = loss
        for factor in self._factors:
            scaled = factor(scaled)
        s.current.scaled_loss = scaled
        try:
            plan.backward(s)
        except RuntimeError as error:
            if loss.numel() != 1:
                raise LossError(
                    f"The loss must be one number, but has the shape {tuple(loss.shape)}; return its mean."
                ) from error
            raise
        s.current.scaled_loss = None  # frees the graph
        for restore in self._restore:
            restore()
        s.current.last_loss = value = self._detach(loss)
        if plan.on_after_backward is not noop:
            self.after()
        return value

    def release(self) -> None:
        """Free the graph of a backward pass that failed."""
        self.state.current.scaled_loss = None
        super().release()


def loss_of(run: Run, returned: Any) -> Tensor | None:
    """Return the loss that a training step returned; log the other numbers of a dictionary."""
    if returned is None:
        return None
    if isinstance(returned, dict):
        if "loss" not in returned:
            raise LossError(
                f"{name_of_step(run.steps)} returned a dictionary without 'loss' (keys: "
                f"{', '.join(map(str, returned))}): the 'loss' key needs to be present."
            )
        log_numbers(run, returned)
    loss = loss_in(returned)
    if isinstance(loss, Tensor) or (loss is None and isinstance(returned, dict)):
        return loss
    wrong = returned if loss is None else loss
    raise LossError(
        f"{name_of_step(run.steps)} returned {type(wrong).__name__} {str(wrong)[:60]!r}: it must return a "
        "Tensor, a dict, or None: the loss, a dictionary or an object with 'loss', or nothing to skip the "
        "batch."
    )


def log_numbers(run: Run, returned: dict[str, Any]) -> None:
    """Log the numbers beside the loss as means over the epoch."""
    for key, value in returned.items():
        if key != "loss" and is_scalar(value):
            run.state.log.mean("train/" + key, value)


def cannot_train_on(s: State) -> str:
    """Return the error message for a loss without a graph."""
    advice = ""
    if not torch.is_grad_enabled():
        why = "gradients are switched off (torch.no_grad)"
    elif not any(each.requires_grad for each in s.module.parameters()):
        why = f"no parameter of {type(s.module).__name__} requires a gradient"
    else:
        why = "it was detached, does not depend on a parameter, or was computed under torch.no_grad"
        advice = (
            " Return a tensor computed from the model's parameters, without .item(), .detach() or float()."
        )
    return (
        f"The loss of batch {s.current.batch_idx} cannot be differentiated: {why}. Training would silently "
        f"change nothing.{advice}"
    )
