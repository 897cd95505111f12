"""Loaders as Lightning's trainer takes and reads them: combined in the user's structure, checked with
Lightning's own functions, limited, and read by their own iterators, with the random streams of the process.

A seeded program then gets the same batches from both trainers. A resume restores the streams from the start
of the epoch and reads up to the position.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import os
from collections import UserList
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hookline.data import seeding
from hookline.data.loaders import Loader, set_epoch
from hookline.data.readers import LoaderState, Reader, StateReader, read_again
from hookline.data.seeding import find_generators, put_back, rng_state, set_rng_state, states_of
from hookline.data.sharding import END, RankSharding, rank_batches, shard_plan_for
from hookline.data.sources import has_state
from hookline.data.workers import WorkerStart, end_workers, starting_workers
from hookline.interop.lightning.loaders import CombinedBatches, SideBySide, Turns
from hookline.interop.lightning.package import find, possible, warn
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
            modes = find("utilities.combined_loader", "_SUPPORTED_MODES")
            others = ", ".join(repr(each) for each in modes if each != "sequential")
            raise ValueError(
                '`FitLoop` does not support the `CombinedLoader(mode="sequential")` mode: a training step '
                f"takes a batch from each loader. Pass one of {others}."
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


# ---- loaders that are read by their own iterators ----------------------------------------------------------


INSTEAD = (
    "this trainer reads a loader by its own iterator, as Lightning does. A loader with state_dict and "
    "load_state_dict continues immediately."
)


class SharedStreamReader(Reader):
    """A reader that calls the source's own iterator with the streams of the process."""

    kind = "stream"
    how = "by its own iterator, with the random streams of the process; a resume reads the epoch again"
    caps = True

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self.generators = find_generators(
            source=source,
            sampler=getattr(source, "sampler", None),
            batch_sampler=getattr(source, "batch_sampler", None),
            dataset=None if getattr(source, "num_workers", 0) else getattr(source, "dataset", None),
        )
        self.streams: dict[str, Any] = {}
        """The random streams of the process when the pass began."""
        self.loader: Any = None
        """The object that is iterated over: the source, or a copy whose workers are safe from signals."""
        self.batches: Iterator[Any] | None = None

    def open(
        self, key: int, position: int, passed_over: int, limit: int | None, saved: LoaderState | None
    ) -> Iterator[Any]:
        """Return a new pass; a resumed one begins as it did before, and is read up to the position."""
        is_inside, now = saved is not None and saved["in_pass"], None
        if saved is not None:
            put_back(self.generators, saved["generators"])
            if is_inside and "streams" in saved:
                now = None if position else rng_state()
                set_rng_state(saved["streams"])
        self.begins, self.streams = states_of(self.generators), rng_state()
        # persistent workers belong to the object of the first pass
        if self.loader is None or not getattr(self.source, "persistent_workers", False):
            self.close()
            self.loader = with_safe_workers(self.source)
        with starting_workers(self.loader) if self.loader is not self.source else contextlib.nullcontext():
            self.batches = batches = iter(self.loader)
        if now is not None:  # a run that resumes before the first batch has restored its streams already
            set_rng_state(now)
        is_passed_over = position and (is_inside or saved is None)
        return read_again(batches, position, INSTEAD) if is_passed_over else batches

    def state(self, in_pass: bool, position: int) -> LoaderState:
        """Return the streams and generators at the start of the pass."""
        return {**super().state(in_pass, position), **({"streams": self.streams} if in_pass else {})}

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        for loader in parts_of(self.source):
            if isinstance(loader, DataLoader) and loader._iterator is not None:
                workers, loader._iterator = loader._iterator, None
                end_workers(workers)
        batches, self.batches, self.loader = self.batches, None, None
        end_workers(batches)


def with_safe_workers(source: Any) -> Any:
    """Return a copy of a loader whose workers ignore signals to the process group; others unchanged."""
    if not isinstance(source, DataLoader) or not source.num_workers:
        return source
    made = copy.copy(source)
    made.__dict__["_iterator"] = None
    made.__dict__["worker_init_fn"] = WorkerStart(source.worker_init_fn)
    return made


class SharedStateReader(StateReader):
    """The same for a source with a state of its own, which is restored instead of reading again."""

    def _start(self, key: int) -> Iterator[Any]:
        return iter(self.source)


