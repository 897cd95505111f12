"""The callbacks of a Lightning trainer: the given ones, those that Lightning adds, and their order."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from typing import Any

from hookline.engine.registry import hook_class
from hookline.interop.lightning.arguments import as_list
from hookline.interop.lightning.package import find, is_a, refusal
from hookline.util.errors import HookError

log = logging.getLogger("hookline")
FIRST = ("BatchSizeFinder", "LearningRateFinder")
"""Classes of callbacks that Lightning calls before all others."""


def saves(callback: Any) -> bool:
    """Return whether it is a checkpoint callback."""
    return is_a(callback, "Checkpoint", "ModelCheckpoint")


def complete(given: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks of a trainer: the given ones, and those that its arguments request."""
    callbacks = as_list(given["callbacks"])
    _add_checkpoint(callbacks, given["enable_checkpointing"])
    if given["max_time"] is not None:
        _add_timer(callbacks, given["max_time"])
    _add_progress_bar(callbacks, given["enable_progress_bar"])
    if given["enable_model_summary"] and not any(is_a(each, "ModelSummary") for each in callbacks):
        callbacks += _made("ModelSummary", "RichModelSummary")
    if (external := find("trainer.connectors.callback_connector", "_load_external_callbacks")) is not None:
        callbacks += external("lightning.pytorch.callbacks_factory")  # those of installed packages
    refuse_shared_keys(callbacks, find("callbacks", "Callback"))
    return ordered(callbacks)


def ordered(callbacks: list[Any]) -> list[Any]:
    """Return the callbacks in Lightning's order: tuners first, checkpoint callbacks last."""
    first = [each for each in callbacks if is_a(each, *FIRST)]
    last = [each for each in callbacks if saves(each)]
    others = [each for each in callbacks if not is_a(each, *FIRST) and not saves(each)]
    return [*first, *others, *last]


def replaced_by(callbacks: list[Any], present: list[Any]) -> set[type]:
    """Return the classes of present callbacks that a module's callbacks replace, because they derive from
    them. A plain `Callback` replaces nothing.
    """
    kinds = [type(each) for each in present if type(each).__name__ != "Callback"]
    return {kind for kind in kinds if any(issubclass(type(each), kind) for each in callbacks)}


def _made(plain: str, rich: str = "", **arguments: Any) -> list[Any]:
    """Return a callback of the imported package, its variant for terminals if `rich` is installed."""
    name = rich if rich and find("utilities.imports", "_RICH_AVAILABLE") else plain
    made = find("callbacks", name)
    return [] if made is None else [made(**arguments)]


def _add_checkpoint(callbacks: list[Any], is_enabled: bool | None) -> None:
    saving = [each for each in callbacks if saves(each)]
    if is_enabled is False and saving:
        raise refusal(
            f"`enable_checkpointing=False` but found `{type(saving[0]).__name__}` in callbacks=: leave one "
            "of them out.",
            "enable_checkpointing",
            False,
        )
    if is_enabled and not saving:
        callbacks += _made("ModelCheckpoint") or [hook_class("model_checkpoint")()]


def _add_timer(callbacks: list[Any], max_time: Any) -> None:
    """Add the callback that stops after `max_time`; without the package Hookline's own option does."""
    if any(is_a(each, "Timer") for each in callbacks):
        log.info("max_time has no effect, because the callbacks list already contains a Timer.")
    else:
        callbacks += _made("Timer", duration=max_time, interval="step")


def native_max_time(max_time: Any) -> Any:
    """Return `max_time` for Hookline's trainer; None if a Timer of the package watches it."""
    if find("callbacks", "Timer") is not None:
        return None
    return datetime.timedelta(**max_time) if isinstance(max_time, dict) else max_time


def _add_progress_bar(callbacks: list[Any], is_enabled: bool | None) -> None:
    bars = [each for each in callbacks if is_a(each, "ProgressBar")]
    if len(bars) > 1:
        raise refusal(
            f"You added multiple progress bar callbacks, {type(bars[0]).__name__} and "
            f"{type(bars[1]).__name__}: leave one of them out.",
            "callbacks",
            callbacks,
        )
    if bars and is_enabled is False:
        raise refusal(
            f"`enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks=: leave one of "
            "them out.",
            "enable_progress_bar",
            False,
        )
    if is_enabled and not bars:
        callbacks += _made("TQDMProgressBar", "RichProgressBar")


class SharedKey(HookError, RuntimeError):
    """Two callbacks would save their states under one key."""


def _is_stateless(callback: Any, base: Any) -> bool:
    return getattr(type(callback), "state_dict", base.state_dict) is base.state_dict


def refuse_shared_keys(callbacks: list[Any], base: Any) -> None:
    """Raise if two callbacks of one package would save their states under the same key.

    base: the package's Callback; None without the package.
    """
    keys: set[str] = set()
    for callback in callbacks:
        if base is None or not isinstance(callback, base) or _is_stateless(callback, base):
            continue
        if callback.state_key in keys:
            advice = (
                "Pass each another monitor, mode, every_n_train_steps, every_n_epochs or train_time_interval"
                if saves(callback)
                else "Give each its own `state_key`"
            )
            raise SharedKey(
                f"Found more than one stateful callback of type `{type(callback).__name__}` with "
                f"the state_key {callback.state_key!r}, under which only one state can be saved. {advice}."
            )
        keys.add(callback.state_key)
