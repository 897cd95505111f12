"""The hooks and trainers of `trainers` (`get_trainer("simple", ...)`) on Hookline's loop: change the import
line.

Their objects in our loop: `hooks` has the hook classes and the state dictionary that they receive, `trainer`
has the trainer classes, which run a `hookline.Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.engine.checks import refused
from hookline.interop.trainers.hooks import (
    CheckpointHook,
    ConsoleLogHook,
    HookManager,
    JSONLogHook,
    TrainingHook,
)
from hookline.interop.trainers.trainer import AccelerateTrainer, BaseTrainer, SimpleTrainer
from hookline.util.errors import OptionError, closest

__all__ = [
    "AccelerateTrainer",
    "BaseTrainer",
    "CheckpointHook",
    "ConsoleLogHook",
    "HookManager",
    "JSONLogHook",
    "SimpleTrainer",
    "TrainingHook",
    "get_trainer",
    "register_trainer",
]

BUILTIN: dict[str, Callable[..., Any]] = {"simple": SimpleTrainer, "accelerate": AccelerateTrainer}
_registered: dict[str, Callable[..., Any]] = {}


def get_trainer(
    name: str, model: Any, dataloader: Any, optimizer: Any, device: Any = "auto", **options: Any
) -> Any:
    """Return a trainer by name.

    name: 'simple', 'accelerate', or one of `register_trainer`. model, dataloader, optimizer, device, options:
    as of `BaseTrainer`.
    """
    known = {**_registered, **BUILTIN}
    if name not in known:
        raise OptionError(
            f"There is no trainer called {name!r}.{closest(str(name), known)} There are: {', '.join(known)}."
        )
    return known[name](model, dataloader, optimizer, device, **options)


def register_trainer(name: str, trainer: Callable[..., Any]) -> None:
    """Let `get_trainer` make this class.

    name: the name. trainer: the class, called with model, dataloader, optimizer, device and the options.
    """
    if not isinstance(name, str) or not name:
        raise refused("register_trainer(name, trainer): name", name, "text")
    if name in BUILTIN:
        raise OptionError(
            f"register_trainer: {name!r} is Hookline's own ({', '.join(BUILTIN)}); choose another name."
        )
    if not callable(trainer):
        raise OptionError(
            f"register_trainer({name!r}, ...) takes a class, such as one of BaseTrainer, not {trainer!r}."
        )
    _registered[name] = trainer
