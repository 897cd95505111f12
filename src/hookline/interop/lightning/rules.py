"""The decisions of Lightning's loops: when to load and to validate, how to accumulate, what is a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from hookline.data.loaders import Loader
from hookline.engine.listener import overrides
from hookline.interop.lightning.binder import NAME_OF_HOOK, recording_name
from hookline.interop.lightning.shared_stream import SharedStreamLoader, in_sequence, parts_of
from hookline.run.optimizers import Schedule
from hookline.run.run import Run
from hookline.training.loading import load
from hookline.training.rules import LoopRules, epoch_length
from hookline.util.errors import OptionError

ZERO_GRAD = "on_validation_model_zero_grad"
"""A hook of Lightning that is called before the module is put into eval mode."""


class LightningRules(LoopRules):
    """What Lightning's trainer decides differently. `given`: the arguments of the trainer."""

    loader = SharedStreamLoader
    averages_short_windows = False
    counts_every_optimizer = True
    shows_counts_of_evaluated_file = False
    starts_resumed_epochs = False
    accumulates_with_closures = True
    undoes_abandoned_validations = False

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.loaded_at: dict[str, int] = {}
        """The epoch at which the loaders of a kind were made, for `reload_dataloaders_every_n_epochs`."""
        self.first_epoch = 0
        """The epoch at which the newest fit began."""
        self.validated_at = 0.0
        """The time of the last validation, for a `val_check_interval` in seconds."""

    # ---- loaders -------------------------------------------------------------------------------------------

    def loaded(self, run: Run, kind: str) -> None:
        """Open the training loader at once, which draws from the random streams."""
        if kind == "train":
            for loader in run.data.loaders["train"]:
                if isinstance(loader, SharedStreamLoader):
                    loader.prepare()
        if kind == "train" or not run.state.sanity_checking or self._is_epoch_to_validate(run):
            self.loaded_at[kind] = run.state.epochs_seen

    def overfitted(self, loader: Loader) -> Loader:
        """Read the first batches in the dataset's order, in every epoch anew."""
        parts = parts_of(loader.source)
        if parts == [loader.source]:
            loader.source = in_sequence(loader.source)
        else:
            parts[:] = [in_sequence(each) for each in parts]
        return loader

    def sanity_check(self, run: Run, load: Callable[[], Any], start: Callable[[], None]) -> bool:
        """Start the check, then load the validation data."""
        if not self.has_validation(run):
            return False
        start()
        return bool(load())

    def load_validation(self, run: Run, load: Callable[[], Any]) -> None:
        """Load the validation data only if the first epoch validates; a resumed run is at its next epoch."""
        run.state.counts.epoch = run.state.epochs_seen
        run.trainer.began = run.state.batches_seen
        self.first_epoch = run.state.epoch
        if self._is_epoch_to_validate(run):
            load()

    def has_validation(self, run: Run) -> bool:
        """Return whether this fit validates; before the data is loaded, whether there is a source of it."""
        if "val" in run.data.loaders:
            return bool(run.data.loaders["val"])
        if run.options.limit_val_batches == 0 or not overrides(run.steps, "validation_step"):
            return False
        given = run.data.given.get("val")
        owners = [each for each in (run.datamodule, run.steps) if each is not None]
        return (
            bool(given)
            if isinstance(given, list | tuple)
            else given is not None or any(overrides(each, "val_dataloader") for each in owners)
        )

    def begin_epoch(self, run: Run) -> None:
        """Make the training loaders anew if `reload_dataloaders_every_n_epochs` asks for it."""
        run.state.counts.epoch = run.state.epochs_seen
        self._reload(run, "train")

    def begin_validation(self, run: Run) -> bool:
        """Clear the gradients, unless an accumulation window is open, and load the data."""
        if not run.window.batches:
            clear = getattr(run.module, ZERO_GRAD, run.module.zero_grad)
            names = vars(run.module) if NAME_OF_HOOK in vars(run.module) else {NAME_OF_HOOK: None}
            recording_name(clear, ZERO_GRAD, names)()
        self._reload(run, "val")
        return bool(load(run, "val"))

    def end_validation(self, run: Run) -> None:
        """Remember the time."""
        self.validated_at = run.state.clock()

    def _reload(self, run: Run, kind: str) -> None:
        every: int = self.given["reload_dataloaders_every_n_epochs"]
        is_loaded = kind in run.data.loaders
        if every and is_loaded and run.state.epochs_seen - self.loaded_at.get(kind, -every) >= every:
            for loader in run.data.loaders.pop(kind):
                loader.close()
            load(run, kind)

    # ---- counting ------------------------------------------------------------------------------------------

    def scheduler_count(self, run: Run) -> int:
        """Return the number of batches of this epoch."""
        return run.state.batch_idx + 1

    def report_missing_metric(self, run: Run, schedule: Schedule) -> None:
        """Raise because a scheduler's metric was not logged; with strict=False warn."""
        known = sorted(run.trainer.lightning_trainer.callback_metrics)
        who = type(schedule.scheduler).__name__
        text = f"{who} conditioned on metric {schedule.monitor} which is not available"
        if schedule.strict:
            raise OptionError(
                f"{text}. Available metrics are: {known}. Set the key 'monitor' to one of them."
            )
        warnings.warn(f"{text} but strict is False: it is not advanced.", RuntimeWarning, stacklevel=2)

    def may_stop(self, run: Run) -> bool:
        """Return whether `min_epochs` and `min_steps` are reached."""
        enough = run.options.min_epochs or int(self.given["min_steps"] is not None)
        return run.state.epochs_seen >= enough and super().may_stop(run)

    # ---- validation ----------------------------------------------------------------------------------------

    @property
    def across_epochs(self) -> bool:
        """Return whether batches are counted through the whole run: `check_val_every_n_epoch=None`."""
        return self.given["check_val_every_n_epoch"] is None and not self.given["fast_dev_run"]

    def _is_epoch_to_validate(self, run: Run) -> bool:
        every = run.options.check_val_every_n_epoch
        return self.has_validation(run) and (self.across_epochs or (run.state.epochs_seen + 1) % every == 0)

    def validation_due(self, run: Run) -> Callable[[], bool] | None:
        """Count batches in the epoch, through the whole run, or seconds."""
        if not self._is_epoch_to_validate(run):
            return None
        if self.given.get("val_check_seconds") is not None:
            return lambda: self._is_time(run)
        if not self.across_epochs:
            return super().validation_due(run)
        every = self.validation_interval(run)
        return (lambda: run.state.batches_seen % every == 0) if every else None

    def _is_time(self, run: Run) -> bool:
        """Return whether the seconds of `val_check_interval` have passed since the last validation."""
        since = max(self.validated_at, run.traits.started)
        return bool(run.state.clock() - since >= self.given["val_check_seconds"])

    def validation_interval(self, run: Run) -> int:
        """Return the number of batches between two validations, which may be longer than an epoch if they
        are counted through the run.
        """
        if self.across_epochs and isinstance(run.options.val_check_interval, int):
            return run.options.val_check_interval
        return super().validation_interval(run)

    def validation_due_at_end(self, run: Run, complete: bool) -> bool:
        """Validate before a requested stop takes effect, also at the end of an epoch."""
        if not self._is_epoch_to_validate(run):
            return False
        if run.boundary.is_stopping and self.may_stop(run):
            return True
        if self.given.get("val_check_seconds") is not None:
            return False
        by_epoch = run.options.val_check_interval == 1.0
        return complete and by_epoch and not (self.across_epochs and epoch_length(run) is not None)
