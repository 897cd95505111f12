"""The loops of Lightning's trainer as callbacks see them: their progress, limits and data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch.utils.data import IterableDataset, RandomSampler

from hookline.interop.lightning.loaders import has_source
from hookline.interop.lightning.package import is_a, warn
from hookline.interop.lightning.progress import (
    Automatic,
    BatchProgress,
    EpochProgress,
    EvaluationBatches,
    ManualSteps,
    SchedulerSteps,
    ValidationBatches,
    fit_of,
    loops,
)
from hookline.interop.lightning.table import without_loss
from hookline.interop.lightning.trainer_parts import Part, ShownAs, missing
from hookline.run.state_parts import fact
from hookline.training.actions import install_action
from hookline.training.loading import load


class DataSource(Part):
    """`loop._data_source`: where the loaders come from."""

    def is_module(self) -> bool:
        """Return whether a module or data module returns them, and not the caller of the stage."""
        run = self._own._last
        return run is None or all(each is None for each in run.data.given.values())


class ValidationSource(DataSource):
    """`fit_loop.epoch_loop.val_loop._data_source`."""

    def is_defined(self) -> bool:
        """Return whether there is validation data: given, or of the module or data module."""
        return has_source(self._own._run, "val")


class DataLoop(ShownAs):
    """A loop over data: of training, of an evaluation inside or outside of it, of a prediction."""

    PARTS: ClassVar[Mapping[str, type[Part]]] = {
        "_data_source": DataSource,
        "batch_progress": EvaluationBatches,
    }
    _kind = ""

    @property
    def restarting(self) -> bool:
        """Return whether this is the rest of an epoch that a fit resumes inside of."""
        run = self._own._run
        if run is None or run.stage != "fit":
            return False
        return bool(run.state.epoch == getattr(run.traits.rules, "resumed_epoch", None))

    @restarting.setter
    def restarting(self, is_restarting: bool) -> None:
        pass

    @property
    def verbose(self) -> bool:
        """Return whether results are printed."""
        return bool(self.__dict__.get("_verbose", True))

    @verbose.setter
    def verbose(self, is_verbose: bool) -> None:
        self.__dict__["_verbose"] = is_verbose

    @property
    def max_batches(self) -> Any:
        """Return the number of batches of each loader."""
        return self._view._lengths(self._kind)

    _max_batches: Any = fact("max_batches")

    @property
    def num_dataloaders(self) -> int:
        """Return the number of loaders."""
        return len(self._own.num_batches(self._kind))

    @property
    def inference_mode(self) -> bool:
        """Return whether the pass runs in torch's inference mode."""
        return bool(vars(self._view).get("_given", {}).get("inference_mode", True))

    @property
    def _combined_loader(self) -> Any:
        """Return the loaders as Lightning combines them; None before they are loaded."""
        rules, loaders = getattr(self._own, "rules", None), self._view._loaders(self._kind)
        if not loaders:
            return None
        if (made := getattr(rules, "made", {}).get(self._kind)) is not None:
            return made.combined
        return self._view.of_lightning("utilities.combined_loader", "CombinedLoader")(loaders, "sequential")

    @_combined_loader.setter
    def _combined_loader(self, nothing: None) -> None:
        """Request the loaders again; a pass that has begun continues with the new ones."""
        run = self._own._run
        if run is not None and (old := run.data.loaders.pop(self._kind, None)) is not None:
            old[:] = load(run, self._kind)
            run.data.loaders[self._kind] = old

    def setup_data(self) -> None:
        """Request the loaders unless they are there."""
        if self._own._run is not None:
            load(self._own._run, self._kind)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run."""
        return dict(self._own.state.counts.state_dict())

    inner: Any = None
    """The state of the run inside this one, from its end until the progress is restored."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Show the progress of this run again; a run inside it has its own, so this one is unchanged."""
        self.__dict__.pop("inner", None)

    def reset(self) -> None:
        """Do nothing: each run begins anew."""

    def run(self) -> None:
        """Run the loop of the current stage from within one of its hooks."""
        self.__dict__["inner"] = self._view.run_loop_again()


