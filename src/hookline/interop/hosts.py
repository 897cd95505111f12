"""Hookline's hooks inside other trainers. `hookline.Line` is for loops that are written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.interop.accelerate import AcceleratedLine

__all__ = ["accelerate", "lightning", "transformers"]


def lightning(hooks: Iterable[Any], **options: Any) -> Any:
    """Return a Lightning callback that runs these hooks:
    `Trainer(callbacks=[hookline.hosts.lightning(hooks)])`.

    hooks: the hooks. options: logger, run_dir, config, accounting, log_every_n_steps and on_save_error, as of
    `hookline.Line`.
    """
    from hookline.interop.lightning.host import lightning_callback

    return lightning_callback(hooks, options)


def transformers(hooks: Iterable[Any], **options: Any) -> Any:
    """Return a transformers.TrainerCallback that runs these hooks: pass it in `Trainer(callbacks=[...])`.

    transformers does not report exceptions to callbacks. `with callback: trainer.train()` does, and tears the
    hooks down.

    hooks: the hooks. options: logger, run_dir, config, accounting, count_tokens and on_save_error, as of
    `hookline.Line`.
    """
    from hookline.interop.transformers.host import transformers_callback

    return transformers_callback(hooks, options)


def accelerate(
    accelerator: Any, module: Any = None, optimizers: Any = (), *, hooks: Iterable[Any] = (), **options: Any
) -> AcceleratedLine:
    """Return a `Line` for a loop on Accelerate: `backward` and `clip_gradients` go through the accelerator,
    rows to its trackers.

    `model, optimizer, loader = line.prepare(model, optimizer, loader)` prepares and attaches them; or pass
    prepared objects.

    accelerator: an `accelerate.Accelerator`. module, optimizers, hooks, options: as of `hookline.Line`.
    """
    from hookline.interop.accelerate import AcceleratedLine

    return AcceleratedLine(accelerator, module, optimizers, hooks=hooks, **options)
