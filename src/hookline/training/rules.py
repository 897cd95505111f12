"""Decisions of the training loop that trainers take differently: how loaders are read, when to validate, what
counts as a step.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hookline.data.loaders import Loader, make_loaders
from hookline.data.sharding import RankSharding
from hookline.run.optimizers import Schedule
from hookline.run.run import Run
from hookline.util.errors import OptionError, closest

log = logging.getLogger("hookline")


class LoopRules:
    """Hookline's decisions. The trainer of another package derives from this class and sets
    `Trainer.rules`.
    """

    averages_short_windows = True
    """Whether an accumulation window with fewer losses than planned is the mean of those it has."""
    counts_every_optimizer = False
    """Whether each optimizer that a manual step calls advances `step`, not only the first of a batch."""
    refuses_empty_data = True
    """Whether a loader without batches, or a fit in which no batch had a loss, is an error."""
    stops_at_nonfinite = True
    """Whether a loss or weights that are not finite end the run, and are not saved."""
    shows_counts_of_evaluated_file = True
    """Whether an evaluation of a checkpoint shows the step and the epoch of the checkpoint."""
    starts_resumed_epochs = True
    """Whether a run that resumes inside an epoch emits on_train_epoch_start again."""
    accumulates_with_closures = False
    """Whether an optimizer that recomputes the loss may be combined with gradient accumulation."""
    advances_on_metrics = True
    """Whether the fit advances the learning-rate schedules that need a metric, and not only the others."""
    undoes_abandoned_validations = True
    """Whether a validation that a signal ends leaves no trace in the checkpoint: state is kept before it."""

    unrecorded_options: tuple[str, ...] = ()
    """Options that the trainer of another package sets itself, so that run.json does not have them."""

    def uses_inference_mode(self, run: Run) -> bool:
        """Return whether the steps of an evaluation run under torch.inference_mode."""
        return run.options.evaluating.inference_mode

    def make_loaders(
        self, run: Run, given: Any, limit: int | float, kind: str, sharding: RankSharding
    ) -> list[Loader]:
        """Return the loaders of a kind for what the user passed or returned."""
        return make_loaders(given, limit, kind, sharding)

    def loaded(self, run: Run, kind: str) -> None:
        """Prepare the loaders of a kind that were just made; they are opened when they are first read."""

    def overfitted(self, loader: Loader) -> Loader:
        """Return a loader of this rank's first batches, so that every epoch overfits on the same ones."""
        batches = list(itertools.islice(loader.batches(), loader.length))
        return Loader(loader.name, batches, len(batches), sharding=replace(loader.sharding, is_sharded=False))

    def sanity_check(self, run: Run, load: Callable[[], Any], start: Callable[[], None]) -> bool:
        """Load the validation data, then start the sanity check; return False if there is no data."""
        if not load():
            return False
        start()
        return True

    def begin_epoch(self, run: Run) -> None:
        """Prepare the training data of the epoch; the loaders stay as they are."""

    def load_validation(self, run: Run, load: Callable[[], Any]) -> None:
        """Load the validation data before the training begins."""
        load()

    def has_validation(self, run: Run) -> bool:
        """Return whether this fit validates."""
        return bool(run.data.loaders["val"])

    def begin_validation(self, run: Run) -> bool:
        """Prepare the data of a validation in a fit; return whether there is any."""
        return True

    def end_validation(self, run: Run) -> None:
        """Do what follows a completed validation in a fit: nothing."""

    def scheduler_count(self, run: Run) -> int:
        """Return the number that the frequency of a scheduler with interval 'step' is applied to."""
        return run.state.step

    def waits_for_validation(self, run: Run, monitor: str) -> bool:
        """Return whether a metric is one of validations, and none has run in this epoch."""
        if run.progress.validated_at[0] == run.state.epoch or not self.has_validation(run):
            return False
        return (
            monitor not in run.state.metrics
            or monitor.startswith("val")
            or run.state.log.is_of_evaluation(monitor)
        )

    def report_missing_metric(self, run: Run, schedule: Schedule) -> None:
        """Raise because a scheduler's metric was not logged; with strict=False log a warning."""
        name, known = schedule.monitor or "", ", ".join(run.state.metrics) or "none yet"
        text = (
            f"lr_scheduler {type(schedule.scheduler).__name__} monitors {name!r}, which was not logged."
            f"{closest(name, run.state.metrics)} Metrics: {known}."
        )
        if schedule.strict:
            raise OptionError(text + " Pass 'strict': False to get a warning instead.")
        log.warning(text)

    def may_stop(self, run: Run) -> bool:
        """Return whether a requested stop takes effect now."""
        s, options = run.state, run.options
        return s.epochs_seen >= options.min_epochs and s.step >= options.min_steps

    def warn_of_other_hooks(self, run: Run, warn_of_hooks: Callable[[], None]) -> None:
        """Warn of saved state whose hook this run lacks, and of hooks without saved state."""
        warn_of_hooks()

    def match_optimizers(self, run: Run, refuse: Callable[[], None]) -> None:
        """Raise if the checkpoint to resume from has the state of other optimizers or schedulers."""
        refuse()

    def window_closed(self, run: Run) -> None:
        """Do what follows the last accumulation window of an epoch, after its update: nothing."""

    # ---- validation ----------------------------------------------------------------------------------------

    def validation_due(self, run: Run) -> Callable[[], bool] | None:
        """Return a function that the loop calls after each batch of the epoch: is a validation due?

        None: the epoch has none, or one at its end.
        """
        if not self.has_validation(run) or (run.state.epoch + 1) % run.options.check_val_every_n_epoch:
            return None
        every, progress = self.validation_interval(run), run.progress
        return (lambda: progress.position % every == 0) if every else None

    def validation_interval(self, run: Run) -> int:
        """Return the number of batches between two validations in an epoch; 0: at its end."""
        every, length = run.options.val_check_interval, epoch_length(run)
        if isinstance(every, int):
            if length is not None and every > length:
                raise OptionError(
                    f"val_check_interval={every} is never reached: an epoch has {length} batches. Batches "
                    f"are counted within an epoch: pass at most {length}, or validate every n epochs by "
                    "check_val_every_n_epoch."
                )
            return every
        if length is None:
            if every != 1.0:
                raise OptionError(
                    f"val_check_interval={every} is a fraction of an epoch, but the training loader has no "
                    "length; pass a whole number of batches."
                )
            return 0
        return max(1, int(length * every))

    def epoch_cut(self, run: Run) -> None:
        """Do what follows a signal that ends the epoch: nothing."""

    def validation_due_at_end(self, run: Run, complete: bool) -> bool:
        """Return whether to validate at the end of the epoch: once per epoch, or before an early stop."""
        if not self.has_validation(run) or (run.state.epoch + 1) % run.options.check_val_every_n_epoch:
            return False
        return (complete and run.options.val_check_interval == 1.0) or (
            not complete and run.boundary.is_stopping
        )


def epoch_length(run: Run) -> int | None:
    """Return the number of batches of a training epoch; None if the loader has no length."""
    length: int | None = run.data.train.began_with if run.data.is_mixture else run.data.train.length
    return length