class EvaluationLoop(DataLoop):
    """`trainer.fit_loop.epoch_loop.val_loop`, `trainer.validate_loop` and `trainer.test_loop`."""

    _kind = "val"
    _shown_as = ("loops", "_EvaluationLoop")

    @property
    def _has_run(self) -> bool:
        return bool(self._own._last is not None and self._own._last.progress.validated_at != (-1, -1))


class ValidationLoop(EvaluationLoop):
    """`trainer.fit_loop.epoch_loop.val_loop`."""

    PARTS: ClassVar[Mapping[str, type[Part]]] = {
        **DataLoop.PARTS,
        "_data_source": ValidationSource,
        "batch_progress": ValidationBatches,
    }


class TestLoop(EvaluationLoop):
    """`trainer.test_loop`."""

    _kind = "test"


class PredictionLoop(DataLoop):
    """`trainer.predict_loop`."""

    _kind = "predict"
    _shown_as = ("loops", "_PredictionLoop")

    @property
    def predictions(self) -> list[Any]:
        """Return the predictions so far, a list of each loader's; only the list if there is one loader."""
        made = self._own.state.predictions
        return list(made[0] if len(made) == 1 else made)

    @property
    def current_batch_indices(self) -> list[int]:
        """Return the positions in the dataset of this batch's samples; empty if they are not known."""
        state = self._own.state
        loader = self._view._loaders("predict")[state.dataloader_idx]
        known = itertools.islice(_batches_of_indices(loader), state.batch_idx, None)
        found = next(known, [])
        if not found and state.batch_idx == 0:  # once in each pass
            warn(f"Couldn't infer the batch indices fetched from your dataloader: {type(loader).__name__}.")
        return found

    @property
    def writes_at_end(self) -> bool:
        """Return whether a callback writes all predictions at the end of the pass."""
        return any(each.interval.on_epoch for each in self._view.callbacks if is_a(each, WRITER))

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        """Return the positions of the samples of every batch, for each loader; none if no callback writes
        them at the end.
        """
        lengths = self._view._lengths("predict")
        if not self.writes_at_end:
            return [[] for _ in lengths]
        return [
            [each for index, each in enumerate(_batches_of_indices(loader)) if index < length]
            for loader, length in zip(self._view._loaders("predict"), lengths, strict=True)
        ]


WRITER = "BasePredictionWriter"


