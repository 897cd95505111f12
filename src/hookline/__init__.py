"""Hookline: train PyTorch models with every moment of the training open to hooks.

Names are loaded when they are used, so that `import hookline` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hookline import registry
from hookline._version import __version__ as __version__

if TYPE_CHECKING:
    from hookline.checkpoint.importing import import_checkpoint
    from hookline.checkpoint.loading import load_module
    from hookline.checkpoint.weights import load_weights
    from hookline.context import StepContext
    from hookline.data.mixing import Mixture
    from hookline.errors import (
        END_EPOCH,
        SKIP_BATCH,
        SKIP_STEP,
        STEP_DONE,
        CheckpointError,
        HangError,
        HookError,
        HooklineError,
        LossError,
        NonFiniteLoss,
        OptionError,
        PeerError,
        Preempted,
        RunLockedError,
        Signal,
        StopTraining,
    )
    from hookline.events import EVENTS, declare_event
    from hookline.explain import explain
    from hookline.filters import after, before, every, once, when
    from hookline.hook import Hook, on
    from hookline.line import Line
    from hookline.listener import no_event
    from hookline.loggers.base import Logger
    from hookline.loggers.jsonl import JSONLines
    from hookline.metrics import Metrics
    from hookline.module import DataModule, Module
    from hookline.seeding import seed_everything
    from hookline.state import State
    from hookline.strategies.accelerated import Accelerated
    from hookline.strategies.base import Strategy
    from hookline.strategies.ddp import DDP
    from hookline.strategies.fsdp import FSDP
    from hookline.strategies.single import SingleDevice
    from hookline.trace import Recorder
    from hookline.trainer import Trainer

__all__ = [
    "DDP",
    "END_EPOCH",
    "EVENTS",
    "FSDP",
    "SKIP_BATCH",
    "SKIP_STEP",
    "STEP_DONE",
    "Accelerated",
    "CheckpointError",
    "DataModule",
    "HangError",
    "Hook",
    "HookError",
    "HooklineError",
    "JSONLines",
    "Line",
    "Logger",
    "LossError",
    "Metrics",
    "Mixture",
    "Module",
    "NonFiniteLoss",
    "OptionError",
    "PeerError",
    "Preempted",
    "Recorder",
    "RunLockedError",
    "Signal",
    "SingleDevice",
    "State",
    "StepContext",
    "StopTraining",
    "Strategy",
    "Trainer",
    "after",
    "before",
    "declare_event",
    "every",
    "explain",
    "import_checkpoint",
    "load_module",
    "load_weights",
    "no_event",
    "on",
    "once",
    "seed_everything",
    "when",
]

_load, __dir__ = registry.lazy_names(
    __name__,
    {
        "Trainer": "trainer",
        "Line": "line",
        "Module": "module",
        "DataModule": "module",
        "Hook": "hook",
        "on": "hook",
        "every": "filters",
        "once": "filters",
        "after": "filters",
        "before": "filters",
        "when": "filters",
        "no_event": "listener",
        "StopTraining": "errors",
        "Preempted": "errors",
        "HangError": "errors",
        "PeerError": "errors",
        "RunLockedError": "errors",
        "SKIP_BATCH": "errors",
        "SKIP_STEP": "errors",
        "Signal": "errors",
        "Mixture": "data.mixing",
        "STEP_DONE": "errors",
        "END_EPOCH": "errors",
        "HooklineError": "errors",
        "HookError": "errors",
        "OptionError": "errors",
        "LossError": "errors",
        "NonFiniteLoss": "errors",
        "CheckpointError": "errors",
        "StepContext": "context",
        "Metrics": "metrics",
        "State": "state",
        "Strategy": "strategies.base",
        "DDP": "strategies.ddp",
        "FSDP": "strategies.fsdp",
        "Accelerated": "strategies.accelerated",
        "SingleDevice": "strategies.single",
        "Recorder": "trace",
        "seed_everything": "seeding",
        "Logger": "loggers.base",
        "JSONLines": "loggers.jsonl",
        "EVENTS": "events",
        "declare_event": "events",
        "import_checkpoint": "checkpoint.importing",
        "load_module": "checkpoint.loading",
        "load_weights": "checkpoint.weights",
    },
)


def __getattr__(name: str) -> Any:
    if name in (
        "explain",
        "hooks",
        "hosts",
    ):  # modules; that of `explain` can be called: `hookline.explain(trainer)`
        return importlib.import_module(f"hookline.{name}")
    return _load(name)
