"""Generated from run/options.py by tools/generate.py; edit the declarations there."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from hookline.distributed.base import Strategy
    from hookline.loggers.base import Logger


class HowLongArguments(TypedDict, total=False):
    """How long to train."""

    max_epochs: int | None
    """Epochs to train. None: 1000, or no limit if max_steps or max_time is given. -1: no limit."""
    min_epochs: int
    """Requests to stop are not honoured before this many epochs."""
    max_steps: int
    """Optimizer updates to make. -1: no limit."""
    max_time: str | float | datetime.timedelta | None
    """Time to train for: seconds, '2 hours', 'DD:HH:MM:SS' or a timedelta."""


class UpdateArguments(TypedDict, total=False):
    """The update."""

    accumulate_grad_batches: int
    """Batches whose gradients make one update."""
    accumulate_by: Literal["batches", "samples", "tokens"]
    """What each of them counts by in the update: 'batches' (all count alike), 'samples' or 'tokens' (the update is that of
    one large batch, over all ranks, if the loss is a mean over samples or tokens)."""
    count_tokens: Callable[[Any], int] | None
    """From a batch to its number of tokens. None: the elements of `input_ids`, or of the first tensor."""
    gradient_clip_val: float | None
    """The largest norm or value of the gradients of an update. None: no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"]
    """Clip the norm of all gradients together, or each value by itself."""
    nonfinite: Literal["stop", "skip"]
    """A loss that is NaN or infinite: 'stop' (noticed one step late, no sync) or 'skip' (one read per update)."""


class ValidationArguments(TypedDict, total=False):
    """Validation."""

    val_check_interval: int | float
    """Validate after this many batches, or after this fraction of an epoch."""
    check_val_every_n_epoch: int
    """Validate only in every n-th epoch."""
    num_sanity_val_steps: int
    """Validation batches before training. -1: all."""
    val_aggregation: str | Callable[[dict[str, dict[str, float]]], Mapping[str, float]]
    """Several evaluation loaders: 'micro' (the mean over all samples), 'macro' (over loaders), 'primary' (the first
    loader's), 'primary:NAME', or a function from {loader: {metric: value}} to {metric: value}."""


class LimitsArguments(TypedDict, total=False):
    """Limits and trial runs."""

    limit_train_batches: int | float
    """Batches of a training epoch: a number of them, or a fraction. 0: none."""
    limit_val_batches: int | float
    """The same for each validation loader."""
    limit_test_batches: int | float
    """The same for each test loader."""
    limit_predict_batches: int | float
    """The same for each prediction loader."""
    overfit_batches: int | float
    """Train on the same few batches again and again, without shuffling, and without validation data of their own."""
    fast_dev_run: bool | int
    """Run n batches of everything once, without logging and without checkpoints: does it work at all?"""
    prefetch_batches: int
    """Batches that a thread fetches and moves to the device in advance; for loaders with workers, and lists."""


class AroundArguments(TypedDict, total=False):
    """Output, seeds and files."""

    log_every_n_steps: int
    """Updates between two rows of metrics."""
    enable_progress_bar: bool
    """A progress bar, and at the end of a fit a table of what the hooks cost."""
    trace: bool | str | Path
    """Write every event and call as a timeline for Perfetto: True for trace.json in the run's directory, or a file."""
    control: bool
    """Listen on a socket in the run's directory, through which this user can look at a fit and control it."""
    seed: int | None
    """Seeds Python, numpy and torch when a run begins."""
    deterministic: bool
    """Only deterministic kernels, during runs."""
    compile: bool | Literal["step"] | dict[str, Any]
    """torch.compile the model, with these arguments. 'step', or a table with step=True: the whole training step."""
    default_root_dir: str | Path
    """Where the directories of runs are made."""
    run_dir: str | Path | None
    """Where everything of a run is written. None: default_root_dir/runs/NAME."""


class FailuresArguments(TypedDict, total=False):
    """Checkpoints and failures."""

    checkpoint: bool | str | dict[str, Any]
    """Keep the newest state of a fit as `checkpoints/last`; False: only hooks save. 'async' writes checkpoints in the
    background. Or a table: `last` (True), `every` ("5 minutes"), `write` ('sync', 'async'), `on_error` ('raise', 'warn')."""
    grace_period: str | float | datetime.timedelta | None
    """After SIGTERM, SIGUSR1 or Ctrl-C: how long the step that is going on and the save may take. None: no limit."""
    hang_after: str | float | datetime.timedelta | None
    """A hook, step, loader, logger or save that takes longer is named, with where it stands. None: no watchdog."""
    hang_action: Literal["warn", "abort"]
    """'abort' also ends the run."""


class PartsArguments(TypedDict, total=False):
    """Hooks, loggers and devices."""

    hooks: Iterable[Any]
    """Hooks: instances, classes, or functions marked with `@on`."""
    callbacks: Iterable[Any]
    """Further hooks; the same as `hooks`."""
    logger: bool | Logger | Iterable[Logger]
    """Where metrics go: a Logger or several. True: log.jsonl in the run's directory. False: nowhere."""
    strategy: str | Strategy
    """Devices and ranks: 'auto' (DDP if several processes were started), 'single', 'ddp', 'fsdp', or a Strategy."""
    device: str | torch.device
    """The device of this process: 'cpu', 'cuda', 'cuda:1', 'mps'. 'auto': an accelerator if there is one."""
    precision: str | int
    """32, 'bf16-mixed' or '16-mixed'."""
    config: Any
    """Settings of your own. Hooks ask for them as `config`."""
    accounting: bool
    """Count the calls and the time of every hook."""


class OptionArguments(
    HowLongArguments,
    UpdateArguments,
    ValidationArguments,
    LimitsArguments,
    AroundArguments,
    FailuresArguments,
):
    """`Options` as keyword arguments."""


class TrainerArguments(OptionArguments, PartsArguments):
    """All keyword arguments of `Trainer`."""