class Ahead(Iterator[Any]):
    """An iterator that reads one batch ahead, to know the last one of a source without a length."""

    def __init__(self, batches: Iterator[Any], position: int, loader: Loader) -> None:
        self.batches, self.read, self.loader = batches, position, loader
        self.next = next(batches, END)

    def __next__(self) -> Any:
        batch, self.next = self.next, END
        if batch is END:
            raise StopIteration
        self.next = next(self.batches, END)
        self.read += 1
        if self.next is END:
            self.loader.length = self.read
        return batch


class SharedStreamLoader(Loader):
    """A loader of Lightning's trainer. With several processes it is Hookline's, which shards the data."""

    prepared: Iterator[Any] | None = None
    """The first pass of a training loader, which Lightning opens when it has the loader."""

    @property
    def reader(self) -> Reader:
        """Return the reader of this source; create it on first use."""
        if not self.sharding.ranks.alone:
            return super().reader
        if self._reader is None:
            self._reader = (
                SharedStateReader(self.source, self.source, self.shard_plan, self.sharding.trains)
                if has_state(self.source)
                else SharedStreamReader(self.source)
            )
        return self._reader

    def prepare(self) -> None:
        """Open the first pass."""
        if self.sharding.ranks.alone and self.length != 0:
            self.prepared = self._read(0, None)
            self._epoch = 0  # a checkpoint before its first batch is in this pass

    def open(self, epoch: int, position: int = 0, seed: int | None = None) -> Iterator[Any]:
        """Return the batches of an epoch from a position on."""
        if not self.sharding.ranks.alone:
            return super().open(epoch, position, seed)
        for part in parts_of(self.source):
            set_epoch(part, epoch if self.sampler_epoch is None else self.sampler_epoch)
        saved, self._restored, prepared, self.prepared = self._restored, None, self.prepared, None
        self.length, self._pass_start, self._epoch = self._whole, (position, position), epoch
        is_first = prepared is not None and saved is None and epoch == position == 0
        return prepared if prepared is not None and is_first else self._read(position, saved)

    def batches(self, epoch: int = 0) -> Iterator[Any]:
        """Return a pass for an evaluation; generators advance."""
        return self.open(epoch) if self.sharding.ranks.alone else super().batches(epoch)

    def _read(self, position: int, saved: LoaderState | None) -> Iterator[Any]:
        seed_workers(self.source)
        batches = self.reader.open(0, position, position, self.length, saved)
        if isinstance(self.source, Turns):
            self.source.loader = self
            return batches
        if self.length is None:
            return Ahead(batches, position, self)
        return itertools.islice(batches, max(0, self.length - position))


def parts_of(source: Any) -> list[Any]:
    """Return the loaders that a source consists of; of most sources, the source itself."""
    combined = getattr(source, "combined", source)
    parts = getattr(combined, "flattened", getattr(combined, "loaders", None))
    return list(parts) if isinstance(parts, list) else [source]


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch, with Lightning's arguments, and return the seed.

    seed: None takes PL_GLOBAL_SEED of the environment, or 0. workers, verbose: for Lightning's own function,
    which is called if the program has imported the package; torch seeds the workers of loaders without it.
    """
    if (theirs := find("", "seed_everything")) is not None:
        return int(theirs(seed, workers=workers, verbose=verbose))
    chosen = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
    seeding.seed_everything(chosen)
    return chosen


def seed_workers(source: Any) -> None:
    """Seed the workers after `seed_everything(seed, workers=True)`, as Lightning does."""
    if not int(os.environ.get("PL_SEED_WORKERS", "0")):
        return
    seed = find("seed", "pl_worker_init_function", "lightning.fabric.utilities")
    for part in parts_of(source):
        if seed is not None and getattr(part, "worker_init_fn", part) is None:
            part.worker_init_fn = partial(seed, rank=int(os.environ.get("RANK", "0")))


def is_in_sequence(loader: Any) -> bool:
    """Return whether a loader reads in the dataset's order, or has no sampler."""
    return isinstance(getattr(loader, "sampler", None), SequentialSampler | None)


def in_sequence(loader: Any) -> Any:
    """Return a DataLoader that does not shuffle, for `overfit_batches`; another source unchanged."""
    if not hasattr(loader, "dataset") or is_in_sequence(loader):
        return loader
    update = find("utilities.data", "_update_dataloader")
    if update is not None:
        return update(loader, SequentialSampler(loader.dataset))
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return loader
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    }
    order = BatchSampler(SequentialSampler(loader.dataset), loader.batch_size or 1, loader.drop_last)  # type: ignore[arg-type]
    return DataLoader(loader.dataset, batch_sampler=order, **options)
