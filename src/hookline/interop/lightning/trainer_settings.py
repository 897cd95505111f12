"""Settings of Lightning's trainer as its attributes, with what follows from them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from hookline.interop.lightning.arguments import root_directory
from hookline.interop.lightning.profiling import make_profiler
from hookline.interop.lightning.trainer_view import TrainerView
from hookline.training.composition import set_accumulation
from hookline.training.loading import load

log = logging.getLogger("hookline")


def _setting(name: str, doc: str) -> Any:
    """Return a property that is an argument of the trainer, as it was passed or set since."""
    return property(lambda trainer: trainer._given[name], doc=doc)


class TrainerSettings(TrainerView):
    """The attributes of a trainer that its arguments decide; `_given` holds them by name."""

    # ---- settings ------------------------------------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        """Return the directory for files of loggers and callbacks."""
        return root_directory(self._given["default_root_dir"])

    @property
    def max_epochs(self) -> int | None:
        """Return the number of epochs to train; None before a fit if it was not set."""
        is_unset = self._given["max_epochs"] is None and self._own._fitted is None
        return None if is_unset and not self._own.options.fast_dev_run else int(self._own.options.max_epochs)

    @property
    def min_epochs(self) -> int | None:
        """Return the number of epochs to train at least; with `min_steps` it is 1 from the first fit on."""
        if self._given["min_epochs"] is not None:
            return int(self._own.options.min_epochs)
        return None if self._own._fitted is None else int(self.min_steps is not None)

    @property
    def current_epoch(self) -> int:
        """Return the current epoch, from 0; after a fit, the number of epochs."""
        fitted = self._own._fitted
        is_idle = fitted is not None and fitted.state.batches_seen == self._own.began
        return int(fitted.state.epochs_seen) if fitted is not None and is_idle else super().current_epoch

    @property
    def global_step(self) -> int:
        """Return the number of updates so far; after a tuner's loop, those of that loop until it restores."""
        inner = self.fit_loop.inner
        return super().global_step if inner is None else int(inner.step)

    @property
    def is_last_batch(self) -> bool:
        """Return whether the newest training batch is the last one of its epoch."""
        ready = self.fit_loop.epoch_loop.batch_progress.current.ready
        return bool(ready) and bool(ready >= self.num_training_batches)

    min_steps = _setting("min_steps", "Return the number of updates to make at least.")

    def set_limit(self, name: str, value: Any) -> None:
        """Change max_epochs, min_epochs, max_steps or min_steps, also for the next fit."""
        self._given[name] = value
        unset = {"min_epochs": 0, "min_steps": 0, "max_steps": -1, "max_epochs": -1}
        setattr(self._own.options, name, unset[name] if value is None else value)

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Return the epochs between validations; None: batches are counted through the run."""
        return None if self._own.rules.across_epochs else int(self._own.options.check_val_every_n_epoch)

    reload_dataloaders_every_n_epochs = _setting(
        "reload_dataloaders_every_n_epochs", "Return after how many epochs loaders are made anew; 0: never."
    )

    @property
    def num_training_batches(self) -> int | float:
        """Return the batches of a training epoch; infinite without a length or before the data is loaded."""
        run = self._own._fitted
        if run is None or run.data.train is None or self._own.options.limit_train_batches == 0:
            return float("inf")
        length = getattr(run.data.train, "_whole", run.data.train.length)
        return float("inf") if length is None else int(length)

    def _shown_loaders(self, kind: str) -> Any:
        made = self._own.rules.made.get(kind)
        return super()._shown_loaders(kind) if made is None else made.combined.iterables

    def _lengths(self, kind: str) -> list[int | float]:
        made = self._own.rules.made.get(kind)
        return super()._lengths(kind) if made is None else list(made.limits)

    @property
    def val_check_batch(self) -> int | float | None:
        """Return the batches between validations, from the first fit on; None if they are timed."""
        run, every = self._own._fitted, self._own.options.val_check_interval
        is_unknown = run is None or run.data.train is None or self._own.options.limit_train_batches == 0
        if is_unknown or self._given["val_check_seconds"] is not None:
            return None
        if isinstance(every, int) or self.num_training_batches == float("inf"):
            return every if isinstance(every, int) else float("inf")
        return max(1, int(self.num_training_batches * every))

    _val_check_time_interval = _setting(
        "val_check_seconds",
        "Return the seconds between validations; ModelCheckpoint then saves after validations only.",
    )

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Return the number of batches of each validation loader in the sanity check of the last fit."""
        run = self._own._fitted
        lengths = [each.length for each in run.data.loaders.get("val", ())] if run is not None else []
        most = self.num_sanity_val_steps
        return [most if each is None else min(each, most) for each in lengths]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return the number of updates that the fit will make; it loads the training data if necessary."""
        options = self._own.options
        if options.max_epochs == -1:
            return float("inf") if options.max_steps == -1 else int(options.max_steps)
        run = self._own._run
        if run is not None and "train" not in run.data.loaders:
            log.info("Loading `train_dataloader` to estimate number of stepping batches.")
            load(run, "train")
        batches = self.num_training_batches
        if batches == float("inf"):
            return int(options.max_steps)
        steps = math.ceil(batches / self.accumulate_grad_batches) * max(int(options.max_epochs), 1)
        return min(steps, int(options.max_steps)) if options.max_steps != -1 else steps

    @property
    def fast_dev_run(self) -> int | bool:
        """Return whether this only tries out whether everything works, or with how many batches."""
        batches = self._own.options.fast_dev_run
        return True if batches == 1 else batches

    log_every_n_steps = _setting(
        "log_every_n_steps", "Return the updates between rows of the log; 0: no rows of steps."
    )

    gradient_clip_val = _setting("gradient_clip_val", "Return the largest norm or value of gradients.")

    @property
    def gradient_clip_algorithm(self) -> Any:
        """Return how gradients are clipped, in Lightning's enumeration; None if it was not set."""
        given = self._given["gradient_clip_algorithm"]
        kind = self.of_lightning("utilities.enums", "GradClipAlgorithmType")
        return given if given is None or kind is None else kind(getattr(given, "value", given))

    barebones: Any = _setting("barebones", "Return whether everything that costs time is switched off.")

    @property
    def accumulate_grad_batches(self) -> int:
        """Return the batches that make one update; a value that a callback sets stays."""
        return int(self._own.options.accumulate_grad_batches)

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        self._own.options.accumulate_grad_batches = batches
        if self._own._run is not None:
            set_accumulation(self._own._run, batches)

    @property
    def profiler(self) -> Any:
        """Return the profiler; without one Lightning's that measures nothing."""
        return self._given["profiler"] or super().profiler

    @profiler.setter
    def profiler(self, profiler: Any) -> None:
        self._given["profiler"] = make_profiler(profiler)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make the parameters of a module on its device and in its precision; with `empty_init`, without
        values.
        """
        empty: Any = EmptyInit() if empty_init else contextlib.nullcontext()
        with self._own.device, self.precision_plugin.module_init_context(), empty:
            yield


class EmptyInit(TorchFunctionMode):
    """Leaves out the functions of `torch.nn.init`, because a checkpoint will replace the values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
