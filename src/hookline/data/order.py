"""The order of a map-style loader: its sampler, drawn in a random stream of its own, dealt to ranks, begun at
any position.
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

from hookline.data.fingerprint import StateCheck
from hookline.data.generators import Found, put_back, states_of
from hookline.data.rng_exchange import OwnStream
from hookline.data.seeding import key_of
from hookline.data.sharding import END, ShardedSampler, ShardPlan
from hookline.data.sources import has_state
from hookline.data.workers import Keyed

SETTLED = (
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
"""These draw from the global streams when they are asked for the first index, and never again."""


class Order:
    """Stands in for the user's sampler in the copy of a loader that Hookline iterates over; one for all of
    its epochs.
    """

    def __init__(
        self, sampler: Any, generators: Found, ahead: int, shard_plan: ShardPlan, trains: bool
    ) -> None:
        self.sampler = sampler
        self.shard_plan = shard_plan
        self.dealt = ShardedSampler(sampler, shard_plan, trains)
        self.generators = generators
        self.ahead = ahead
        """Batches that the workers are given in advance; 0 without workers."""
        inner = getattr(sampler, "sampler", None)
        self.settled = type(sampler) in SETTLED and (inner is None or type(inner) in SETTLED)
        self.stateful = next((each for each in (sampler, inner) if has_state(each)), None)
        self.check = None if self.stateful is None else StateCheck(self.stateful, trains)
        self.may_be_spent = False
        """Whether the sampler has taken up a state that may be that of a finished pass."""
        self.begin(0, 0, 0, None)

    def begin(self, key: int, position: int, passed_over: int, limit: int | None) -> None:
        """Settle the next pass: what its randomness comes from, which batch is the first, and after how many
        it ends.

        `passed_over`: samples of all ranks, or batches of theirs, that come before this rank's first batch.
        """
        self.key, self.position, self.passed_over, self.limit = key, position, passed_over, limit
        self.shard_plan.short.clear()
        self.begins: dict[str, Any] | None = None
        """What its generators begin this pass with; known when the first index is drawn, or from a
        checkpoint.
        """
        self.goes_on = False
        """Whether the sampler has been put to the position by its own state."""
        self.drawn = position
        self.states: deque[tuple[int, Any]] = deque(maxlen=self.ahead + 2)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)  # batch_size and the like

    def __iter__(self) -> Iterator[Any]:
        """The pass that was settled. Its body begins with the first index, when whoever iterates has drawn
        what it needs.
        """
        if self.begins is not None:
            put_back(self.generators, self.begins)
        self.begins = states_of(self.generators)
        stream, rank = OwnStream(self.key), self.shard_plan.rank
        place, is_first = self.position, True
        self._keep_state(place)
        if self.check is not None:
            self.check.open(place)
        indices = self._start(stream)
        while self.limit is None or place < self.limit:
            if self.settled and not is_first:
                index = next(indices, END)
            else:
                with stream:
                    index = next(indices, END)
            if index is END:
                return
            if is_first and self.check is not None:
                self.check.after_first()
            is_first = False
            self.drawn = place = place + 1
            self._keep_state(place)
            yield Keyed(key_of(self.key, place, *([rank] if rank else [])), index) if self.ahead else index

    def _start(self, stream: OwnStream) -> Iterator[Any]:
        with stream:
            indices = self.dealt.begin(self.position, 0 if self.goes_on else self.passed_over)
            if not self.may_be_spent:
                return indices
            first = next(indices, END)
            self.may_be_spent = first is END and self.position > 0
            if (
                first is END and self.position == 0
            ):  # the state was that of a finished pass, and this is a new one
                indices = self.dealt.begin(0, 0)
        return indices if first is END else itertools.chain((first,), indices)

    def go_to(self, state: Any, is_stuck: bool) -> None:
        """Restore the sampler. Nothing has to be drawn to get to its position, unless its state does not
        advance.
        """
        assert self.stateful is not None and self.check is not None
        self.stateful.load_state_dict(state)
        self.check.is_stuck = is_stuck
        self.goes_on = self.may_be_spent = not is_stuck

    def state_at(self, position: int) -> Any:
        """The sampler's own state when the batch before this position had been drawn, however far workers are
        ahead.
        """
        assert self.stateful is not None
        kept = [state for place, state in self.states if place == position]
        return kept[0] if kept else self.stateful.state_dict()

    def _keep_state(self, place: int) -> None:
        if self.ahead and self.stateful is not None:
            self.states.append((place, copy.deepcopy(self.stateful.state_dict())))
