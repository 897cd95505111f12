"""Hookline's hooks inside other trainers. `hookline.Line` is for loops that are written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.interop.accelerate import AcceleratedLine

__all__ = ["accelerate", "lightning", "transformers"]


def lightning(hooks: Iterable[Any], **options: Any) -> Any:
    """A Lightning callback that lets these hooks hear the run:
    `Trainer(callbacks=[hookline.hosts.lightning(hooks)])`.

    options: logger, run_dir, config, accounting, log_every_n_steps and on_save_error, as of `hookline.Line`.
    """
    from hookline.interop.lightning.host import make_callback

    return make_callback(hooks, options)


def transformers(hooks: Iterable[Any], **options: Any) -> Any:
    """A transformers.TrainerCallback that lets these hooks hear the run: pass it in
    `Trainer(callbacks=[...])`.

    transformers tells no callback of an exception: `with callback: trainer.train()` does, and tears the hooks
    down. options: logger, run_dir, config, accounting, count_tokens and on_save_error, as of `hookline.Line`.
    """
    from hookline.interop.transformers.host import make_callback

    return make_callback(hooks, options)


def accelerate(
    accelerator: Any, module: Any = None, optimizers: Any = (), *, hooks: Iterable[Any] = (), **options: Any
) -> AcceleratedLine:
    """A `Line` for a loop on Accelerate: `backward` and `clip_gradients` go through the accelerator, rows to
    its trackers.

    `model, optimizer, loader = line.prepare(model, optimizer, loader)` prepares and takes note; or pass what
    is prepared already.
    """
    from hookline.interop.accelerate import AcceleratedLine

    return AcceleratedLine(accelerator, module, optimizers, hooks=hooks, **options)
