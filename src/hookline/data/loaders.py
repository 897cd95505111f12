"""Loaders: their names, lengths and limits, and the position of a run in them."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hookline.data.exclusions import Exclusions, check_samples, known_samples, refuse_exclusion
from hookline.data.libraries import refused_state
from hookline.data.prefetch import prefetch_batches
from hookline.data.readers import ListReader, LoaderState, Reader, reader_for
from hookline.data.seeding import find_generators, key_of, put_back, states_of
from hookline.data.sharding import (
    OwnSource,
    RankSharding,
    ShardPlan,
    compare_sources,
    compared_batches,
    is_apart,
    padded_batches,
    rank_batches,
    shard_plan_for,
    units_of,
)
from hookline.data.sources import as_saved_now, changes, length_of, source_facts
from hookline.util.errors import CheckpointError, OptionError, described

log = logging.getLogger("hookline")
MOST_PASSES = 64
"""The number of passes whose generator states are kept."""

EVALUATION = 0
"""The seed of every evaluation, so that the training's seed does not change what is measured."""


@dataclass(slots=True)
class Loader:
    """One source of batches with its name and limit.

    The batches of a pass depend only on the seed, the epoch and the position, so that a pass can start at any
    batch, also in another process.
    """

    name: str
    source: Iterable[Any]
    length: int | None
    """Batches of this rank in the current pass, after the limit; None if unknown."""
    ahead: int = 0
    """Batches that a thread prefetches, if that does not change the training."""
    move: Callable[[Any], Any] | None = None
    """Moves a prefetched batch to the device."""
    sharding: RankSharding = field(default_factory=RankSharding)
    """How the ranks share the source."""
    seed: int | None = field(default=None, init=False)
    """The seed of the order; set when the first pass is opened, and saved in checkpoints."""
    sampler_epoch: int | None = field(default=None, init=False)
    """The epoch that samplers with `set_epoch` get, if it is not that of the order: an evaluation has one
    order.
    """
    keeps_indices: bool = field(default=False, init=False)
    """Whether `sample_ids` is called in the next pass."""
    exclusions: Exclusions = field(default_factory=Exclusions, init=False)
    """The samples that are left out of the order."""
    generator_states: dict[int, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)
    """The states of the sampler's generators at the start of the newest passes, by the pass's number."""
    first_batches: dict[int, tuple[int, Any]] = field(default_factory=dict, init=False, repr=False)
    """The number and the indices of the first batch drawn in the newest passes, by the pass's number."""
    shard_plan: ShardPlan = field(init=False, repr=False)
    _whole: int | None = field(init=False, repr=False)
    """Batches of this rank in a whole pass."""
    _lengths_differ: bool = field(default=False, init=False, repr=False)
    """Whether each rank has its own source, and their lengths differ or are unknown."""
    _is_agreed: bool = field(default=False, init=False, repr=False)
    _pass_start: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    """The start of the current pass in this process: this rank's batches, and all ranks' units, before it."""
    _reader: Reader | None = field(default=None, init=False, repr=False)
    _is_resized: bool = field(default=False, init=False, repr=False)
    """Whether the current pass continues from a state that was saved with another batch size."""
    _is_cut: bool = field(default=False, init=False, repr=False)
    """Whether samples are left out of the current pass, and it is not known in advance how many."""
    _epoch: int = field(default=-1, init=False, repr=False)
    _fetching: Generator[Any, None, None] | None = field(default=None, init=False, repr=False)
    _restored: LoaderState | None = field(default=None, init=False, repr=False)
    is_as_saved: bool = field(default=True, init=False)
    """Whether it yields the same batches as the loader that the checkpoint was saved with."""
    _before_newest: LoaderState | None = field(default=None, init=False, repr=False)
    """The state before a batch that was read ahead to check whether there is one."""

    def __post_init__(self) -> None:
        self._whole = self.length
        self.shard_plan = shard_plan_for(self.source, self.sharding)

    @property
    def first_length(self) -> int | None:
        """Return the batches of this rank in a whole pass."""
        return self._whole

    @property
    def is_exact(self) -> bool:
        """Return whether the length is certain; that of an iterable dataset may be an estimate."""
        return (
            not self._is_resized
            and not self._is_cut
            and length_of(self.source) is not None
            and not isinstance(getattr(self.source, "dataset", None), IterableDataset)
        )

    @property
    def reader(self) -> Reader:
        """Return the reader of this source; create it on first use."""
        if self._reader is None:
            self._reader = reader_for(
                self.source, self.shard_plan, self.sharding.trains, self.sharding.ranks.data_size
            )
        return self._reader

    def agree(self) -> None:
        """Check that all ranks have the same source, or that each has its own. Waits for all ranks."""
        if self._is_agreed or self.sharding.ranks.alone:
            return
        self._is_agreed = True
        apart = is_apart(self.source, self.sharding)
        # torchdata's sampler draws its seed when it is created, where each rank may have its own stream
        generators = {
            **find_generators(sampler=getattr(self.source, "sampler", None)),
            **self.reader.generators,
        }
        lengths = compare_sources(
            self.sharding.ranks,
            self.name,
            self.source,
            generators,
            self.length,
            apart,
            sorted(self.exclusions.pending),
        )
        if apart:
            known = [each for each in lengths if each is not None]
            self._lengths_differ = len(known) < len(lengths) or len(set(known)) > 1 or not self.is_exact
            self.length = self._whole = max(known) if len(known) == len(lengths) else None

    def open(self, epoch: int, position: int = 0, seed: int | None = None) -> Iterator[Any]:
        """Return an epoch's batches from a position on, without advancing the main process's random streams.

        Without a seed, draw one from torch's stream, once for all epochs. A seed from a checkpoint overrides
        both.
        """
        self.agree()
        reader = self.reader
        set_epoch(self.source, epoch if self.sampler_epoch is None else self.sampler_epoch)
        if self.seed is None and not isinstance(reader, ListReader):
            drawn = int(torch.randint(2**62, ()).item()) if seed is None else seed
            self.seed = self.sharding.ranks.from_zero(drawn)
        self.keep_generator_states()
        saved, self._restored, self._epoch, self._before_newest = self._restored, None, epoch, None
        in_pass = saved if saved is not None and saved["in_pass"] and reader.kind == "state" else None
        self._is_resized = in_pass is not None and self.has_other_batches(in_pass)
        self._begin(position, saved)
        reader.leave_out(self.exclusions.cuts(epoch))
        reader.keep_indices(self.keeps_indices)
        natural = rank_batches(self.source, self.shard_plan, self.sharding.trains)
        limit = None if self.length == natural or self._whole == natural else self.length
        batches = reader.open(
            key_of(self.seed or 0, epoch, self.name), position, self._pass_start[1], limit, saved
        )
        if self.shard_plan.world_size > 1 and not reader.is_sharded:
            self.shard_plan.short.clear()
            batches = self.shard_plan.batches(batches, position)
        if self.length is not None and not reader.caps:
            batches = itertools.islice(batches, max(0, self.length - position))
        if self.ahead and reader.may_run_ahead:
            self._fetching = batches = prefetch_batches(batches, self.ahead, self.move)
        if self.sharding.ranks.alone:
            return batches
        batches, ranks = self._describe_batches(batches, position), self.sharding.ranks
        return batches if ranks.data_size == ranks.world_size else compared_batches(batches, ranks, self.name)

    def _begin(self, position: int, saved: LoaderState | None) -> None:
        """Set the start of the pass in units of all ranks, so that another world size or batch size continues
        with the next unit.
        """
        passed_over = position * self.shard_plan.per_turn
        if saved is not None and saved["in_pass"] and saved["of_samples"] == self.shard_plan.of_samples:
            per_batch = (saved["facts"]["batch_size"] or 1) if self.shard_plan.of_samples else 1
            passed_over = position * per_batch if saved["passed_over"] is None else saved["passed_over"]
        self._pass_start, self.length = (position, passed_over), self._whole
        units = units_of(self.source, self.shard_plan, self.sharding.trains)
        left_out = self._open_exclusions(passed_over)
        if (
            (left_out or passed_over != position * self.shard_plan.per_turn)
            and units is not None
            and self._whole is not None
        ):
            units -= left_out
            rest = position + self.shard_plan.turns(max(0, units - passed_over))
            is_limited = self._whole != rank_batches(self.source, self.shard_plan, self.sharding.trains)
            self.length = min(rest, self._whole) if is_limited else rest

    def _open_exclusions(self, passed_over: int) -> int:
        """Let the exclusions take effect in this pass; return how many samples certainly fall out of it."""
        self.exclusions.open(self._epoch, passed_over)
        cuts = self.exclusions.cuts(self._epoch)
        if not cuts:  # else all indices of a sampler are read here, in each pass
            self._is_cut = False
            return 0
        known = known_samples(self.source) if self.shard_plan.of_samples else None
        self._is_cut = known is None or any(cut for cut, _ in cuts)
        certain = set[int]().union(*(samples for cut, samples in cuts if cut == 0))
        return 0 if known is None else sum(each in known for each in certain)

    def check_exclusion(self, samples: Iterable[int]) -> list[int]:
        """Return the indices of samples to leave out; raise if the loader cannot, or does not have them."""
        is_own = not self.sharding.ranks.alone and is_apart(self.source, self.sharding)
        refuse_exclusion(self.name, self.reader, is_own)
        return check_samples(self.name, samples, length_of(self.source.dataset))  # type: ignore[attr-defined]

    def keep_generator_states(self) -> None:
        """Keep the generator states and the first batch of the pass that is open, for `trainer.samples`."""
        self._keep(self.generator_states, self.reader.pass_generators())
        self._keep(self.first_batches, self.reader.pass_first())

    def _keep(self, kept: dict[int, Any], newest: Any) -> None:
        if newest and self._epoch >= 0:
            kept[self._epoch] = newest
            for number in sorted(kept)[:-MOST_PASSES]:
                del kept[number]

    @property
    def pass_start(self) -> tuple[int, int, int]:
        """Return where the open pass began in this process: its number, this rank's batches before it, and
        all ranks' samples or batches.
        """
        return (self._epoch, *self._pass_start)

    def _describe_batches(self, batches: Iterator[Any], position: int) -> Iterator[Any]:
        """Yield the batches; update `rank_batch` before each one."""
        rank_batch, shard_plan = self.sharding.rank_batch, self.shard_plan
        if self._lengths_differ:
            before_reading = (
                functools.partial(self._save_state, itertools.count(position))
                if self.reader.state_is_current
                else lambda: None  # the position alone determines the state
            )
            source = OwnSource(
                self.name, before_reading, lambda: self.reader.any_batch(key_of(self.seed or 0, self.name))
            )
            yield from padded_batches(batches, source, self.sharding.ranks, rank_batch)
        elif shard_plan.world_size == 1:
            rank_batch.is_padding, rank_batch.factor, rank_batch.samples = False, 1.0, None
            yield from batches
        else:
            for number, batch in enumerate(batches, position):
                shard_plan.describe(number, rank_batch)
                yield batch

    def _save_state(self, positions: Iterator[int]) -> None:
        self._before_newest = self.reader.state(True, next(positions))

    def batches(self, epoch: int = 0) -> Iterator[Any]:
        """Return a pass for an evaluation, always in the same order. Restore the loader's generators."""
        return (
            self._with_generators_restored(epoch)
            if self.reader.generators
            else self.open(epoch, 0, EVALUATION)
        )

    def _with_generators_restored(self, epoch: int) -> Iterator[Any]:
        before = states_of(self.reader.generators)
        try:
            yield from self.open(epoch, 0, EVALUATION)
        finally:
            put_back(self.reader.generators, before)

    def sample_ids(self, batch: int) -> list[int] | None:
        """Return the indices of a batch's samples in the dataset; None if they are not known.

        If the sampler does not return whole numbers, they are positions in its order.
        """
        drawn = self.reader.indices_of(batch)
        if not isinstance(drawn, list | tuple):  # not known, or one index for a whole batch
            return None
        if all(isinstance(each, Integral) and int(each) >= 0 for each in drawn):
            return [int(each) for each in drawn]
        plan = self.shard_plan
        first = batch * plan.per_turn + plan.rank
        return [first + each * plan.world_size for each in range(len(drawn))] if plan.of_samples else None

    def close(self) -> None:
        """End the prefetching thread and the workers."""
        if self._fetching is not None:
            self._fetching.close()
        if self._reader is not None:
            self._reader.close()

    def leave(self, saved: LoaderState) -> None:
        """Leave an unfinished pass, and end its workers. The loop loads the saved state when it opens the
        next pass.
        """
        self.close()
        self._fetching = self._before_newest = None

    def state_dict(self, epoch: int, position: int) -> LoaderState:
        """Return the state from which another process continues at this batch, as plain data and tensors."""
        if self._restored is not None:
            return self._restored  # nothing was read since the resume
        in_pass = self._epoch == epoch
        first, passed_over = self._pass_start
        passed_over += (position - first) * self.shard_plan.per_turn
        own = self.reader.state(in_pass, position) if self._before_newest is None else self._before_newest
        own = self.reader.checked(own, position) if in_pass else own
        return {
            "seed": self.seed,
            "kind": self.reader.kind,
            "in_pass": in_pass,
            "facts": self._facts(),
            "of_samples": self.shard_plan.of_samples,
            "passed_over": passed_over if in_pass else 0,
            **(self.exclusions.state_dict(epoch if in_pass else epoch - 1) if self.exclusions else {}),
            **own,
        }

    def has_other_batches(self, saved: LoaderState) -> bool:
        """Return whether the batch size or the world size differs from the saved state."""
        now = self._facts()
        was = as_saved_now(saved, now, self.shard_plan.of_samples)["facts"]
        return any(was[name] != now[name] for name in ("batch_size", "world_size"))

    def left_of(self, saved: LoaderState) -> int | None:
        """Return the batches that this rank has left in the pass of the saved state."""
        units = units_of(self.source, self.shard_plan, self.sharding.trains)
        if (
            units is None
            or saved.get("of_samples") != self.shard_plan.of_samples
            or saved["passed_over"] is None
        ):
            return None
        return self.shard_plan.turns(max(0, units - saved["passed_over"]))

    def _facts(self) -> dict[str, int | None]:
        apart = is_apart(self.source, self.sharding)
        units = units_of(self.source, self.shard_plan, self.sharding.trains)
        return source_facts(self.source, self._whole, units, self.sharding.ranks.data_size, apart)

    def load_state_dict(self, saved: LoaderState) -> None:
        """Start the next pass at the saved position. Log what has changed since."""
        self.seed = saved["seed"]
        self.exclusions.load_state_dict(saved)
        saved = as_saved_now(saved, self._facts(), self.shard_plan.of_samples)
        self.is_as_saved = (
            saved["kind"] == self.reader.kind
            and saved["facts"] == self._facts()
            and not self.exclusions.pending  # the next batch may be without some of its samples
        )
        was, now = saved["facts"]["workers"], self._facts()["workers"]
        if saved["kind"] == self.reader.kind == "state" and (refused := refused_state(self.source, was, now)):
            raise CheckpointError(f"The {self.name} loader {refused}")
        if self.sharding.ranks.rank == 0 or is_apart(self.source, self.sharding):
            for change in changes(saved, self.reader.kind, self._facts()):
                log.warning("The %s loader %s", self.name, change)
        if saved["kind"] == self.reader.kind:
            self._restored = saved


