"""The built-in hooks under the names, parameters and defaults of the Model Training Framework, and their
switches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hookline.config.classes import ConfigPart
from hookline.config.hooks import HooksConfig as Switches
from hookline.hooks.console_log import ConsoleLog
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.hooks.lr_monitor import LRMonitor
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.interop.model_training_framework.refusals import Settings
from hookline.util.errors import OptionError, closest

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class LoggingHook(ConsoleLog):
    """Logs when the training and its epochs start and end, and the loss of each epoch."""

    def __init__(self, log_level: str = "INFO") -> None:
        """log_level: from 'WARNING' on it logs nothing, because its lines have level INFO."""
        super().__init__(log_every_n_batches=None)
        self.log_level = log_level
        self.check()

    def check(self) -> None:
        """Reject a level that Python's logging does not have."""
        if self.log_level not in LEVELS:
            raise OptionError(
                f"LoggingHook: log_level={self.log_level!r}, allowed: {', '.join(LEVELS)}."
                f"{closest(str(self.log_level).upper(), LEVELS)}",
                option="log_level",
                value=self.log_level,
                allowed=tuple(LEVELS),
            )

    def _say(self, text: str) -> None:
        if logging.getLevelNamesMapping()[self.log_level] <= logging.INFO:
            super()._say(text)


class GradientMonitorHook(GradientMonitor):
    """Logs norms, percentiles and histograms of the gradients every n updates."""

    def __init__(
        self,
        log_frequency: int = 100,
        log_histogram: bool = False,
        log_norm: bool = True,
        param_filter: Sequence[str] | None = None,
        percentiles: Sequence[float] | None = None,
    ) -> None:
        """As in `GradientMonitor`, which has more parameters."""
        super().__init__(log_frequency, log_histogram, log_norm, param_filter, percentiles)


class ModelCheckpointHook(ModelCheckpoint):
    """Keeps the best checkpoints by a metric."""

    def __init__(
        self,
        save_top_k: int = 3,
        monitor: str = "val/loss",
        mode: str = "min",
        save_last: bool = False,
        save_on_train_epoch_end: bool | None = None,
        filename: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> None:
        """As in `ModelCheckpoint`, which has more parameters; writes to the folder `best` of the run's
        directory.
        """
        super().__init__(
            monitor,
            mode,
            save_top_k,
            save_last,
            filename,
            auto_insert_metric_name,
            save_on_train_epoch_end=save_on_train_epoch_end,
            dirpath="best",
        )


class EarlyStoppingHook(EarlyStopping):
    """Stops the run when a metric stops improving."""

    def __init__(
        self,
        monitor: str = "val/loss",
        patience: int = 10,
        mode: str = "min",
        min_delta: float = 0.0001,
        check_on_train_epoch_end: bool | None = None,
        strict: bool = True,
        verbose: bool = False,
    ) -> None:
        """As in `EarlyStopping`, which has more parameters; patience counts checks, one per epoch."""
        super().__init__(monitor, patience, mode, min_delta, check_on_train_epoch_end, strict, verbose)


class LRMonitorHook(LRMonitor):
    """Logs learning rates, and on request momentum and weight decay."""


HERE = {
    f"{base.__module__}.{base.__name__}": f"{cls.__module__}.{cls.__name__}"
    for cls in (LoggingHook, GradientMonitorHook, ModelCheckpointHook, EarlyStoppingHook, LRMonitorHook)
    for base in cls.__bases__
}
"""Hookline's class behind a switch -> the class of this dialect, with its own defaults."""


class HooksConfig(Settings, Switches):
    """Hookline's `HooksConfig`, whose built-in hooks have the defaults of the Model Training Framework."""

    __slots__ = ()

    def parts(self, key: str = "hooks") -> list[tuple[str, ConfigPart]]:
        """Return the hooks by name, in order, not yet created."""
        found = super().parts(key)
        for _, part in found:
            if part.key != f"{key}.hook_classes":  # classes that the user names stay as they are
                part.class_path = HERE[part.class_path]
        return found
