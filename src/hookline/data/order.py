"""The order of a map-style loader: indices from its sampler, drawn in a separate random stream, sharded over
ranks, from any position on.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hookline.data.exclusions import Cut
from hookline.data.fingerprint import StateCheck
from hookline.data.rng_exchange import OwnStream
from hookline.data.seeding import Generators, key_of, put_back, states_of
from hookline.data.sharding import END, ShardedSampler, ShardPlan
from hookline.data.sources import has_state
from hookline.data.workers import Keyed

DRAWS_ONCE = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)
"""Samplers that draw from the global random streams only for the first index."""


class IndexOrder:
    """A replacement for the user's sampler in the copy of the loader that Hookline reads, for all epochs."""

    def __init__(
        self, sampler: Any, generators: Generators, ahead: int, shard_plan: ShardPlan, trains: bool
    ) -> None:
        self.sampler = sampler
        self.shard_plan = shard_plan
        self.sharded = ShardedSampler(sampler, shard_plan, trains)
        self.generators = generators
        self.ahead = ahead
        """Batches that the workers prefetch; 0 without workers."""
        inner = getattr(sampler, "sampler", None)
        self.draws_once = type(sampler) in DRAWS_ONCE and (inner is None or type(inner) in DRAWS_ONCE)
        self.stateful = next((each for each in (sampler, inner) if has_state(each)), None)
        self.check = None if self.stateful is None else StateCheck(self.stateful, trains)
        self.may_be_spent = False
        """Whether the sampler has loaded a state that may be that of a finished pass."""
        self.kept: dict[int, Any] | None = None
        """The indices of the newest batches by the batch's number; None: they are not kept."""
        self.cuts: list[Cut] = []
        """The samples to leave out in the pass that `begin` sets up next."""
        self.begin(0, 0, 0, None)

    def begin(self, key: int, position: int, passed_over: int, limit: int | None) -> None:
        """Set up the next pass: its seed, its first batch, and the number of batches after which it ends.

        passed_over: samples or batches of all ranks that come before this rank's first batch.
        """
        self.key, self.position, self.passed_over, self.limit = key, position, passed_over, limit
        self.shard_plan.short.clear()
        self.begins: dict[str, Any] | None = None
        """The generators' states at the start of this pass; set at the first index, or by a checkpoint."""
        self.is_positioned = False
        """Whether the sampler's own state has moved it to the position."""
        self.drawn = position
        self.first: tuple[int, Any] | None = None
        """The first batch that this pass has drawn: its number, and its indices."""
        self.states: deque[tuple[int, Any]] = deque(maxlen=self.ahead + 2)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)  # such as batch_size

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices of the pass that `begin` has set up.

        This is a generator, so the states are taken at the first index, after the loader's own draws.
        """
        if self.begins is not None:
            put_back(self.generators, self.begins)
        self.begins = states_of(self.generators)
        stream, rank = OwnStream(self.key), self.shard_plan.rank
        position, is_first = self.position, True
        self._save_state(position)
        if self.check is not None:
            self.check.open(position)
        indices = self._start(stream)
        while self.limit is None or position < self.limit:
            if self.draws_once and not is_first:
                index = next(indices, END)
            else:
                with stream:
                    index = next(indices, END)
            if index is END:
                return
            if is_first and self.check is not None:
                self.check.after_first()
            if is_first:
                self.first = (position, index)
            is_first = False
            if self.kept is not None:
                self.kept[position] = index
            self.drawn = position = position + 1
            self._save_state(position)
            yield Keyed(key_of(self.key, position, *([rank] if rank else [])), index) if self.ahead else index

    def indices_of(self, batch: int) -> Any:
        """Return the kept indices of a batch, or None. Forget those of the batches before it."""
        kept = self.kept or {}
        for number in [each for each in kept if each < batch]:
            del kept[number]
        return kept.get(batch)

    def _start(self, stream: OwnStream) -> Iterator[Any]:
        with stream:
            indices = self.sharded.begin(
                self.position, 0 if self.is_positioned else self.passed_over, self.cuts
            )
            if not self.may_be_spent:
                return indices
            first = next(indices, END)
            self.may_be_spent = first is END and self.position > 0
            if (
                first is END and self.position == 0
            ):  # the state was that of a finished pass; this is a new one
                indices = self.sharded.begin(0, 0)
        return indices if first is END else itertools.chain((first,), indices)

    def go_to(self, state: Any, is_stuck: bool) -> None:
        """Restore the sampler's state. It is then at its position, unless the state does not advance."""
        assert self.stateful is not None and self.check is not None
        self.stateful.load_state_dict(state)
        self.check.is_stuck = is_stuck
        self.is_positioned = self.may_be_spent = not is_stuck

    def state_at(self, position: int) -> Any:
        """Return the sampler's state at a position, even if the workers have prefetched further batches."""
        assert self.stateful is not None
        saved = [state for saved_at, state in self.states if saved_at == position]
        return saved[0] if saved else self.stateful.state_dict()

    def _save_state(self, position: int) -> None:
        if self.ahead and self.stateful is not None:
            self.states.append((position, copy.deepcopy(self.stateful.state_dict())))
