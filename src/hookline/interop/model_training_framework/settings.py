"""The configuration of a run, in the framework's own classes and keys."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import torch

from hookline.config.classes import ConfigPart
from hookline.config.hooks import HooksConfig as Switches
from hookline.engine.checks import check_choice
from hookline.engine.filters import FilterSettings
from hookline.engine.hook import FunctionHook
from hookline.hooks.device_stats import DeviceStats
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.profiler import Profiler
from hookline.hooks.slurm_requeue import SlurmRequeue
from hookline.interop.model_training_framework.hooks import (
    EarlyStoppingHook,
    GradientMonitorHook,
    LoggingHook,
    LRMonitorHook,
    ModelCheckpointHook,
)
from hookline.loggers import CSV, Console, Logger, TensorBoard, WandB
from hookline.util.errors import OptionError, closest

# ---- Keys that do not exist, or that Hookline replaces, are rejected with the right ones; none is ignored


class FrameworkSettings:
    """The base of the configuration's data classes: an unknown key is an error with the nearest right one."""

    __slots__ = ()

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Check the keys before the data class does."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        for key in given:
            if key not in known:
                raise OptionError(
                    f"{cls.__name__} has no {key!r}.{closest(key, known)} It has: {', '.join(known)}."
                )
        return super().__new__(cls)


def refused_key(instead: str) -> Any:
    """Return a field that must keep its default; the error for any other value names the alternative."""
    return field(default=None, metadata={"instead": instead})


def refuse_replaced(config: Any, where: str = "") -> None:
    """Reject a value of such a field anywhere in the configuration."""
    for declared in fields(config):
        value, key = getattr(config, declared.name), f"{where}{declared.name}"
        if is_dataclass(value):
            refuse_replaced(value, f"{key}.")
        elif value is not None and "instead" in declared.metadata:
            raise OptionError(
                f"{key}={value!r} is not taken here: {declared.metadata['instead']}.", option=key, value=value
            )


# ---- The framework's classes


_OF_THE_LOADER = "it is an argument of your DataLoader"
_ALWAYS = "a checkpoint always holds everything that an exact resume needs"


@dataclass
class PerformanceConfig(FrameworkSettings):
    """How an update is computed.

    compile_model: compile the model with torch.compile.
    """

    gradient_accumulation_steps: int = 1
    """Batches whose gradients make one update."""
    compile_model: bool = False
    use_amp: bool = True
    """Mixed precision on a GPU; no effect on a CPU."""
    clip_grad_norm: float | None = 1.0
    """The largest total norm of the gradients; None: no clipping."""
    dataloader_num_workers: int | None = refused_key(_OF_THE_LOADER)
    pin_memory: bool | None = refused_key(_OF_THE_LOADER)
    persistent_workers: bool | None = refused_key(_OF_THE_LOADER)
    prefetch_factor: int | None = refused_key(_OF_THE_LOADER)


@dataclass
class CheckpointConfig(FrameworkSettings):
    """When to save, what to keep and where.

    save_every_n_steps, save_every_n_epochs, save_every_n_minutes: the interval between two checkpoints; None:
    none. filename_template: the name, with {epoch}, {step} and metrics. monitor_mode: 'min' or 'max', which
    is better.
    """

    root_dir: str | Path = "checkpoints"
    """A run writes into root_dir/experiment_name."""
    save_every_n_steps: int | None = None
    save_every_n_epochs: int | None = 1
    save_every_n_minutes: float | None = None
    max_checkpoints: int = 5
    """How many of each of these to keep, the newest ones."""
    filename_template: str = "epoch_{epoch:03d}_step_{step:06d}.ckpt"
    monitor_metric: str | None = None
    """The best checkpoint by this metric is kept as well."""
    monitor_mode: str = "min"
    save_best: bool = True
    """False: monitor_metric keeps nothing."""
    save_rng: bool | None = refused_key(_ALWAYS)
    save_optimizer: bool | None = refused_key(_ALWAYS)
    save_scheduler: bool | None = refused_key(_ALWAYS)


@dataclass
class PreemptionConfig(FrameworkSettings):
    """What happens when the job is preempted.

    requeue_job: requeue the SLURM job after the signal.
    """

    signal: int = getattr(signal, "SIGUSR1", signal.SIGTERM)
    """The signal after which a SLURM job is requeued; SIGTERM and SIGUSR1 both save and end the run."""
    max_checkpoint_sec: float = 300.0
    """How long the current step and the save may take."""
    requeue_job: bool = True
    resume_from_latest_symlink: bool | None = None
    """True: every fit continues from the newest checkpoint of this experiment, if there is one. None: only in
    a job that SLURM has restarted, if requeue_job is set. False: never. There is no symlink: the checkpoint
    is found by its manifest.
    """
    cleanup_on_exit: bool | None = refused_key(
        "files of a killed process are removed when the run starts again"
    )
    backup_checkpoints: bool | None = refused_key("UploadCheckpoint copies checkpoints to another location")


