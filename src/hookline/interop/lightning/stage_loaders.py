"""The loaders of a stage as Lightning's trainer takes them: combined in the user's structure, checked with
Lightning's own functions, and limited.
"""

from __future__ import annotations

import inspect
from collections import UserList
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from hookline.data.loaders import Loader
from hookline.data.sharding import RankSharding, rank_batches, shard_plan_for
from hookline.interop.lightning.loaders import CombinedBatches, SideBySide, Turns
from hookline.interop.lightning.package import find, possible, warn
from hookline.interop.lightning.shared_stream import SharedStreamLoader, in_sequence, is_in_sequence
from hookline.run.run import Run

STAGES = {"train": "train", "val": "validate", "test": "test", "predict": "predict"}
"""Lightning's running stage, by the kind of the loaders."""
STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
HOOKS = {
    "val": ("validation_step", "on_validation_batch_start", "on_validation_batch_end"),
    "test": ("test_step", "on_test_batch_start", "on_test_batch_end"),
    "predict": ("predict_step", "on_predict_batch_start", "on_predict_batch_end"),
}
"""Methods of a module that get the index of the loader if there are several."""


class StageLoaders:
    """The loaders of one kind: Lightning's combination of them, and how many batches of each are read."""

    def __init__(self, run: Run, given: Any, kind: str, limit: int | float) -> None:
        self.run, self.kind = run, kind
        self.combined = self._combine(_original(given))
        if run.options.overfit_batches and run.stage == "fit":
            self._read_in_sequence()
        self._check()
        self.limits = [self._batches_of(each, limit) for each in self.combined.flattened]
        """The number of batches of each loader; infinite if it has no length."""
        self._check_arguments()

    @property
    def is_sequential(self) -> bool:
        """Return whether the loaders are read one after the other."""
        return bool(self.combined._mode == "sequential")

    def loaders(self, sharding: RankSharding) -> list[Loader]:
        """Return the loaders that Hookline's loop reads: one for training, for others one or several."""
        made = self._readers(sharding)
        if sharding.ranks.alone and self._takes_iterator():
            return [
                SharedStreamLoader(
                    each.name, Turns(each.source, each.length, index, self.run), None, sharding=sharding
                )
                for index, each in enumerate(made)
            ]
        return made

    def _readers(self, sharding: RankSharding) -> list[Loader]:
        parts, combined = self.combined.flattened, self.combined
        is_one = len(parts) == 1 and parts[0] is combined.iterables
        if is_one or self.is_sequential:
            return [
                SharedStreamLoader(name, part, _length_of_limit(limit), sharding=sharding)
                for name, part, limit in zip(self._names(), parts, self.limits, strict=True)
            ]
        if sharding.ranks.alone:
            combined.limits = self.limits
        batches = CombinedBatches(combined)
        length = _length_of_limit(len(batches)) if all(each != float("inf") for each in self.limits) else None
        if length is None and combined._mode == "min_size":
            length = _length_of_limit(min(self.limits))
        return [SharedStreamLoader(self.kind, batches, length, sharding=sharding)]

    def _names(self) -> list[str]:
        """Return the name of each loader: its key in a dictionary of loaders, or its number."""
        given, count = self.combined.iterables, len(self.combined.flattened)
        if isinstance(given, Mapping) and len(given) == count:
            return [str(name) for name in given]
        return [self.kind] if count == 1 else [f"dl{index}" for index in range(count)]

    # ---- made and checked as Lightning does ----------------------------------------------------------------

    def _combine(self, given: Any) -> Any:
        combined = find("utilities.combined_loader", "CombinedLoader")
        if not isinstance(given, combined):
            made = combined(given, "max_size_cycle" if self.kind == "train" else "sequential")
            if is_list_of_batches(given):
                made = combined(UserList(given), made._mode)  # one loader, which it does not take apart
            return made
        if self.kind == "train" and given._mode == "sequential":
            raise ValueError(
                '`FitLoop` does not support the `CombinedLoader(mode="sequential")` mode: a training step '
                f"takes a batch from each loader. Pass one of {_other_modes()}."
            )
        if self.kind == "predict" and given._mode != "sequential":
            raise ValueError(
                '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode: each loader '
                f"has predictions of its own. This one has mode={given._mode!r}."
            )
        return given

    def _read_in_sequence(self) -> None:
        if all(map(is_in_sequence, self.combined.flattened)):
            return
        warn(
            f"You requested to overfit but enabled {self.kind} dataloader shuffling: overfit_batches reads "
            "the first batches in order, in every epoch."
        )
        self.combined.flattened = [in_sequence(each) for each in self.combined.flattened]

    def _check(self) -> None:
        """Check each loader, and warn of what makes it slow or its numbers surprising."""
        shown, name = self.run.trainer.lightning_trainer, f"{self.kind}_dataloader"
        check_iterable(self.run, self.kind, self.combined.flattened)
        is_shuffled = find("trainer.connectors.data_connector", "_is_dataloader_shuffled")
        for loader in self.combined.flattened:
            if self.kind != "train" and is_shuffled(loader):
                warn(
                    f"The sampler of the {name} shuffles. It is recommended to turn shuffling off for "
                    "val/test dataloaders: results of two passes are then comparable.",
                    possible(),
                )
            find("trainer.connectors.data_connector", "_worker_check")(
                trainer=shown, dataloader=loader, name=name
            )

    def _batches_of(self, loader: Any, limit: int | float) -> int | float:
        """Return how many batches of a loader are read on this rank."""
        shown, sharding = self.run.trainer.lightning_trainer, self._sharding
        owners = (self.run.module, shown.datamodule)
        allows_empty = any(
            getattr(each, "allow_zero_length_dataloader_with_multiple_devices", False) for each in owners
        )
        length: int | float | None = None
        if find("utilities.data", "has_len_all_ranks")(loader, shown.strategy, allows_empty):
            length = rank_batches(loader, shard_plan_for(loader, sharding), sharding.trains)
        stage = find("trainer.states", "RunningStage")(STAGES[self.kind])
        parse = find("trainer.connectors.data_connector", "_parse_num_batches")
        return parse(stage, float("inf") if length is None else length, limit)  # type: ignore[no-any-return]

    @property
    def _sharding(self) -> RankSharding:
        strategy = self.run.strategy
        return RankSharding(strategy.ranks, trains=self.kind == "train", is_sharded=strategy.shards_data)

    def _takes_iterator(self) -> bool:
        """Return whether the module's step takes `dataloader_iter` instead of a batch."""
        step = getattr(getattr(self.run.steps, "original", None), STEPS[self.kind], None)
        return step is not None and "dataloader_iter" in inspect.signature(step).parameters

    def _check_arguments(self) -> None:
        """Check that the hooks of a module take the loader's index if there are several, and only then."""
        module = getattr(self.run.steps, "original", None)
        verify = find("loops.utilities", "_verify_dataloader_idx_requirement")
        if self.kind == "train" or module is None or verify is None:
            return
        several = self.is_sequential and len(self.combined.flattened) > 1
        stage = find("trainer.states", "RunningStage")(STAGES[self.kind])
        hooks = [each for each in HOOKS[self.kind] if getattr(module, each, None) is not None]
        if self._takes_iterator():
            hooks = hooks[1:]
        elif not several:
            _check_signature(getattr(module, hooks[0]))
        verify(tuple(hooks), several, stage, module)


