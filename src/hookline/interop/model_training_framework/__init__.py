"""Model Training Framework: its hooks, its configuration and its trainer's names, run by Hookline's loop.

Their objects in our loop: `hooks` has the hook classes, `settings` the configuration, `loaders` the mixture
of several loaders, `trainer` the `GenericTrainer`.

>>> from hookline.interop.model_training_framework import GenericTrainer, HooksConfig, TrainerHooks
"""

from __future__ import annotations

from hookline.interop.model_training_framework.hooks import (
    EarlyStoppingHook,
    GradientMonitorHook,
    HookManager,
    LoggingHook,
    LRMonitorHook,
    ModelCheckpointHook,
    TrainerHooks,
)
from hookline.interop.model_training_framework.settings import (
    CheckpointConfig,
    EpochLengthPolicy,
    FaultToleranceConfig,
    GenericTrainerConfig,
    HooksConfig,
    LoggingConfig,
    MultiDataLoaderConfig,
    PerformanceConfig,
    PreemptionConfig,
    SamplingStrategy,
    ValAggregation,
    ValidationConfig,
    ValidationFrequency,
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
