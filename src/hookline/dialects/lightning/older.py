"""What Lightning 1 called and Lightning 2 refuses: code that still has it would train something else, so it
is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

from hookline.errors import HookError

RENAMED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
"""Hooks of Lightning 1 that got the outputs of all batches, and where their work goes now."""
GONE = {
    "optimizer_idx": "there is one training_step for all optimizers. Take batch, batch_idx, set "
    "automatic_optimization = False "
    "and step each of self.optimizers() yourself",
    "hiddens": "batches are not split in time. Take batch, batch_idx, and keep what goes on to the next "
    "batch on the module",
}
"""Arguments of a `training_step` of Lightning 1, and what there is instead."""


def refuse_lightning_1(module: Any) -> None:
    """An error for what nobody would call any more, or would fill with something else."""
    who = type(module).__name__
    for method, instead in RENAMED.items():
        if hasattr(module, method):
            raise HookError(
                f"{who}.{method} is a hook of Lightning 1, which nobody calls any more. Keep what you need "
                f"of the steps in a list on the module, and work on it in {instead}."
            )
    for argument in inspect.signature(module.training_step).parameters:
        if argument in GONE:
            raise HookError(
                f"{who}.training_step takes {argument}, an argument of Lightning 1: {GONE[argument]}."
            )
