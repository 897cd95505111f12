"""Hookline: train PyTorch models with every moment of the training open to hooks.

Names are loaded when they are used, so that `import hookline` costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hookline._moved import MovedFinder
from hookline._version import __version__ as __version__
from hookline.engine import registry

if TYPE_CHECKING:
    from hookline.checkpoint.export import export_checkpoint
    from hookline.checkpoint.foreign_files import import_checkpoint
    from hookline.checkpoint.weights import load_module, load_weights
    from hookline.data.mixing import Mixture
    from hookline.data.seeding import seed_everything
    from hookline.digests.diverge import diverge
    from hookline.digests.file import read_digests
    from hookline.distributed.accelerate import Accelerated
    from hookline.distributed.base import SingleDevice, Strategy
    from hookline.distributed.ddp import DDP
    from hookline.distributed.fsdp import FSDP
    from hookline.engine.changes import observer
    from hookline.engine.events import EVENTS, declare_event
    from hookline.engine.explain import explain
    from hookline.engine.filters import after, before, every, once, when
    from hookline.engine.hook import Hook, on
    from hookline.engine.listener import no_event
    from hookline.engine.recorder import Recorder
    from hookline.interop.loop import Line
    from hookline.loggers.base import Logger
    from hookline.loggers.jsonl import JSONLines
    from hookline.metrics.metric_log import Metrics
    from hookline.report.cell import Report
    from hookline.report.runs import list_runs
    from hookline.rewind.rerun import rewound
    from hookline.run.context import StepContext
    from hookline.run.module import DataModule, Module
    from hookline.run.parameter_groups import parameter_groups
    from hookline.run.predictions import read_predictions
    from hookline.run.state import State
    from hookline.training.trainer import Trainer
    from hookline.util.errors import (
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
        ObserverError,
        OptionError,
        PeerError,
        Preempted,
        RunLockedError,
        Signal,
        StopTraining,
    )

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
    "ObserverError",
    "OptionError",
    "PeerError",
    "Preempted",
    "Recorder",
    "Report",
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
    "diverge",
    "every",
    "explain",
    "export_checkpoint",
    "import_checkpoint",
    "list_runs",
    "load_module",
    "load_weights",
    "no_event",
    "observer",
    "on",
    "once",
    "parameter_groups",
    "read_digests",
    "read_predictions",
    "rewound",
    "seed_everything",
    "when",
]

if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedFinder())

MODULES = {"explain": "engine.explain", "hooks": "hooks", "hosts": "interop.hosts"}
"""Modules that can be used as attributes. That of `explain` can be called: `hookline.explain(trainer)`."""

_load, __dir__ = registry.lazy_names(
    __name__,
    {
        "Trainer": "training.trainer",
        "Line": "interop.loop",
        "Module": "run.module",
        "DataModule": "run.module",
        "Hook": "engine.hook",
        "on": "engine.hook",
        "observer": "engine.changes",
        "every": "engine.filters",
        "once": "engine.filters",
        "after": "engine.filters",
        "before": "engine.filters",
        "when": "engine.filters",
        "no_event": "engine.listener",
        "StopTraining": "util.errors",
        "Preempted": "util.errors",
        "HangError": "util.errors",
        "PeerError": "util.errors",
        "RunLockedError": "util.errors",
        "SKIP_BATCH": "util.errors",
        "SKIP_STEP": "util.errors",
        "Signal": "util.errors",
        "Mixture": "data.mixing",
        "STEP_DONE": "util.errors",
        "END_EPOCH": "util.errors",
        "HooklineError": "util.errors",
        "HookError": "util.errors",
        "OptionError": "util.errors",
        "LossError": "util.errors",
        "NonFiniteLoss": "util.errors",
        "ObserverError": "util.errors",
        "CheckpointError": "util.errors",
        "StepContext": "run.context",
        "Metrics": "metrics.metric_log",
        "parameter_groups": "run.parameter_groups",
        "read_digests": "digests.file",
        "diverge": "digests.diverge",
        "read_predictions": "run.predictions",
        "rewound": "rewind.rerun",
        "State": "run.state",
        "Strategy": "distributed.base",
        "DDP": "distributed.ddp",
        "FSDP": "distributed.fsdp",
        "Accelerated": "distributed.accelerate",
        "SingleDevice": "distributed.base",
        "Recorder": "engine.recorder",
        "Report": "report.cell",
        "list_runs": "report.runs",
        "seed_everything": "data.seeding",
        "Logger": "loggers.base",
        "JSONLines": "loggers.jsonl",
        "EVENTS": "engine.events",
        "declare_event": "engine.events",
        "export_checkpoint": "checkpoint.export",
        "import_checkpoint": "checkpoint.foreign_files",
        "load_module": "checkpoint.weights",
        "load_weights": "checkpoint.weights",
    },
)


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(f"hookline.{MODULES[name]}")
    return _load(name)
