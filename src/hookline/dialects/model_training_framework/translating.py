"""From the framework's configuration to what `hookline.Trainer` is given: a table of keys, and the hooks that
others become.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import torch

from hookline.checks import check_choice
from hookline.config.hooks_config import HooksConfig as Switches
from hookline.dialects.model_training_framework.builtin import (
    EarlyStoppingHook,
    GradientMonitorHook,
    LoggingHook,
)
from hookline.dialects.model_training_framework.elsewhere import refuse_what_is_elsewhere
from hookline.dialects.model_training_framework.loaders import ValidationFrequency
from hookline.dialects.model_training_framework.settings import (
    CheckpointConfig,
    GenericTrainerConfig,
    LoggingConfig,
)
from hookline.errors import OptionError, closest
from hookline.filters import When
from hookline.hook import FunctionHook
from hookline.hooks.device_stats import DeviceStats
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.profiler import Profiler
from hookline.hooks.slurm_requeue import SlurmRequeue
from hookline.loggers import CSV, Console, Logger, TensorBoard, WandB

log = logging.getLogger("hookline")
LOGGERS = ("console", "wandb", "tensorboard", "csv", "composite")
SOURCES = ("both", "hook", "legacy")


def checked(config: Any) -> GenericTrainerConfig:
    """The whole configuration; hooks alone are one with the defaults of everything else."""
    if isinstance(config, Switches):
        config = GenericTrainerConfig(hooks=config)
    if not isinstance(config, GenericTrainerConfig):
        raise OptionError(
            f"GenericTrainer takes a GenericTrainerConfig or a HooksConfig first, not "
            f"{type(config).__name__}."
        )
    refuse_what_is_elsewhere(config)
    return config


def options_of(config: GenericTrainerConfig) -> dict[str, Any]:
    """The trainer's options."""
    performance, validation = config.performance, config.validation
    options: dict[str, Any] = {
        "seed": config.seed,
        "accumulate_grad_batches": performance.gradient_accumulation_steps,
        "compile": performance.compile_model,
        "gradient_clip_val": performance.clip_grad_norm,
        "precision": "16-mixed" if performance.use_amp and torch.cuda.is_available() else 32,
        "run_dir": Path(config.checkpoint.root_dir) / config.experiment_name,
        "grace_period": config.preemption.max_checkpoint_sec,
        "log_every_n_steps": config.logging.log_scalars_every_n_steps or 1,
        "check_val_every_n_epoch": config.validate_every_n_epochs,
        "fast_dev_run": config.dry_run,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "checkpoint": False,  # `CheckpointConfig` says what is saved
        "logger": loggers_of(config.logging, config.experiment_name),
    }
    by_steps = validation.frequency in (
        ValidationFrequency.EVERY_N_STEPS,
        ValidationFrequency.EVERY_N_STEPS.value,
    )
    if by_steps != (validation.every_n_steps is not None):
        raise OptionError(
            f"validation: frequency={validation.frequency} with every_n_steps={validation.every_n_steps}: "
            "EVERY_N_STEPS needs every_n_steps, and nothing else takes it."
        )
    if validation.every_n_steps is not None:
        options["val_check_interval"] = validation.every_n_steps * performance.gradient_accumulation_steps
    return options


def loggers_of(config: LoggingConfig, experiment: str) -> list[Logger]:
    """Each of the loggers that are asked for, in one way or another."""
    kinds = config.composite_loggers or [] if config.logger_type == "composite" else [config.logger_type]
    if config.logger_type == "composite" and not kinds:
        raise OptionError(
            "logging: logger_type='composite' needs composite_loggers, such as ['console', 'tensorboard']."
        )
    if config.logger_type != "composite" and config.composite_loggers is not None:
        raise OptionError("logging: composite_loggers would do nothing; it needs logger_type='composite'.")
    kinds = [*kinds, *(kind for kind in ("wandb", "tensorboard", "csv") if getattr(config, f"use_{kind}"))]
    for kind in kinds:
        if kind not in LOGGERS or kind == "composite":
            raise OptionError(
                f"logging: there is no logger {kind!r}.{closest(str(kind), LOGGERS)} "
                f"There are: {', '.join(LOGGERS)}."
            )
    return [_logger(kind, config, experiment) for kind in dict.fromkeys(kinds)]


