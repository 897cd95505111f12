"""From a batch to its loss: what the model itself returns, or what the user's function or the targets say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from hookline.errors import OptionError

Loss = Callable[[Any, Any], Any]


class Measure:
    """The step of a plain model. A batch is a dictionary of the model's arguments, (inputs, targets), or its
    one input.
    """

    def __init__(self, loss: Loss | None) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """The batch's loss."""
        targets = None
        if isinstance(batch, Mapping):
            outputs = model(**batch)
            targets = batch.get("labels", batch.get("targets"))
        elif isinstance(batch, list | tuple) and len(batch) == 2:
            outputs, targets = model(batch[0]), batch[1]
        else:
            outputs = model(batch)
        if self.loss is not None:
            return self.loss(outputs, targets)
        own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        return own if isinstance(own, Tensor) and own.dim() == 0 else guessed(outputs, targets)


def guessed(outputs: Any, targets: Any) -> Tensor:
    """Cross entropy for whole numbers, the mean squared error for others, where the shapes leave no doubt."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        if not targets.is_floating_point() and outputs.shape[:-1] == targets.shape:
            return cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
        if targets.is_floating_point() and outputs.shape == targets.shape:
            return mse_loss(outputs, targets)
    raise OptionError(
        f"The model returns {_shape(outputs)} and no loss; with {_shape(targets)} as targets there is no "
        "telling which is meant. Return {'loss': ...} from the model, or pass "
        "loss=torch.nn.functional.cross_entropy (or another function of outputs and targets) to "
        "get_trainer."
    )


def _shape(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
    )
