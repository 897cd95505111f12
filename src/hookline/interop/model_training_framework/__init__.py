"""Model Training Framework: its hooks, its configuration and its trainer's names, run by Hookline's loop.

Their objects in our loop: `hooks` and `builtin` have the hook classes, `settings`, `loaders` and `refusals`
the configuration, `trainer` the `GenericTrainer`.

>>> from hookline.interop.model_training_framework import GenericTrainer, HooksConfig, TrainerHooks
"""

from __future__ import annotations

from hookline.interop.model_training_framework.builtin import (
    EarlyStoppingHook,
    GradientMonitorHook,
    HooksConfig,
    LoggingHook,
    LRMonitorHook,
    ModelCheckpointHook,
)
from hookline.interop.model_training_framework.hooks import HookManager, TrainerHooks
from hookline.interop.model_training_framework.loaders import (
    EpochLengthPolicy,
    MultiDataLoaderConfig,
    SamplingStrategy,
    ValAggregation,
    ValidationConfig,
    ValidationFrequency,
)
from hookline.interop.model_training_framework.settings import (
    CheckpointConfig,
    FaultToleranceConfig,
    GenericTrainerConfig,
    LoggingConfig,
    PerformanceConfig,
    PreemptionConfig,
)
from hookline.interop.model_training_framework.trainer import GenericTrainer

__all__ = [
    "CheckpointConfig",
    "EarlyStoppingHook",
    "EpochLengthPolicy",
    "FaultToleranceConfig",
    "GenericTrainer",
    "GenericTrainerConfig",
    "GradientMonitorHook",
    "HookManager",
    "HooksConfig",
    "LRMonitorHook",
    "LoggingConfig",
    "LoggingHook",
    "ModelCheckpointHook",
    "MultiDataLoaderConfig",
    "PerformanceConfig",
    "PreemptionConfig",
    "SamplingStrategy",
    "TrainerHooks",
    "ValAggregation",
    "ValidationConfig",
    "ValidationFrequency",
]