def _logger(kind: str, config: LoggingConfig, experiment: str) -> Logger:
    if kind == "wandb":
        return WandB(
            config.wandb_project or experiment,
            config.wandb_name,
            config.wandb_mode,
            config.wandb_id,
            config.wandb_resume,
            config.wandb_tags,
            config.wandb_entity,
            config.wandb_notes,
        )
    if kind == "tensorboard":
        return TensorBoard(config.tensorboard_dir or "tensorboard")
    return CSV() if kind == "csv" else Console()


# ---- keys that become hooks --------------------------------------------------------------------------------


def hooks_of(config: GenericTrainerConfig) -> list[Any]:
    """The hooks of `HooksConfig`, the user's first, then those that other keys ask for."""
    source = config.validation.early_stopping_source
    check_choice("validation: early_stopping_source", source, SOURCES)
    hooks = config.hooks.build()
    if source == "legacy":
        hooks = [each for each in hooks if not isinstance(each, EarlyStopping)]
    for each in hooks:
        if isinstance(each, LoggingHook):
            each.log_level = config.logging.console_log_level
            each.check()
    if config.logging.log_gradients and not any(isinstance(each, GradientMonitor) for each in hooks):
        hooks.append(GradientMonitorHook())
    if config.early_stopping_patience is not None and source != "hook":
        hooks.append(
            _named(
                "early_stopping_patience",
                EarlyStoppingHook(
                    metric_name(config.early_stopping_metric),
                    config.early_stopping_patience,
                    config.early_stopping_mode,
                ),
            )
        )
    if config.log_loss_every_n_steps is not None:
        hooks.append(
            FunctionHook(
                _say_loss, ["on_step_end"], When(every=f"{config.log_loss_every_n_steps} steps"), "loss_line"
            )
        )
    if config.preemption.requeue_job:
        hooks.append(SlurmRequeue(_requeued_after(config.preemption.signal)))
    if config.logging.log_system_metrics:
        hooks.append(DeviceStats())
    if config.profile_training:
        hooks.append(Profiler())
    return [*hooks, *checkpointing_of(config.checkpoint)]


def checkpointing_of(config: CheckpointConfig) -> list[ModelCheckpoint]:
    """One hook per way of saving, each with a folder of its own, so that none removes what
    another has kept.
    """
    naming: dict[str, Any] = {"filename": config.filename_template, "auto_insert_metric_name": False}
    keep = {**naming, "save_top_k": config.max_checkpoints}
    made = []
    if config.save_every_n_epochs is not None:
        made.append(
            ModelCheckpoint(
                **keep,
                every_n_epochs=config.save_every_n_epochs,
                save_on_train_epoch_end=True,
                name="save_every_n_epochs",
            )
        )
    if config.save_every_n_steps is not None:
        made.append(
            ModelCheckpoint(
                **keep,
                every_n_train_steps=config.save_every_n_steps,
                dirpath="checkpoints_by_step",
                name="save_every_n_steps",
            )
        )
    if config.save_every_n_minutes is not None:
        made.append(
            ModelCheckpoint(
                **keep,
                train_time_interval=60 * config.save_every_n_minutes,
                dirpath="checkpoints_by_time",
                name="save_every_n_minutes",
            )
        )
    if config.monitor_metric is not None and config.save_best:
        made.append(
            ModelCheckpoint(
                metric_name(config.monitor_metric),
                config.monitor_mode,
                **naming,
                dirpath="checkpoints_best",
                name="save_best",
            )
        )
    return made


def metric_name(name: str) -> str:
    """`val_loss` was a default that no run has ever logged; what is meant is `val/loss`."""
    kind, _, rest = name.partition("_")
    return f"{kind}/{rest}" if kind in ("val", "train") and rest and "/" not in name else name


def _requeued_after(number: int) -> str:
    known = {getattr(signal, each): each for each in ("SIGUSR1", "SIGTERM") if hasattr(signal, each)}
    if number not in known:
        raise OptionError(
            f"preemption: signal={number!r}, allowed: {', '.join(known.values())}, which a run listens to.",
            option="signal",
            value=number,
            allowed=tuple(known),
        )
    return known[number]


def _named(name: str, hook: Any) -> Any:
    hook.name = name
    return hook


def _say_loss(step: int, loss: float) -> None:
    log.info("step %d: loss %.4f", step, loss)
