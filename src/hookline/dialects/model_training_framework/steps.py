"""The step functions that a `GenericTrainer` is given, as the steps of a run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from hookline.errors import OptionError
from hookline.plan import noop
from hookline.steps import PlainSteps

FORM = "(trainer, batch, batch_idx, dataloader_idx, dataloader_name)"
StepFunction = Callable[[Any, Any, int, int, str], Any]


def check_step(what: str, function: Any) -> None:
    """A function that cannot be called with the five arguments is refused now, not at the first batch."""
    if not callable(function):
        raise OptionError(f"{what}() takes a function {FORM}, not {type(function).__name__}.")
    try:
        inspect.signature(function).bind(None, None, 0, 0, "")
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise OptionError(f"{what}({name}): it is called with {FORM}, which does not fit: {error}.") from None
    except ValueError:  # it does not tell
        return


class StepFunctions(PlainSteps):
    """Calls them with the trainer and where the batch comes from; fires the events around forward if somebody
    listens.
    """

    __hookline_base__: ClassVar[bool] = True

    def __init__(
        self,
        trainer: Any,
        net: nn.Module,
        train: StepFunction | None,
        validate: StepFunction | None,
        optimizers: Any,
    ) -> None:
        super().__init__(net, None, None, optimizers)
        self.trainer, self.train, self.validate = trainer, train, validate

    def training_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0, dataloader_name: str = ""
    ) -> Any:
        """What `set_training_step` was given."""
        return self._called(self.train, batch, batch_idx, dataloader_idx, dataloader_name)

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0, dataloader_name: str = ""
    ) -> Any:
        """What `set_validation_step` was given."""
        return self._called(self.validate, batch, batch_idx, dataloader_idx, dataloader_name)

    def _called(
        self, function: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str
    ) -> Any:
        trainer = self.trainer
        plan = trainer.plan
        if plan.on_before_forward is noop and plan.on_after_forward is noop:
            return function(trainer, batch, batch_idx, dataloader_idx, dataloader_name)
        trainer.emit("on_before_forward")
        began = time.perf_counter()
        returned = function(trainer, batch, batch_idx, dataloader_idx, dataloader_name)
        trainer.emit("on_after_forward", duration_ms=1e3 * (time.perf_counter() - began))
        return returned
