"""Hookline: train PyTorch models with every moment of the training open to hooks.

Names are loaded when they are used, so that `import hookline` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Trainer": "trainer", "Module": "module", "DataModule": "module", "Hook": "hook", "on": "hook",
    "every": "filters", "once": "filters", "after": "filters", "before": "filters", "when": "filters",
    "no_event": "listener", "StopTraining": "errors", "SKIP_BATCH": "errors", "SKIP_STEP": "errors",
    "STEP_DONE": "errors", "END_EPOCH": "errors", "HooklineError": "errors", "HookError": "errors",
    "OptionError": "errors", "LossError": "errors", "NonFiniteLoss": "errors", "CheckpointError": "errors",
    "StepContext": "context", "Metrics": "metrics", "State": "state", "Strategy": "strategies.base",
    "Recorder": "trace", "seed_everything": "seeding", "Logger": "loggers.base", "JSONLines": "loggers.jsonl",
    "EVENTS": "events",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hookline.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
