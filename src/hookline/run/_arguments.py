"""Generated from run/options.py by tools/generate.py; edit the declarations there."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from hookline.distributed.base import Strategy
    from hookline.engine.foreign import LoggerLike
    from hookline.loggers.base import Logger


class HowLongArguments(TypedDict, total=False):
    """How long to train."""

    max_epochs: int | None
    """Number of epochs. None: 1000, or no limit if max_steps or max_time is given. -1: no limit."""
    min_epochs: int
    """Ignore requests to stop before this many epochs are complete."""
    max_steps: int
    """Number of optimizer updates. -1: no limit."""
    min_steps: int
    """Ignore requests to stop before this many optimizer updates."""
    max_time: str | float | datetime.timedelta | None
    """Limit of the training time: seconds, '2 hours', 'DD:HH:MM:SS' or a timedelta."""


class UpdateOptionsArguments(TypedDict, total=False):
    """Gradient accumulation and gradient clipping."""

    accumulate_grad_batches: int
    """Gradient accumulation: number of batches whose gradients make one optimizer update."""
    accumulate_by: Literal["batches", "samples", "tokens"]
    """Weight of a batch in the update: 'batches' (all batches count the same), 'samples' or 'tokens' (the update is that of
    one large batch, over all ranks, if the loss is a mean over samples or tokens)."""
    count_tokens: Callable[[Any], int] | None
    """Function that returns the number of tokens of a batch. None: count the elements of `input_ids`, or of the first
    tensor."""
    gradient_clip_val: float | None
    """Gradient clipping: the largest norm or value of the gradients of an update. None: no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"]
    """'norm' clips the norm of all gradients together, 'value' clips each element."""
    nonfinite: Literal["stop", "skip"]
    """When the loss is NaN or infinite: 'stop' ends the run, one step late and without a device sync; 'skip' skips the update
    and reads from the device once per update."""


class ValidationArguments(TypedDict, total=False):
    """Validation."""

    val_check_interval: int | float
    """Validate after this many batches, or after this fraction of an epoch."""
    check_val_every_n_epoch: int
    """Validate in every n-th epoch only."""
    num_sanity_val_steps: int
    """Number of validation batches to run before training, as a sanity check. -1: all."""
    evaluation: dict[str, Any] | None
    """How validation, test and prediction run. A dictionary of `inference_mode` (False; True: run the steps under
    torch.inference_mode instead of torch.no_grad) and `aggregation`, how results of several loaders are combined: 'micro'
    (mean over samples), 'macro' (mean over loaders), 'primary' (the first loader), 'primary:NAME' (that loader), or a
    function from {loader: {metric: value}} to {metric: value}."""


class LimitsArguments(TypedDict, total=False):
    """Limits and trial runs."""

    limit_train_batches: int | float
    """Limit of the batches of a training epoch: a number, or a fraction of the epoch. 0: none."""
    limit_val_batches: int | float
    """The same for each validation loader."""
    limit_test_batches: int | float
    """The same for each test loader."""
    limit_predict_batches: int | float
    """The same for each prediction loader."""
    overfit_batches: int | float
    """Train on the same few batches (a number or a fraction) in every epoch, without shuffling. Validation is limited to as
    many batches."""
    fast_dev_run: bool | int
    """Trial run: run n batches of each loader once, without logging and without checkpoints."""
    prefetch_batches: int
    """Number of batches that a thread fetches and moves to the device in advance. For loaders with workers, and lists."""


