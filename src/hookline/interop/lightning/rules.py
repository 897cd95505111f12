"""The decisions of Lightning's loops: when to load and to validate, how to accumulate, what is a step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

from hookline.data.loaders import Loader, make_loaders
from hookline.data.sharding import RankSharding
from hookline.engine.listener import overrides
from hookline.interop.lightning.binder import NAME_OF_HOOK, recording_name
from hookline.interop.lightning.checkpoint_file import LIGHTNING
from hookline.interop.lightning.loaders import has_source, one_of
from hookline.interop.lightning.package import is_lightnings, refusal, root, warn
from hookline.interop.lightning.stage_loaders import (
    SharedStreamLoader,
    StageLoaders,
    check_iterable,
    in_sequence,
    parts_of,
)
from hookline.run.optimizers import Schedule
from hookline.run.run import Run
from hookline.training.loading import asked_mixture, load
from hookline.training.rules import LoopRules, epoch_length
from hookline.training.saving import kinds
from hookline.util.errors import OptionError

log = logging.getLogger("hookline")

ZERO_GRAD = "on_validation_model_zero_grad"
"""A hook of Lightning that is called before the module is put into eval mode."""


def clears_before_eval(run: Run) -> bool:
    """Return whether a module clears its gradients before it is put into eval mode: in a fit outside an
    accumulation window. Lightning's trainer clears them itself (`LightningRules.begin_validation`).
    """
    in_fit = run.stage == "fit" and not run.state.sanity_checking and run.window.batches == 0
    return in_fit and not hasattr(run.trainer, "lightning_trainer")


class LightningRules(LoopRules):
    """What Lightning's trainer decides differently. `given`: the arguments of the trainer."""

    averages_short_windows = False
    counts_every_optimizer = True
    refuses_empty_data = False
    shows_counts_of_evaluated_file = False
    starts_resumed_epochs = False
    accumulates_with_closures = True
    undoes_abandoned_validations = False

    def waits_for_validation(self, run: Run, monitor: str) -> bool:
        """Return False: a schedule also advances on the value of an earlier epoch."""
        return False

    def uses_inference_mode(self, run: Run) -> bool:
        """Return whether evaluations run in inference mode: with one process, and not inside a fit."""
        by_default = self.given["inference_mode"] and run.stage != "fit" and run.strategy.ranks.alone
        return bool(by_default) or super().uses_inference_mode(run)

    def __init__(self, given: dict[str, Any], stops_at_nonfinite: bool = False) -> None:
        self.given, self.stops_at_nonfinite = given, stops_at_nonfinite
        self.loaded_at: dict[str, int] = {}
        """The epoch at which the loaders of a kind were made, for `reload_dataloaders_every_n_epochs`."""
        self.resumed_epoch: int | None = None
        """The epoch that the newest fit resumes inside of; None if it began with a whole one."""
        self.is_cut = False
        """Whether -1 from the module's `on_train_batch_start` has ended this epoch."""
        self.validated_at = 0.0
        """The time of the last validation, for a `val_check_interval` in seconds."""
        self._early_stop_logged: Run | None = None
        """The run in which a stop was requested too early, so that this is logged once."""
        self.made: dict[str, StageLoaders] = {}
        """The newest loaders of each kind, as the user has passed or returned them."""

    # ---- loaders -------------------------------------------------------------------------------------------

    def make_loaders(
        self, run: Run, given: Any, limit: int | float, kind: str, sharding: RankSharding
    ) -> list[Loader]:
        """Combine, check and limit the loaders with Lightning's own functions, if it is installed."""
        self.made.pop(kind, None)
        is_off = limit == 0 or (given is None and kind == "val" and run.stage == "fit")
        if given is None and not root() and run.stage != "fit":
            raise refusal(
                f"{run.stage}() needs a loader: pass one, or return it from {kind}_dataloader.", kind, None
            )
        if is_off or not root() or asked_mixture(run) is not None:
            made = make_loaders(one_of(given, kind), limit, kind, sharding)
            return [
                SharedStreamLoader(each.name, each.source, each.length, sharding=sharding) for each in made
            ]
        if given is None:
            check_iterable(run, kind, [given])
        self.made[kind] = StageLoaders(run, given, kind, limit)
        return self.made[kind].loaders(sharding)

    def loaded(self, run: Run, kind: str) -> None:
        """Open the training loader at once, which draws from the random streams.

        A fit that overfits reads the validation data in order, too.
        """
        if kind == "val" and run.stage == "fit" and run.options.overfit_batches:
            run.data.loaders[kind] = [self.overfitted(each) for each in run.data.loaders[kind]]
        if kind == "train":
            for loader in run.data.loaders["train"]:
                if isinstance(loader, SharedStreamLoader):
                    loader.prepare()
        if kind == "train" or not run.state.sanity_checking or self._is_epoch_to_validate(run):
            self.loaded_at[kind] = run.state.epochs_seen

    def overfitted(self, loader: Loader) -> Loader:
        """Return the loader: it reads the first batches in the dataset's order, in every epoch anew."""
        if root():
            return loader
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
        self.resumed_epoch = run.state.epoch if run.progress.position else None
        if self._is_epoch_to_validate(run):
            load()

    def has_validation(self, run: Run) -> bool:
        """Return whether this fit validates; before the data is loaded, whether there is a source of it."""
        if "val" in run.data.loaders:
            return bool(run.data.loaders["val"])
        if run.options.limit_val_batches == 0 or not overrides(run.steps, "validation_step"):
            return False
        return has_source(run, "val")

    def begin_epoch(self, run: Run) -> None:
        """Make the training loaders anew if `reload_dataloaders_every_n_epochs` asks for it."""
        self.is_cut = False
        run.state.counts.epoch = run.state.epochs_seen
        if run.trainer.lightning_trainer is not None:
            run.trainer.lightning_trainer._logger_connector.counts.begin_epoch(run)
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
            if kind == "val" and run.trainer.lightning_trainer is not None:
                run.trainer.lightning_trainer._logger_connector.counts.seen.clear()

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
        warn(f"{text} but strict is False: it is not advanced.", RuntimeWarning)

    def may_stop(self, run: Run) -> bool:
        """Return whether `min_epochs` and `min_steps` are reached."""
        enough = run.options.min_epochs or int(self.given["min_steps"] is not None)
        if run.state.epochs_seen >= enough and super().may_stop(run):
            return True
        if run.boundary.is_stopping and run is not self._early_stop_logged:
            self._early_stop_logged = run
            log.warning(
                "A stop was requested, but `min_epochs=%s` or `min_steps=%s` has not been met. Training will "
                "continue.",
                self.given["min_epochs"],
                self.given["min_steps"],
            )
        return False

    def warn_of_other_hooks(self, run: Run, warn_of_hooks: Callable[[], None]) -> None:
        """Warn, unless the file is one of Lightning, for which `LoopEvents` does at every stage."""
        if LIGHTNING not in run.resume.contents:
            warn_of_hooks()

    def match_optimizers(self, run: Run, refuse: Callable[[], None]) -> None:
        """Pair states with optimizers and schedulers by position, as Lightning does.

        Those without a state keep their own, and a scheduler does too if the state is of another class: a
        callback has replaced it during the run.
        """
        contents, s = run.resume.contents, run.state
        if LIGHTNING not in contents:
            refuse()
            return
        saved, here, count = contents["kinds"], kinds(s), len(contents["optimizers"])
        common = min(count, len(s.optimizers))
        if saved is not None and saved[:common] != here[:common]:
            refuse()
        was = here[len(s.optimizers) :] if saved is None else saved[count:]
        contents["optimizers"] = [
            *contents["optimizers"][:common],
            *(each.state_dict() for each in s.optimizers[common:]),
        ]
        pairs = itertools.zip_longest(s.schedulers, was, contents["schedulers"])
        contents["schedulers"] = [
            state if state is not None and name == type(each).__name__ else each.state_dict()
            for each, name, state in itertools.islice(pairs, len(s.schedulers))
        ]

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
        every, length = run.options.val_check_interval, epoch_length(run)
        if self.across_epochs and isinstance(every, int):
            return every
        if isinstance(every, int) and length is not None and every > length:
            raise refusal(
                f"val_check_interval={every} must be less than or equal to the number of the training "
                f"batches, {length}, because batches are counted in each epoch. To count them through the "
                "run, pass check_val_every_n_epoch=None; to switch validation off, limit_val_batches=0.",
                "val_check_interval",
                every,
            )
        if length is None and isinstance(every, float) and every != 1.0:
            raise refusal(
                f"val_check_interval={every} is a fraction of an epoch. When using an IterableDataset for "
                "`train_dataloader`, `Trainer(val_check_interval)` must be time based, `1.0` or an int.",
                "val_check_interval",
                every,
            )
        return super().validation_interval(run)

    def epoch_cut(self, run: Run) -> None:
        """Remember that the module has ended the epoch. A hook of Hookline that does so still validates, as
        does `on_batch_start` of the first Lightning.
        """
        method = "on_train_batch_start"
        self.is_cut = overrides(run.module, method) and not is_lightnings(getattr(run.module, method))

    def validation_due_at_end(self, run: Run, complete: bool) -> bool:
        """Validate before a requested stop takes effect, also at the end of an epoch, unless -1 ended it."""
        if self.is_cut or not self._is_epoch_to_validate(run):
            return False
        if run.boundary.is_stopping and self.may_stop(run):
            return True
        if self.given.get("val_check_seconds") is not None:
            return False
        by_epoch = run.options.val_check_interval == 1.0
        return complete and by_epoch and not (self.across_epochs and epoch_length(run) is not None)