@dataclass
class LoggingConfig(FrameworkSettings):
    """Where metrics are written, and how often.

    use_wandb, use_tensorboard, use_csv: also log there. wandb_entity, wandb_tags, wandb_notes, wandb_name,
    wandb_mode, wandb_id, wandb_resume: arguments of `wandb.init`.
    """

    logger_type: str = "console"
    """'console', 'wandb', 'tensorboard', 'csv' or 'composite'."""
    composite_loggers: list[str] | None = None
    """For 'composite': several of the others."""
    use_wandb: bool = False
    use_tensorboard: bool = False
    use_csv: bool = True
    wandb_project: str | None = None
    """By default the experiment's name."""
    wandb_entity: str | None = None
    wandb_tags: list[str] = field(default_factory=list)
    wandb_notes: str | None = None
    wandb_name: str | None = None
    wandb_mode: str | None = None
    wandb_id: str | None = None
    wandb_resume: str | None = None
    tensorboard_dir: str | None = None
    """A folder in the run's directory."""
    console_log_level: str = "INFO"
    """The level of the logging hook."""
    log_scalars_every_n_steps: int | None = 50
    """None: every step."""
    log_gradients: bool = False
    """Adds the gradient monitor, if it is not among the hooks already."""
    log_system_metrics: bool = False
    """Memory and utilization of CPU and GPU."""
    csv_log_dir: str | None = refused_key("metrics.csv is in the run's directory")
    console_log_format: str | None = refused_key(
        "a Logger of your own prints as you like: GenericTrainer(..., logger=[...])"
    )
    log_per_loader_metrics: bool | None = refused_key(
        "they are always there; a hook at on_train_metrics may take them out"
    )
    log_global_metrics: bool | None = refused_key(
        "they are always there; a hook at on_train_metrics may take them out"
    )
    log_loader_proportions: bool | None = refused_key("they are always there, as train/dl_NAME/proportion")
    all_reduce_metrics: bool | None = refused_key(
        "metrics that decisions depend on are always reduced over ranks"
    )
    log_images_every_n_steps: int | None = refused_key(
        "a hook logs images when it wants: @every('500 steps')"
    )
    log_model_parameters: bool | None = refused_key(
        "a hook can: trainer.logger.add_histogram(name, weights, step)"
    )


@dataclass
class FaultToleranceConfig(FrameworkSettings):
    """Kept for its name: a resume is always exact."""

    save_sampler_state: bool | None = refused_key(_ALWAYS)
    save_dataset_state: bool | None = refused_key(_ALWAYS)
    verify_deterministic_resume: bool | None = refused_key(
        "a resume is exact, and says so if the loader has changed"
    )
    checkpoint_timeout_sec: float | None = refused_key(
        "preemption.max_checkpoint_sec is the limit after a signal"
    )


class SamplingStrategy(Enum):
    """How the loader of the next batch is chosen."""

    SEQUENTIAL = "sequential"
    ROUND_ROBIN = "round_robin"
    WEIGHTED = "weighted"
    ALTERNATING = "alternating"


class EpochLengthPolicy(Enum):
    """How many batches an epoch has."""

    SUM_OF_LENGTHS = "sum_of_lengths"
    MAX_OF_LENGTHS = "max_of_lengths"
    MIN_OF_LENGTHS = "min_of_lengths"
    FIXED_NUM_STEPS = "fixed_num_steps"


class ValidationFrequency(Enum):
    """When to validate."""

    PER_EPOCH = "per_epoch"
    EVERY_N_STEPS = "every_n_steps"


class ValAggregation(Enum):
    """How `val/loss` is computed from several validation loaders."""

    MICRO_AVG_WEIGHTED_BY_SAMPLES = "micro_avg_weighted_by_samples"
    MACRO_AVG_EQUAL_LOADERS = "macro_avg_equal_loaders"
    PRIMARY_METRIC_PER_LOADER = "primary_metric_per_loader"
    CUSTOM = "custom"


