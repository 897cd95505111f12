"""Loggers, one per file. They write metrics to files, databases and services.

`from hookline.loggers import CSV` loads only that one. May import: util, engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.engine.registry import lazy_names

if TYPE_CHECKING:
    from hookline.loggers.base import BadValue, Logger, Loggers
    from hookline.loggers.build import make_loggers
    from hookline.loggers.clearml import ClearML
    from hookline.loggers.comet import Comet
    from hookline.loggers.console import Console
    from hookline.loggers.csv_file import CSV
    from hookline.loggers.jsonl import JSONLines
    from hookline.loggers.log_reader import read_log
    from hookline.loggers.mlflow import MLflow
    from hookline.loggers.queued import Queued
    from hookline.loggers.tensorboard import TensorBoard
    from hookline.loggers.trackio import Trackio
    from hookline.loggers.wandb import WandB

__all__ = [
    "CSV",
    "BadValue",
    "ClearML",
    "Comet",
    "Console",
    "JSONLines",
    "Logger",
    "Loggers",
    "MLflow",
    "Queued",
    "TensorBoard",
    "Trackio",
    "WandB",
    "make_loggers",
    "read_log",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BadValue": "base",
        "Logger": "base",
        "Loggers": "base",
        "ClearML": "clearml",
        "Comet": "comet",
        "Console": "console",
        "CSV": "csv_file",
        "JSONLines": "jsonl",
        "make_loggers": "build",
        "MLflow": "mlflow",
        "Queued": "queued",
        "read_log": "log_reader",
        "TensorBoard": "tensorboard",
        "Trackio": "trackio",
        "WandB": "wandb",
    },
)
