"""The names under which Lightning's trainer shows a run, read from Hookline's trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.metrics import Metrics


class MetricTensors(dict[str, Tensor]):
    """Metrics as tensors, as callbacks read them; what is put in becomes a metric of the run."""

    def __init__(self, newest: Metrics) -> None:
        super().__init__({name: _tensor(value) for name, value in newest.raw().items()})
        self._newest = newest

    def __setitem__(self, name: str, value: Any) -> None:
        self._newest[name] = value.detach() if isinstance(value, Tensor) else float(value)
        super().__setitem__(name, _tensor(value))

    def update(self, *given: Any, **named: Any) -> None:
        """Put several in."""
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __deepcopy__(self, memo: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.items()}  # a copy is the copier's own

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class LightningNames:
    """Facts of a run under Lightning's names. `_own` is Hookline's trainer."""

    _own: Any

    # ---- how far it is ------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> MetricTensors:
        """The newest values of what was logged, and Hookline's own `train/loss`, `val/loss`."""
        return MetricTensors(self._own.state.log.newest)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The same: Hookline sends the newest values to the loggers."""
        return dict(self.callback_metrics)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What was logged with `prog_bar=True`."""
        return Metrics(self._own.state.log.bar).read()

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation going on is the one before training."""
        return bool(self._own.state.sanity_checking)

    @property
    def training(self) -> bool:
        """Whether a fit is going on and no validation inside it."""
        state = self._own.state
        return state.stage == "fit" and self._own._run is not None and not self._evaluating

    @property
    def validating(self) -> bool:
        """Whether validation batches are being measured, in a fit or by themselves; not in the sanity check."""
        in_fit = self._own.state.stage == "fit" and self._evaluating and not self.sanity_checking
        return self._own.state.stage == "validate" or in_fit

    @property
    def testing(self) -> bool:
        """Whether this is a test."""
        return bool(self._own.state.stage == "test")

    @property
    def predicting(self) -> bool:
        """Whether this is a prediction."""
        return bool(self._own.state.stage == "predict")

    @property
    def evaluating(self) -> bool:
        """Whether this is a validation, the sanity check or a test."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def _evaluating(self) -> bool:
        """In a fit: every submodule's mode is kept aside while an evaluation lasts."""
        return bool(self._own.state.modes)

    @property
    def is_last_batch(self) -> bool:
        """Whether this is the epoch's last training batch."""
        run, length = self._own._last, self._own.num_training_batches
        if run is None or length is None:
            return False
        begun = run.position if self._evaluating else self._own.state.batch_idx + 1  # in a validation, batch_idx is its own
        return bool(begun >= length)

    @property
    def interrupted(self) -> bool:
        """Whether a signal or Ctrl-C has ended the run."""
        return self._own.status in ("interrupted", "preempted")

    # ---- what it was told ---------------------------------------------------------------------------------------

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train; None or -1: no limit."""
        return self._own.options.max_epochs  # type: ignore[no-any-return]

    @property
    def min_epochs(self) -> int | None:
        """Epochs to train at least."""
        return self._own.options.min_epochs or None

    @property
    def max_steps(self) -> int:
        """Updates to make; -1: no limit."""
        return int(self._own.options.max_steps)

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches that make one update. A callback may set it at the beginning of an epoch."""
        run = self._own._run
        return int(self._own.options.accumulate_grad_batches if run is None else run.accumulate)

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        run = self._own._run
        if run is None:
            self._own.options.accumulate_grad_batches = batches
            return
        run.accumulate = batches
        if batches == 1:  # a window of one batch needs no size and keeps no losses
            run.window.size, run.state.window_losses = 1, None

    @property
    def val_check_interval(self) -> int | float:
        """Batches, or the fraction of an epoch, between validations."""
        return self._own.options.val_check_interval  # type: ignore[no-any-return]

    @property
    def check_val_every_n_epoch(self) -> int:
        """Epochs between validations."""
        return int(self._own.options.check_val_every_n_epoch)

    @property
    def limit_train_batches(self) -> int | float:
        """Batches of an epoch that are used, or the fraction of them."""
        return self._own.options.limit_train_batches  # type: ignore[no-any-return]

    @property
    def limit_val_batches(self) -> int | float:
        """Batches of a validation that are used, or the fraction of them."""
        return self._own.options.limit_val_batches  # type: ignore[no-any-return]

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Validation batches before training."""
        steps = self._own.options.num_sanity_val_steps
        return float("inf") if steps < 0 else int(steps)

    @property
    def log_every_n_steps(self) -> int:
        """Updates between rows of the log."""
        return int(self._own.options.log_every_n_steps)

    @property
    def fast_dev_run(self) -> bool | int:
        """Whether this only tries out whether everything works."""
        return self._own.options.fast_dev_run  # type: ignore[no-any-return]

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest norm or value of gradients."""
        return self._own.options.gradient_clip_val  # type: ignore[no-any-return]

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """'norm' or 'value'; None without clipping."""
        options = self._own.options
        return options.gradient_clip_algorithm if options.gradient_clip_val is not None else None

    @property
    def precision(self) -> str:
        """The numbers it computes with: '32-true', '16-mixed' or 'bf16-mixed'."""
        name = str(self._own.strategy.precision.name)
        return "32-true" if name == "32" else name

    @property
    def default_root_dir(self) -> str:
        """Where a callback writes if it was told nothing else: the run's directory."""
        return str(self._own.run_dir.absolute())

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the run went on from."""
        run = self._own._last
        return str(run.resume_from) if run is not None and run.resume_from is not None else None

    # ---- who takes part -----------------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Any]:
        """The hooks, as they were given."""
        return list(self._own.hooks)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Those that save."""
        return [each for each in self.callbacks if hasattr(each, "best_model_path")]

    @property
    def checkpoint_callback(self) -> Any:
        """The first of those that save, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Those that stop early."""
        return [each for each in self.callbacks if any(cls.__name__ == "EarlyStopping" for cls in type(each).__mro__)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first of those that stop early, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> None:
        """Hookline's progress bar is a hook with another interface."""
        return None

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self._own.state.module

    @property
    def datamodule(self) -> Any:
        """The data module, as it was given."""
        run = self._own._last
        return getattr(run.datamodule, "original", run.datamodule) if run is not None else None

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers with `scheduler`, `interval`, `frequency`, `monitor`, `name`."""
        return list(self._own.schedules)

    @property
    def train_dataloader(self) -> Any:
        """The training loader as it was given, or a list of them."""
        return _one_or_all(self._loaders("train"))

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader as it was given, or a list of them."""
        return _one_or_all(self._loaders("val"))

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""
        return self._lengths("val")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader."""
        return self._lengths("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict on."""
        return self._lengths("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader that are tried out before training."""
        most = self._own.options.num_sanity_val_steps
        return [each if most < 0 else min(each, most) for each in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates."""
        return bool(self._loaders("val"))

    def _loaders(self, kind: str) -> list[Any]:
        run = self._own._last
        return [each.source for each in run.loaders.get(kind, ())] if run is not None else []

    def _lengths(self, kind: str) -> list[int | float]:
        known: Mapping[str, int | None] = self._own.num_batches(kind)
        return [float("inf") if length is None else length for length in known.values()]

    # ---- processes ----------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes."""
        return bool(self._own.strategy.rank == 0)

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return int(self._own.strategy.rank)

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return int(self._own.strategy.local_rank)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return int(self._own.strategy.world_size)

    @property
    def num_devices(self) -> int:
        """The number of devices, one for each process."""
        return self.world_size

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank zero only."""
        if self.is_global_zero:
            print(*args, **kwargs)


def _tensor(value: Any) -> Tensor:
    return value.detach().to(torch.get_default_dtype()) if isinstance(value, Tensor) else torch.tensor(float(value))


def _one_or_all(loaders: list[Any]) -> Any:
    return loaders[0] if len(loaders) == 1 else loaders or None