@dataclass
class MultiDataLoaderConfig(FrameworkSettings):
    """How batches are drawn from several loaders; lists follow the loaders' order.

    sampling_strategy: how the loader of the next batch is chosen. epoch_length_policy: how many batches an
    epoch has. burst_size: batches in a row from one loader.
    """

    sampling_strategy: SamplingStrategy = SamplingStrategy.ROUND_ROBIN
    dataloader_weights: list[float] | None = None
    """For WEIGHTED: each loader's share of the batches."""
    alternating_pattern: list[int] | None = None
    """For ALTERNATING: loader indices, repeated."""
    dataloader_names: list[str] = field(default_factory=list)
    """By default dl0, dl1, ..."""
    epoch_length_policy: EpochLengthPolicy = EpochLengthPolicy.SUM_OF_LENGTHS
    steps_per_epoch: int | None = None
    """For FIXED_NUM_STEPS: batches."""
    cycle_short_loaders: bool | None = None
    """Whether an exhausted loader starts again. None: yes if the epoch is not the sum of their lengths, or
    weights are given.
    """
    burst_size: int = 1
    choice_rng_seed: int | None = None
    """Has no effect so far: WEIGHTED is exact, nothing is random."""
    prefetch_cap_total_batches: int | None = refused_key("fetching ahead is DataLoader(prefetch_factor=...)")


@dataclass
class ValidationConfig(FrameworkSettings):
    """When to validate, and how the results of several loaders are combined.

    frequency: when to validate. aggregation: how `val/loss` is computed from several loaders.
    """

    frequency: ValidationFrequency = ValidationFrequency.PER_EPOCH
    every_n_steps: int | None = None
    """For EVERY_N_STEPS: optimizer updates."""
    aggregation: ValAggregation = ValAggregation.MICRO_AVG_WEIGHTED_BY_SAMPLES
    aggregation_fn: Callable[[dict[str, dict[str, float]]], Mapping[str, float]] | None = None
    """From {loader: {metric: value}} to {metric: value}."""
    validation_weights: list[float] | None = None
    """Weights of the loaders in a mean over them, in their order."""
    per_loader_metrics: bool | None = refused_key("results per loader, val/dl_NAME/..., are always there")
    global_metrics: bool | None = refused_key("the results overall, val/..., are always there")
    early_stopping_source: str = "both"
    """'hook' ignores the trainer's own early_stopping_patience, 'legacy' ignores the hook."""


FRAMEWORK_CLASSES = {
    f"{base.__module__}.{base.__name__}": f"{cls.__module__}.{cls.__name__}"
    for cls in (LoggingHook, GradientMonitorHook, ModelCheckpointHook, EarlyStoppingHook, LRMonitorHook)
    for base in cls.__bases__
}
"""Hookline's class behind a switch -> the class of this dialect, with its own defaults."""


class HooksConfig(FrameworkSettings, Switches):
    """Hookline's `HooksConfig`, whose built-in hooks have the defaults of the Model Training Framework.

    args, given: its settings, as in the base.
    """

    __slots__ = ()

    def parts(self, key: str = "hooks") -> list[tuple[str, ConfigPart]]:
        """Return the hooks by name, in order, not yet created."""
        found = super().parts(key)
        for _, part in found:
            if part.key != f"{key}.hook_classes":  # classes that the user names stay as they are
                part.class_path = FRAMEWORK_CLASSES[part.class_path]
        return found


@dataclass
class GenericTrainerConfig(FrameworkSettings):
    """The configuration of a `GenericTrainer`. You may add attributes of your own, for your hooks to read.

    experiment_name: the name of the run's directory. seed: the seed of the run; None: none. checkpoint,
    preemption, performance, logging, hooks, train_loader_config, validation, fault_tolerance: the settings of
    a part. validate_every_n_epochs: epochs between validations. early_stopping_mode: 'min' or 'max', which is
    better.
    """

    experiment_name: str = "experiment"
    seed: int | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    hooks: Switches = field(default_factory=HooksConfig)
    train_loader_config: MultiDataLoaderConfig = field(default_factory=MultiDataLoaderConfig)
    val_loader_config: MultiDataLoaderConfig = field(default_factory=MultiDataLoaderConfig)
    """Only its names count: a validation sees each batch of each loader once."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    loss_weights_per_loader: list[float] | None = None
    """Factors for the losses of each loader before backward."""
    per_loader_optimizer_id: list[int] | None = None
    """The optimizer that the batches of each loader train."""
    log_loss_every_n_steps: int | None = 100
    """Steps between console lines with the loss; None: no lines."""
    validate_every_n_epochs: int = 1
    early_stopping_patience: int | None = None
    """Stop after this many validations without improvement."""
    early_stopping_metric: str = "val_loss"
    """`val_loss` is read as `val/loss`."""
    early_stopping_mode: str = "min"
    debug_mode: bool = False
    """For your hooks to read, also as `trainer.config.debug`."""
    profile_training: bool = False
    """Profile a few steps, into the run's directory."""
    dry_run: bool = False
    """Run one batch of everything, to see whether it works."""
    ddp: None = refused_key("start the script with torchrun and pass GenericTrainer(..., strategy=...)")
    warm_start: None = refused_key("hookline.load_weights(model, path) before the trainer is made")
    experiment_config: None = refused_key("the HParams hook writes a run's settings to its log")

    @property
    def debug(self) -> bool:
        """Return `debug_mode`."""
        return self.debug_mode

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.debug_mode = debug


