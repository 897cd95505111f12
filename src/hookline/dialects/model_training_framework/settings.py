"""The configuration of a run, in the framework's own classes and keys."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from hookline.config.hooks_config import HooksConfig as Switches
from hookline.dialects.model_training_framework.builtin import HooksConfig
from hookline.dialects.model_training_framework.elsewhere import Settings, elsewhere
from hookline.dialects.model_training_framework.loaders import MultiDataLoaderConfig, ValidationConfig

_OF_THE_LOADER = "it is an argument of your DataLoader"
_ALWAYS = "a checkpoint always holds everything that an exact resume needs"


@dataclass
class PerformanceConfig(Settings):
    """What an update is made of."""

    gradient_accumulation_steps: int = 1
    """Batches whose gradients make one update."""
    compile_model: bool = False
    use_amp: bool = True
    """Mixed precision on a GPU; on a CPU it changes nothing."""
    clip_grad_norm: float | None = 1.0
    """The largest total norm of the gradients; None: they are not clipped."""
    dataloader_num_workers: int | None = elsewhere(_OF_THE_LOADER)
    pin_memory: bool | None = elsewhere(_OF_THE_LOADER)
    persistent_workers: bool | None = elsewhere(_OF_THE_LOADER)
    prefetch_factor: int | None = elsewhere(_OF_THE_LOADER)


@dataclass
class CheckpointConfig(Settings):
    """When to save, what to keep and where."""

    root_dir: str | Path = "checkpoints"
    """A run writes into root_dir/experiment_name."""
    save_every_n_steps: int | None = None
    save_every_n_epochs: int | None = 1
    save_every_n_minutes: float | None = None
    max_checkpoints: int = 5
    """How many of each of these to keep, the newest ones."""
    filename_template: str = "epoch_{epoch:03d}_step_{step:06d}.ckpt"
    monitor_metric: str | None = None
    """The best checkpoint by this metric is kept besides."""
    monitor_mode: str = "min"
    save_best: bool = True
    """False: monitor_metric keeps nothing."""
    save_rng: bool | None = elsewhere(_ALWAYS)
    save_optimizer: bool | None = elsewhere(_ALWAYS)
    save_scheduler: bool | None = elsewhere(_ALWAYS)


@dataclass
class PreemptionConfig(Settings):
    """What happens when the machine is taken away."""

    signal: int = getattr(signal, "SIGUSR1", signal.SIGTERM)
    """The signal after which a SLURM job is put back into its queue; SIGTERM and SIGUSR1 both save and end
    the run.
    """
    max_checkpoint_sec: float = 300.0
    """How long the step that is going on and the save may take."""
    requeue_job: bool = True
    resume_from_latest_symlink: bool | None = None
    """True: every fit continues from the newest checkpoint of this experiment, if there is one. None: only in
    a job that SLURM has started again, if requeue_job is set. False: never. There is no link: the checkpoint
    is found by its manifest.
    """
    cleanup_on_exit: bool | None = elsewhere("what a killed process left is tidied when the run starts again")
    backup_checkpoints: bool | None = elsewhere("UploadCheckpoint copies checkpoints to another place")


@dataclass
class LoggingConfig(Settings):
    """Where metrics go, and how often."""

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
    """Of the logging hook."""
    log_scalars_every_n_steps: int | None = 50
    """None: every step."""
    log_gradients: bool = False
    """The gradient monitor, if the hooks do not have it already."""
    log_system_metrics: bool = False
    """Memory and use of CPU and GPU."""
    csv_log_dir: str | None = elsewhere("metrics.csv is in the run's directory")
    console_log_format: str | None = elsewhere(
        "a Logger of your own prints as you like: GenericTrainer(..., logger=[...])"
    )
    log_per_loader_metrics: bool | None = elsewhere(
        "they are always there; a hook at on_train_metrics may take them out"
    )
    log_global_metrics: bool | None = elsewhere(
        "they are always there; a hook at on_train_metrics may take them out"
    )
    log_loader_proportions: bool | None = elsewhere("they are always there, as train/dl_NAME/proportion")
    all_reduce_metrics: bool | None = elsewhere(
        "metrics that decisions rest on are always reduced over ranks"
    )
    log_images_every_n_steps: int | None = elsewhere("a hook logs images when it wants: @every('500 steps')")
    log_model_parameters: bool | None = elsewhere(
        "a hook can: trainer.logger.add_histogram(name, weights, step)"
    )


@dataclass
class FaultToleranceConfig(Settings):
    """Kept for its name: a resume is always exact."""

    save_sampler_state: bool | None = elsewhere(_ALWAYS)
    save_dataset_state: bool | None = elsewhere(_ALWAYS)
    verify_deterministic_resume: bool | None = elsewhere(
        "a resume is exact, and says so if the loader has changed"
    )
    checkpoint_timeout_sec: float | None = elsewhere(
        "preemption.max_checkpoint_sec is the limit after a signal"
    )


@dataclass
class GenericTrainerConfig(Settings):
    """Everything that a `GenericTrainer` is told. Attributes of your own may be added, for your hooks to
    read.
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
    """Of this only the names count: a validation sees each batch of each loader once."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    loss_weights_per_loader: list[float] | None = None
    """What the losses of each loader are multiplied by before backward."""
    per_loader_optimizer_id: list[int] | None = None
    """Which optimizer the batches of each loader train."""
    log_loss_every_n_steps: int | None = 100
    """A line on the console with the loss; None: none."""
    validate_every_n_epochs: int = 1
    early_stopping_patience: int | None = None
    """Stop after so many validations without improvement."""
    early_stopping_metric: str = "val_loss"
    """`val_loss` is read as `val/loss`."""
    early_stopping_mode: str = "min"
    debug_mode: bool = False
    """For your hooks to ask for, also as `trainer.config.debug`."""
    profile_training: bool = False
    """A profile of a few steps, into the run's directory."""
    dry_run: bool = False
    """One batch of everything: does it work at all?"""
    ddp: None = elsewhere("start the script with torchrun and pass GenericTrainer(..., strategy=...)")
    warm_start: None = elsewhere("hookline.load_weights(model, path) before the trainer is made")
    experiment_config: None = elsewhere("the HParams hook writes a run's settings to its log")

    @property
    def debug(self) -> bool:
        """The same as `debug_mode`."""
        return self.debug_mode

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.debug_mode = debug