def _batches_of_indices(loader: Any) -> Iterator[list[int]]:
    """Yield the positions of each batch; none if the order is random, or a batch is not made of samples."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return
    if batches is not None and not isinstance(getattr(batches, "sampler", None), RandomSampler):
        yield from ([int(each) for each in batch] for batch in batches)


def _limit(name: str, doc: str) -> Any:
    """Return a property that is a limit of the training, which a callback may change."""
    return property(
        lambda loop: getattr(loop._view, name), lambda loop, value: loop._view.set_limit(name, value), doc=doc
    )


class EpochLoop(Part):
    """`trainer.fit_loop.epoch_loop`."""

    PARTS: ClassVar[Mapping[str, type[Part]]] = {
        "batch_progress": BatchProgress,
        "scheduler_progress": SchedulerSteps,
        "val_loop": ValidationLoop,
        "automatic_optimization": Automatic,
        "manual_optimization": ManualSteps,
    }

    @property
    def batch_idx(self) -> int:
        """Return the number of the batch in this epoch; -1 before the first."""
        return int(self.batch_progress.current.ready) - 1

    global_step: int = fact("_view.global_step", "Return the number of updates so far.")

    @property
    def total_batch_idx(self) -> int:
        """Return the number of training batches so far, minus one."""
        return int(self.batch_progress.total.ready) - 1

    max_steps = _limit("max_steps", "Return the number of updates to make; -1: no limit.")
    min_steps = _limit("min_steps", "Return the number of updates to make at least.")
    restarting = DataLoop.restarting

    @property
    def _batches_that_stepped(self) -> int:
        shown = getattr(self._own, "lightning_trainer", None)
        return int(
            self._own.global_step if shown is None else shown._logger_connector.counts.batches_that_stepped
        )

    @property
    def _is_training_done(self) -> bool:
        return 0 <= self.max_steps <= self.global_step or self._num_ready_batches_reached()

    def _num_ready_batches_reached(self) -> bool:
        return bool(self.batch_progress.is_last_batch)

    def _should_accumulate(self) -> bool:
        ready, every = self.batch_progress.current.ready, self._view.accumulate_grad_batches
        return ready % every != 0 and not self._num_ready_batches_reached()

    def _should_check_val_epoch(self) -> bool:
        every = self._view.check_val_every_n_epoch
        return self._view.enable_validation and (every is None or (self._view.current_epoch + 1) % every == 0)


class FitLoop(DataLoop):
    """`trainer.fit_loop`: the progress and the limits of the training."""

    PARTS: ClassVar[Mapping[str, type[Part]]] = {
        "_data_source": DataSource,
        "epoch_loop": EpochLoop,
        "epoch_progress": EpochProgress,
    }
    _kind = "train"
    _shown_as = ("loops", "_FitLoop")

    @property
    def total_batch_idx(self) -> int:
        """Return the number of training batches so far, minus one; after `run`, those of that run."""
        inner = self.inner
        return int(self.epoch_loop.total_batch_idx if inner is None else inner.batches_seen - 1)

    batch_idx: int = fact("epoch_loop.batch_idx", "Return the number of the batch in this epoch.")

    global_step: int = fact("_view.global_step", "Return the number of updates so far.")

    max_steps: int = fact("epoch_loop.max_steps", "Return the number of updates to make; -1: no limit.")

    min_steps: int | None = fact("epoch_loop.min_steps", "Return the number of updates to make at least.")

    min_epochs = _limit("min_epochs", "Return the number of epochs to train at least.")
    max_epochs = _limit("max_epochs", "Return the number of epochs to train; -1: no limit.")

    @property
    def _can_stop_early(self) -> bool:
        run = fit_of(self._own)
        return bool(run is not None and run.traits.rules.may_stop(run))

    @property
    def done(self) -> bool:
        """Return whether a limit is reached."""
        epochs, most = self.epoch_progress.current.processed, self.max_epochs
        at_limit = (most is not None and 0 <= most <= epochs) or (
            0 <= self.max_steps <= self.epoch_loop.global_step
        )
        return at_limit or (bool(self._view.should_stop) and self._can_stop_early)

    @property
    def max_batches(self) -> int | float:
        """Return the batches per epoch; infinite if the loader has no length."""
        return self.__dict__.get("_max_batches", self._view.num_training_batches)  # type: ignore[no-any-return]

    @max_batches.setter
    def max_batches(self, batches: int | float) -> None:
        """Take a number that ends no epoch early, for callbacks that accumulate over a whole epoch."""
        if batches < self._view.num_training_batches:
            raise missing("trainer.fit_loop.max_batches = ...", type(self))
        self.__dict__["_max_batches"] = batches

    _should_accumulate: Any = fact("epoch_loop._should_accumulate")

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as a checkpoint contains it; empty before the first fit."""
        run, counts = fit_of(self._own), getattr(self._view._logger_connector, "counts", None)
        return {} if run is None or counts is None else loops(run, counts)["fit_loop"]

    @property
    def _skip_backward(self) -> bool:
        run = self._own._run
        return run is not None and "training_step" in vars(run.steps)

    @_skip_backward.setter
    def _skip_backward(self, skips: bool) -> None:
        """Train on nothing while it is set: the step only computes, as for batch-norm statistics."""
        run = self._own._run
        if run is None or skips == self._skip_backward:
            return
        if not skips:
            del run.steps.training_step
        else:
            compute = run.steps.training_step

            @functools.wraps(compute)
            def training_step(*batch: Any) -> Any:
                return without_loss(compute(*batch))

            run.steps.training_step = training_step
        install_action(run, "training_step")