def set_epoch(source: Any, epoch: int) -> None:
    """Call `set_epoch` of the samplers and the dataset of a loader; of the source if not a DataLoader."""
    batch_sampler = getattr(source, "batch_sampler", None)
    owners: tuple[Any, ...] = (
        None if isinstance(source, DataLoader) else source,
        getattr(source, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(source, "dataset", None),
    )
    for owner in {id(each): each for each in owners}.values():
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def make_loaders(
    given: Any, limit: int | float, kind: str, sharding: RankSharding | None = None
) -> list[Loader]:
    """Return named loaders for the user's argument: one loader, a list, or a dictionary of names."""
    sharding = sharding or RankSharding()
    if given is None:
        return []
    if isinstance(given, Mapping):
        named = {str(name): source for name, source in given.items()}
        if len(named) < len(given):
            raise OptionError(
                f"Two {kind} loaders have the same name after str(): {', '.join(map(repr, given))}."
            )
    elif isinstance(given, list | tuple) and len(given) == 1 and _is_loader(given[0]):
        named = {kind: given[0]}
    elif isinstance(given, list | tuple) and given and all(_is_loader(each) for each in given):
        named = {f"dl{index}": source for index, source in enumerate(given)}
    else:
        named = {kind: given}
    for name, source in named.items():
        if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            raise OptionError(
                f"The {kind} loader {name!r} is a dataset ({type(source).__name__}), which yields single "
                "samples. Pass torch.utils.data.DataLoader(dataset, batch_size=...)."
            )
        if _is_pair(source):
            raise OptionError(
                f"The {kind} loader {name!r} is a {described(source)}, which looks like inputs and targets. "
                "Pass DataLoader(TensorDataset(inputs, targets), batch_size=...), both of torch.utils.data. "
                "If these are two batches, put them into a list."
            )
        if isinstance(source, Tensor | np.ndarray):
            raise OptionError(
                f"The {kind} loader {name!r} is {described(source)}, of which each row would be a batch. "
                "Pass DataLoader(TensorDataset(inputs), batch_size=...), both of torch.utils.data, or a list "
                "of batches."
            )
        if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            raise OptionError(
                f"The {kind} loader {name!r} is a {type(source).__name__}, which cannot be iterated over. "
                "Pass a DataLoader or any iterable of batches."
            )
    lengths = {
        name: rank_batches(source, shard_plan_for(source, sharding), sharding.trains)
        for name, source in named.items()
    }
    return [
        Loader(name, source, apply_limit(lengths[name], limit, kind), sharding=sharding)
        for name, source in named.items()
    ]


def _is_loader(value: Any) -> bool:
    """Return whether an item of a list is a loader, not a batch: it is iterable and not an array."""
    is_batch = hasattr(value, "shape") or isinstance(value, list | tuple | Mapping | str | bytes)
    return hasattr(value, "__iter__") and not is_batch


def _is_pair(source: Any) -> bool:
    """Return whether a loader looks like (inputs, targets): as many of both, of another type or dimension."""
    if not isinstance(source, tuple) or len(source) != 2:
        return False
    shapes: list[Any] = [getattr(each, "shape", ()) for each in source]
    kinds = [(getattr(each, "dtype", None), len(shape)) for each, shape in zip(source, shapes, strict=True)]
    return () not in shapes and shapes[0][0] == shapes[1][0] and kinds[0] != kinds[1]


def apply_limit(length: int | None, limit: int | float, kind: str) -> int | None:
    """Apply `limit_*_batches`: an integer number of batches or a fraction of them."""
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if limit == 1.0 or limit == 0.0:
        return length if limit else 0
    if length is None:
        raise OptionError(
            f"limit_{kind}_batches={limit}: a fraction needs a loader with a length; pass a whole number."
        )
    if length and not int(length * limit):
        raise OptionError(
            f"limit_{kind}_batches={limit} of {length} batches is 0 batches; pass a larger fraction, or 0."
        )
    return int(length * limit)
