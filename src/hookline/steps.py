"""Plain PyTorch without a subclass: any `nn.Module` with a loss function or a step function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch.nn import functional

from hookline.errors import OptionError, closest, described
from hookline.module import Actions


class PlainSteps(Actions):
    """Gives a plain module the steps of a run. The module itself is never a listener."""

    __hookline_base__: ClassVar[bool] = True

    def __init__(
        self, net: nn.Module, loss: Callable[..., Any] | None, step: Callable[..., Any] | None, optimizer: Any
    ) -> None:
        if loss is not None and step is not None:
            raise OptionError(
                "Pass either loss= (called with outputs and targets) or step= (called with model and batch)."
            )
        _check_function("loss", loss, "outputs and targets")
        _check_function("step", step, "model and batch")
        self.net = net
        self.loss = loss
        """The loss of outputs and targets; a hook may put another one here."""
        self._optimizer = optimizer
        self._step = step
        self._wants_index = step is not None and _wants_index(step)

    def again(self, optimizer: Any) -> PlainSteps:
        """The same steps for another run, with another optimizer if one is given."""
        return PlainSteps(
            self.net, self.loss, self._step, self._optimizer if optimizer is None else optimizer
        )

    def _measure(self, batch: Any, batch_idx: int) -> Any:
        if self._step is not None:
            return (
                self._step(self.net, batch, batch_idx) if self._wants_index else self._step(self.net, batch)
            )
        if self.loss is None:
            raise self._lacking(
                "pass loss=torch.nn.functional.cross_entropy (or another function of outputs and targets), "
                "or step=lambda model, batch: ..., or derive it from hookline.Module."
            )
        inputs, targets = _pair(batch)
        return self.loss(self.net(inputs), targets)

    def _lacking(self, needed: str) -> OptionError:
        hidden = getattr(self.net, "_orig_mod", None)
        if hasattr(hidden, "training_step") and hasattr(hidden, "configure_optimizers"):
            who = type(hidden).__name__
            return OptionError(
                f"This {who} was wrapped by torch.compile, which hides training_step and "
                f"configure_optimizers: pass the {who} itself, and Trainer(compile=True)."
            )
        return OptionError(f"{type(self.net).__name__} is a plain nn.Module: {needed}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The step function, or the loss of the model's outputs."""
        return self._measure(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """The same, without training."""
        return self._measure(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """The same, without training."""
        return self._measure(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """What the model makes of the batch's input."""
        return self.net(batch[0] if isinstance(batch, list | tuple) else batch)

    def configure_optimizers(self) -> Any:
        """The optimizer passed to fit: one, several, or a function of the parameters."""
        if self._optimizer is None:
            raise self._lacking("pass optimizer=torch.optim.AdamW(model.parameters()) to fit.")
        if callable(self._optimizer) and not isinstance(self._optimizer, list | tuple | dict):
            return self._optimizer(self.net.parameters())
        return self._optimizer


def _check_function(name: str, given: Any, of: str) -> None:
    """A class would be made instead of called, and text cannot be called at all; both would be noticed in the
    first batch.
    """
    if inspect.isclass(given):
        raise OptionError(
            f"{name}={given.__name__} is a class; pass an object of it, {given.__name__}(), or a function "
            f"of {of}."
        )
    if given is not None and not callable(given):
        known = (
            [each for each in dir(functional) if each.endswith(("_loss", "_entropy", "_logits"))]
            if name == "loss"
            else []
        )
        near = closest(given, known) or closest(f"{given}_loss", known) if isinstance(given, str) else ""
        hint = near.replace("?", " of torch.nn.functional?")
        raise OptionError(f"{name}={described(given)} must be a function of {of}.{hint}")


def _wants_index(step: Callable[..., Any]) -> bool:
    """Whether a step function takes a third argument, the batch's number; a default of its
    own is left alone.
    """
    third = list(inspect.signature(step).parameters.values())[2:3]
    return any(each.name == "batch_idx" or each.default is each.empty for each in third)


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise OptionError(
        f"loss= needs batches of (inputs, targets), but the loader yields {type(batch).__name__}"
        f"{f' of length {len(batch)}' if isinstance(batch, list | tuple | dict) else ''}. "
        "Pass step=lambda model, batch: ... instead."
    )
