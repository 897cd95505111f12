"""Hears a model being called, for hosts whose callbacks are not told of batches and losses."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Hearer(Protocol):
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


class Ears:
    """On the model from `listen` to `let_go`. A copy of the model is deaf: it is not what is trained."""

    def __init__(self, hearer: Hearer | None = None) -> None:
        self.hearer = hearer
        self._handles: list[Any] = []

    def listen(self, module: Any) -> None:
        """Hear this model."""
        self._handles = [
            module.register_forward_pre_hook(self.called, with_kwargs=True),
            module.register_forward_hook(self.returned, with_kwargs=True),
            module.register_state_dict_pre_hook(self.read),
        ]

    def let_go(self) -> None:
        """Leave the model as it was found."""
        handles, self._handles = self._handles, []
        for each in handles:
            each.remove()

    def __deepcopy__(self, memo: Any) -> Ears:
        return Ears()

    def __reduce__(self) -> Any:
        return Ears, ()

    def called(self, module: Any, args: Any, kwargs: Any) -> None:
        """Before the forward."""
        if self.hearer is not None:
            begins = self.hearer.forward_begins if module.training else self.hearer.evaluation_begins
            begins(kwargs or args)

    def read(self, *given: Any) -> None:
        """Before its state is taken."""
        if self.hearer is not None:
            self.hearer.weights_are_read()

    def returned(self, module: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        """After it."""
        if self.hearer is None:
            return None
        return self.hearer.forward_ends(outputs) if module.training else self.hearer.evaluation_ends(outputs)


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