# ---- From the framework's configuration to the options of `hookline.Trainer`


log = logging.getLogger("hookline")
LOGGER_KINDS = ("console", "wandb", "tensorboard", "csv", "composite")
SOURCES = ("both", "hook", "legacy")


def complete_config(config: Any) -> GenericTrainerConfig:
    """Return the whole configuration; a HooksConfig alone gets the defaults of everything else."""
    if isinstance(config, Switches):
        config = GenericTrainerConfig(hooks=config)
    if not isinstance(config, GenericTrainerConfig):
        raise OptionError(
            f"GenericTrainer takes a GenericTrainerConfig or a HooksConfig first, not "
            f"{type(config).__name__}."
        )
    refuse_replaced(config)
    return config


def trainer_options(config: GenericTrainerConfig) -> dict[str, Any]:
    """Return the trainer's options."""
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
        "checkpoint": False,  # `CheckpointConfig` adds the hooks that save
        "logger": loggers_of(config.logging, config.experiment_name),
    }
    by_steps = validation.frequency in (
        ValidationFrequency.EVERY_N_STEPS,
        ValidationFrequency.EVERY_N_STEPS.value,
    )
    if by_steps != (validation.every_n_steps is not None):
        raise OptionError(
            f"validation: frequency={validation.frequency} with every_n_steps={validation.every_n_steps}: "
            "EVERY_N_STEPS needs every_n_steps, and PER_EPOCH does not take it."
        )
    if validation.every_n_steps is not None:
        options["val_check_interval"] = validation.every_n_steps * performance.gradient_accumulation_steps
    return options


def loggers_of(config: LoggingConfig, experiment: str) -> list[Logger]:
    """Return the loggers that the configuration requests."""
    kinds = config.composite_loggers or [] if config.logger_type == "composite" else [config.logger_type]
    if config.logger_type == "composite" and not kinds:
        raise OptionError(
            "logging: logger_type='composite' needs composite_loggers, such as ['console', 'tensorboard']."
        )
    if config.logger_type != "composite" and config.composite_loggers is not None:
        raise OptionError("logging: composite_loggers has no effect without logger_type='composite'.")
    kinds = [*kinds, *(kind for kind in ("wandb", "tensorboard", "csv") if getattr(config, f"use_{kind}"))]
    for kind in kinds:
        if kind not in LOGGER_KINDS or kind == "composite":
            raise OptionError(
                f"logging: there is no logger {kind!r}.{closest(str(kind), LOGGER_KINDS)} "
                f"There are: {', '.join(LOGGER_KINDS)}."
            )
    return [_make_logger(kind, config, experiment) for kind in dict.fromkeys(kinds)]


def _make_logger(kind: str, config: LoggingConfig, experiment: str) -> Logger:
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
    """Return the hooks of `HooksConfig`, the user's first, then those that other keys request."""
    source = config.validation.early_stopping_source
    check_choice("validation: early_stopping_source", source, SOURCES)
    hooks = config.hooks.build()
    if source == "legacy":
        hooks = [each for each in hooks if not isinstance(each, EarlyStopping)]
    for hook in hooks:
        if isinstance(hook, LoggingHook):
            hook.log_level = config.logging.console_log_level
            hook.check()
    if config.logging.log_gradients and not any(isinstance(each, GradientMonitor) for each in hooks):
        hooks.append(GradientMonitorHook())
    if config.early_stopping_patience is not None and source != "hook":
        stopping = EarlyStoppingHook(
            metric_name(config.early_stopping_metric),
            config.early_stopping_patience,
            config.early_stopping_mode,
        )
        stopping.name = "early_stopping_patience"
        hooks.append(stopping)
    if config.log_loss_every_n_steps is not None:
        hooks.append(
            FunctionHook(
                _log_loss,
                ["on_step_end"],
                FilterSettings(every=f"{config.log_loss_every_n_steps} steps"),
                "loss_line",
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
    """Return one hook per way of saving, each with a folder of its own, so that none removes files of
    another.
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
    """Return `val/loss` for `val_loss`, a default that no run has ever logged."""
    kind, _, rest = name.partition("_")
    return f"{kind}/{rest}" if kind in ("val", "train") and rest and "/" not in name else name


def _requeued_after(number: int) -> str:
    known = {getattr(signal, each): each for each in ("SIGUSR1", "SIGTERM") if hasattr(signal, each)}
    if number not in known:
        raise OptionError(
            f"preemption: signal={number!r}, allowed: {', '.join(known.values())}, which a run handles.",
            option="signal",
            value=number,
            allowed=tuple(known),
        )
    return known[number]


def _log_loss(step: int, loss: float) -> None:
    log.info("step %d: loss %.4f", step, loss)