class AroundArguments(TypedDict, total=False):
    """Output, seeds and files."""

    log_every_n_steps: int
    """Number of updates between two logged rows of metrics."""
    enable_progress_bar: bool
    """Show a progress bar, and a table of the cost of hooks at the end of a fit."""
    digest: bool | int | str | dict[str, Any]
    """Write digests of the batch, loss, gradients, weights and random streams of steps, for `hookline diverge`: 'every 10
    steps', a number of steps, or True: every step. Or a dictionary of `every` (1; such an interval) and `modules` (False;
    True: also of every module and parameter)."""
    control: bool
    """Listen on a socket in the run's directory, for this user to watch and control the fit."""
    seed: int | None
    """Seed of the random generators of Python, numpy and torch, set when a run begins. None: do not seed."""
    deterministic: bool
    """Use only deterministic kernels during runs."""
    compile: bool | Literal["step"] | dict[str, Any]
    """Compile the model with torch.compile. A dictionary: its arguments. 'step', or a dictionary with step=True: compile the
    whole training step. A dictionary with `blocks`: compile only the layers of these names or classes."""
    activation_checkpointing: bool | str | type | Callable[[str, Any], bool] | Sequence[Any]
    """Activation checkpointing: layers that recompute their activations in the backward pass, to save memory. True: the items
    of every ModuleList (with FSDP, the layers of `wrap`). Or a name pattern, a class name, a class, a function of name and
    module, or a list of them."""
    default_root_dir: str | Path
    """Directory in which the directories of runs are created."""
    run_dir: str | Path | None
    """Directory of the run: log, checkpoints, reports. None: default_root_dir/runs/NAME."""


class FailuresArguments(TypedDict, total=False):
    """Checkpoints and failures."""

    checkpoint: bool | str | dict[str, Any]
    """True: keep the newest state of a fit as `checkpoints/last`. False: only hooks save. 'async': write checkpoints in the
    background. Or a dictionary of `last` (True), `every` ("5 minutes"), `write` ('sync', 'async'), `on_error` ('raise',
    'warn') and `weights` ('all'; 'trainable' leaves out frozen weights, as of the base model of a LoRA adapter)."""
    grace_period: str | float | datetime.timedelta | None
    """Time limit for the current step and the save after SIGTERM, SIGUSR1 or Ctrl-C. None: no limit."""
    hang_after: str | float | datetime.timedelta | dict[str, Any] | None
    """Watchdog for hangs: report a hook, step, loader, logger or save that takes longer, with its stack. None: no watchdog.
    Or a dictionary of `after` (such a time) and `action`: 'warn' reports the hang, 'abort' also ends the run."""


class TrainerPartsArguments(TypedDict, total=False):
    """Hooks, loggers and devices."""

    hooks: Iterable[Any]
    """One hook or a list: instances, classes (created without arguments), or functions marked with `@on`. None: no hooks."""
    callbacks: Iterable[Any]
    """Another name for `hooks`; both are used."""
    logger: bool | Logger | LoggerLike | Iterable[Logger | LoggerLike] | None
    """A Logger or several, also Lightning's, which receive the metrics. True: log.jsonl in the run's directory. False or
    None: none."""
    strategy: str | Strategy
    """How the model runs on devices and ranks (multi-GPU, distributed training): 'auto' (DDP if several processes were
    started), 'single', 'ddp', 'fsdp', or a Strategy."""
    device: str | torch.device
    """Device of this process: 'cpu', 'cuda', 'cuda:1', 'mps'. 'auto': an accelerator if there is one."""
    precision: str | int
    """32; mixed precision: 'bf16-mixed' or '16-mixed'; or one type for parameters, batches and new tensors: 64, 'bf16-true'
    or '16-true'."""
    config: Any
    """Settings of your own. Hooks receive them as the fact `config`."""
    audit: bool | dict[str, Any]
    """True: report what each hook changed: weights, gradients, modes, the batch, random streams and more. Or a dictionary of
    `changes` (False; this report), `costs` (True; count the calls of every hook and measure their time) and `trace` (False;
    True: write every event and call as a timeline for Perfetto to trace.json in the run's directory; or the path of a
    file)."""


class OptionArguments(
    HowLongArguments,
    UpdateOptionsArguments,
    ValidationArguments,
    LimitsArguments,
    AroundArguments,
    FailuresArguments,
):
    """`Options` as keyword arguments."""


class TrainerArguments(OptionArguments, TrainerPartsArguments):
    """All keyword arguments of `Trainer`."""