def _check_signature(step: Callable[..., Any]) -> None:
    """Refuse a step that requires more than a batch and its index, whatever it calls the loader's index."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        each.name
        for each in inspect.signature(step).parameters.values()
        if each.kind in kinds and each.default is each.empty and each.name != "dataloader_idx"
    ]
    if len(required) == 3:
        raise TypeError(
            f"{step.__qualname__}() missing 1 required positional argument: {required[2]!r}. With one "
            "loader it is called with a batch and its index."
        )


def check_iterable(run: Run, kind: str, loaders: list[Any]) -> None:
    """Raise Lightning's error for a loader that cannot be iterated over; None is one that is missing."""
    source = find("trainer.connectors.data_connector", "_DataLoaderSource")
    check = find("trainer.connectors.data_connector", "_check_dataloader_iterable")
    given, name = run.data.given.get(kind), f"{kind}_dataloader"
    owners = [getattr(each, "original", None) for each in (run.datamodule, run.steps)]
    instance = next((each for each in owners if each is not None), run.module) if given is None else given
    for loader in loaders:
        check(loader, source(instance, name), find("trainer.states", "TrainerFn")(run.stage))


def is_list_of_batches(given: Any) -> bool:
    """Return whether a list contains batches of tensors, which Hookline takes for one loader."""
    return (
        isinstance(given, list | tuple)
        and bool(given)
        and all(any(isinstance(leaf, Tensor) for leaf in tree_leaves(each)) for each in given)
    )


def _original(given: Any) -> Any:
    """Return loaders as the user passed them; the dialect's own classes have converted theirs."""
    if isinstance(given, CombinedBatches):
        return given.combined
    return given.given if isinstance(given, SideBySide) else given


def _length_of_limit(length: int | float) -> int | None:
    return None if length == float("inf") else int(length)


def _other_modes() -> str:
    modes: Mapping[str, Any] = find("utilities.combined_loader", "_SUPPORTED_MODES")
    return ", ".join(repr(each) for each in modes if each != "sequential")
