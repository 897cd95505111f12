"""Lightning's hooks as rows: which event of Hookline each one is, and its arguments in Lightning's order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.dialects._shared import Row

_BATCH = ("batch", "batch_idx", "dataloader_idx")


def train_outputs(returned: Any) -> Any:
    """What a training step returned, as Lightning hands it on: always a dictionary, the loss in it."""
    if isinstance(returned, Tensor):
        return {"loss": returned}
    return {} if returned is None else returned


def _evaluation(kind: str) -> dict[str, tuple[str, ...]]:
    return {
        f"on_{kind}_start": (),
        f"on_{kind}_epoch_start": (),
        f"on_{kind}_batch_start": _BATCH,
        f"on_{kind}_batch_end": ("outputs", *_BATCH),
        f"on_{kind}_epoch_end": (),
        f"on_{kind}_end": (),
    }


ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "setup": ("stage",),
    "on_fit_start": (),
    "on_sanity_check_start": (),
    "on_sanity_check_end": (),
    "on_train_start": (),
    "on_train_epoch_start": (),
    "on_train_batch_start": ("batch", "batch_idx"),
    "on_before_zero_grad": ("optimizer",),
    "on_before_backward": ("loss",),
    "on_after_backward": (),
    "on_before_optimizer_step": ("optimizer",),
    "on_train_batch_end": ("outputs", "batch", "batch_idx"),
    **_evaluation("validation"),
    "on_save_checkpoint": ("checkpoint",),
    "on_load_checkpoint": ("checkpoint",),
    "on_train_epoch_end": (),
    "on_train_end": (),
    **_evaluation("test"),
    **_evaluation("predict"),
    "on_exception": ("exception",),
    "on_fit_end": (),
    "teardown": ("stage",),
}
"""Lightning's hooks with what they are given besides the trainer and the module. Their names are those of
Hookline's events.
"""

_READS = {"on_train_batch_end": {"outputs": train_outputs}}

CALLBACK_ROWS: Mapping[str, Row] = {
    method: Row(method, ("trainer", "module", *arguments), _READS.get(method, {}))
    for method, arguments in ARGUMENTS.items()
}
"""Hooks of a callback."""

_OF_THE_MODULE = {"on_load_checkpoint": "module_load_checkpoint"}
_TRANSFER = {
    "on_before_batch_transfer": ("batch", "dataloader_idx"),
    "on_after_batch_transfer": ("batch", "dataloader_idx"),
}

MODULE_ROWS: Mapping[str, Row] = {
    method: Row(_OF_THE_MODULE.get(method, method), arguments, _READS.get(method, {}))
    for method, arguments in {**ARGUMENTS, "prepare_data": (), **_TRANSFER}.items()
    if method != "on_exception"
}
"""Hooks of a module."""

DATA_ROWS: Mapping[str, Row] = {
    method: Row(method, arguments)
    for method, arguments in {
        "prepare_data": (),
        "setup": ("stage",),
        "teardown": ("stage",),
        "on_exception": ("exception",),
        **_TRANSFER,
    }.items()
}
"""Hooks of a data module."""

DATA_ACTIONS = (
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "transfer_batch_to_device",
)
_MODES = tuple(
    f"on_{kind}_model_{mode}" for kind in ("validation", "test", "predict") for mode in ("eval", "train")
)
MODULE_ACTIONS = (
    "configure_model",
    "configure_optimizers",
    *DATA_ACTIONS,
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    *_MODES,
)
"""Steps and operations that both call the same."""

MAPPING: dict[str, str] = {
    "configure_hooks": "configure_callbacks",
    **{row.event: method for method, row in MODULE_ROWS.items()},
    **{row.event: method for method, row in CALLBACK_ROWS.items()},
    **{action: action for action in MODULE_ACTIONS},
    "strategy_setup": "Strategy.setup",
    "strategy_teardown": "Strategy.teardown",
}
"""Events of Hookline, and what Lightning calls them; an event that is not here is Hookline's own."""
