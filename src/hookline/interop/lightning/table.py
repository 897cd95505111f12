"""Lightning's hooks as rows: the event of Hookline that each one is, and its arguments in Lightning's
order.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.interop.adapter import FactConverter, Row
from hookline.interop.lightning.binder import entries_of
from hookline.util.errors import HookError

_BATCH = ("batch", "batch_idx", "dataloader_idx")


def train_outputs(returned: Any) -> Any:
    """Return the result of a training step as Lightning passes it on: always a dictionary with the loss."""
    if isinstance(returned, Tensor):
        return {"loss": returned}
    if isinstance(returned, Mapping) and COMPUTED in returned:
        return returned[COMPUTED]
    return {} if returned is None else returned


COMPUTED = "only computed"
"""The key of the outputs in what a step returns that is not trained on."""


def without_loss(returned: Any) -> dict[str, Any]:
    """Return a result that the loop does not train on, and that hooks see as this one."""
    return {"loss": None, COMPUTED: train_outputs(returned)}


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
"""Lightning's hooks with their arguments after the trainer and the module. Their names are those of
Hookline's events.
"""

_READS: dict[str, dict[str, FactConverter]] = {
    "on_train_batch_end": {"outputs": train_outputs},
    "on_save_checkpoint": {"checkpoint": entries_of},
    "on_load_checkpoint": {"checkpoint": entries_of},
}

_SEVERAL = ("dataloader_idx",)

CALLBACK_ROWS: Mapping[str, Row] = {
    method: Row(method, ("trainer", "module", *arguments), _READS.get(method, {}), if_several=_SEVERAL)
    for method, arguments in ARGUMENTS.items()
}
"""Hooks of a callback."""

_OF_THE_MODULE = {"on_load_checkpoint": "module_load_checkpoint"}
_TRANSFER = {
    "on_before_batch_transfer": ("batch", "dataloader_idx"),
    "on_after_batch_transfer": ("batch", "dataloader_idx"),
}

MODULE_ROWS: Mapping[str, Row] = {
    method: Row(
        _OF_THE_MODULE.get(method, method),
        arguments,
        _READS.get(method, {}),
        if_several=() if method in _TRANSFER else _SEVERAL,
    )
    for method, arguments in {**ARGUMENTS, "prepare_data": (), **_TRANSFER}.items()
    if method != "on_exception"
}
"""Hooks of a module."""

ROWS_OF_2019: Mapping[str, Row] = {
    "on_epoch_start": Row("on_train_epoch_start", ()),
    "on_batch_start": Row("on_train_batch_start", ("batch",)),
    "on_batch_end": Row("on_train_batch_end", ()),
    "on_tng_metrics": Row("on_train_metrics", ("metrics",)),
    "on_pre_performance_check": Row("on_validation_start", ()),
    "on_post_performance_check": Row("on_validation_end", ()),
    "on_epoch_end": Row("on_train_epoch_end", ()),
}
"""Hooks of a module in the first Lightning, which today's Lightning does not call."""

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
"""Steps and operations with the same name in both."""

MAPPING: dict[str, str] = {
    "configure_hooks": "configure_callbacks",
    **{row.event: method for method, row in MODULE_ROWS.items()},
    **{row.event: method for method, row in CALLBACK_ROWS.items()},
    **{action: action for action in MODULE_ACTIONS},
    "strategy_setup": "Strategy.setup",
    "strategy_teardown": "Strategy.teardown",
}
"""Events of Hookline, and Lightning's names; an event that is not here is Hookline's own."""


# ---- Hooks and arguments of Lightning 1


RENAMED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
"""Hooks of Lightning 1 that got the outputs of all batches, and their replacements."""
REMOVED_ARGUMENTS = {
    "optimizer_idx": "there is one training_step for all optimizers. Take batch, batch_idx, set "
    "automatic_optimization = False "
    "and step each of self.optimizers() yourself",
    "hiddens": "batches are not split in time. Take batch, batch_idx, and keep state for the next "
    "batch on the module",
}
"""Arguments of a `training_step` of Lightning 1, and the alternatives."""


class RemovedInLightning2(HookError, NotImplementedError):
    """A module has a hook, or a step has an argument, that Lightning 2 does not have any more."""


def refuse_lightning_1(module: Any) -> None:
    """Reject hooks and arguments of Lightning 1, which would not be called or get other values."""
    who = type(module).__name__
    for method, instead in RENAMED.items():
        if hasattr(module, method):
            raise RemovedInLightning2(
                f"{who}.{method}: the hook `{method}` has been removed in v2.0 of Lightning and would not be "
                f"called. Collect the outputs of the steps in a list on the module, and use it in {instead}."
            )
    step = module.training_step
    for argument in () if step is None else inspect.signature(step).parameters:
        if argument in REMOVED_ARGUMENTS:
            raise RemovedInLightning2(
                f"{who}.training_step takes {argument}, an argument of Lightning 1: "
                f"{REMOVED_ARGUMENTS[argument]}. Remove the `{argument}` argument from `training_step`."
            )
