"""The samples of any batch of a run, computed from what determines its order: no list of them is kept.

`describe_loader` returns that as plain data, for `run.json` and checkpoints. `LoaderOrder` draws a pass again
from it, with the samplers and the random streams of the training.
"""

from __future__ import annotations

import base64
import copy
import functools
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from hookline.data.exclusions import Exclusions, without
from hookline.data.loaders import Loader, set_epoch
from hookline.data.readers import IndexReader
from hookline.data.rng_exchange import OwnStream
from hookline.data.seeding import find_generators, key_of, put_back
from hookline.data.sharding import ShardPlan
from hookline.util.errors import UnknownSamples
from hookline.util.text import kind_of, list_some

MOST_BYTES = 2**17
"""The largest list of indices or weights of a sampler, compressed, that is written to the record."""
MOST_VALUES = 2**20
"""The largest number of indices or weights that are compressed at the start of a pass."""
Units = Sequence[Any]
"""The samples of a pass in their order, or the batches of a batch sampler."""


class Sample(NamedTuple):
    """One sample behind an update.

    loader: the name of the loader. rank: the rank that trained it. epoch: the epoch, from 0.
    """

    loader: str
    rank: int
    epoch: int
    batch: int
    """The number of its batch in the epoch, over all loaders of a mixture."""
    id: int
    """Its index in the dataset of the loader."""


# ---- what determines an order ------------------------------------------------------------------------------


def describe_loader(loader: Loader) -> dict[str, Any]:
    """Return everything that determines the order of a loader, as plain data."""
    plan, reader, source, ranks = loader.shard_plan, loader.reader, loader.source, loader.sharding.ranks
    found: dict[str, Any] = {
        "kind": reader.kind,
        "seed": loader.seed,
        "ranks": ranks.data_size,
        "shared": plan.world_size == ranks.data_size,
        "size": plan.size,
        "of_samples": plan.of_samples,
        "drops_short": plan.drops_short,
        "start": list(loader.pass_start),
        "sampler": None,
    }
    if loader.exclusions:
        found |= loader.exclusions.state_dict(loader.pass_start[0])
    if not isinstance(reader, IndexReader):
        return {**found, "why": f"it is not read by index ({reader.describe()})"}
    if not reader.caps:
        return {**found, "why": f"{kind_of(type(source))} has an __iter__ of its own"}
    if not reader.in_order:
        return {**found, "why": "in_order=False, so the workers determine the order of the batches"}
    sampler = reader.order.sampler.sampler if plan.of_samples else reader.order.sampler
    # a sampler that gives each rank its part, so that the parts of the others are known too
    is_of_rank = type(sampler) is DistributedSampler and (
        (sampler.num_replicas, sampler.rank) == (ranks.data_size, ranks.data_rank)
    )
    if not found["shared"] and not is_of_rank:
        return {**found, "why": "each rank has its own source, and only a DistributedSampler is known here"}
    described = _describe_sampler(sampler)
    if described is None:
        found["why"] = f"its order comes from {kind_of(type(sampler))}, which only the program of the run has"
        found["program_has_it"] = True
    elif "why" in described:
        found["why"] = described["why"]
        found["program_has_it"] = True
    else:
        found["sampler"] = described
        found["has_generator"] = getattr(sampler, "generator", None) is not None
    return found


def _describe_sampler(sampler: Any) -> dict[str, Any] | None:
    """Return the settings of a sampler of torch, or a list of indices; None for any other sampler."""
    kind = type(sampler)
    if kind is SequentialSampler:
        return {"class": "SequentialSampler", "samples": len(sampler)}
    if kind is RandomSampler:
        return {
            "class": "RandomSampler",
            "samples": len(sampler.data_source),
            "replacement": sampler.replacement,
            "drawn": sampler.num_samples,
        }
    if kind is DistributedSampler:
        return {
            "class": "DistributedSampler",
            "samples": len(sampler.dataset),
            "ranks": sampler.num_replicas,
            "rank": sampler.rank,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
            "drop_last": sampler.drop_last,
        }
    if kind is WeightedRandomSampler:
        settings = {"replacement": sampler.replacement, "drawn": sampler.num_samples}
        return _with_values("WeightedRandomSampler", np.asarray(sampler.weights, np.float64), settings)
    indices = sampler.indices if kind is SubsetRandomSampler else sampler
    if kind in (SubsetRandomSampler, list, tuple, range) and len(indices) > MOST_VALUES:
        return _too_many(kind.__name__, len(indices))
    if kind in (SubsetRandomSampler, list, tuple, range) and all(type(each) is int for each in indices):
        return _with_values(kind.__name__, np.asarray(indices, np.int64), {})
    return None


def _with_values(kind: str, values: Any, settings: dict[str, Any]) -> dict[str, Any]:
    packed = _pack_small(values) if len(values) <= MOST_VALUES else None
    if packed is None:
        return _too_many(kind, len(values))
    return {"class": kind, "type": str(values.dtype), "values": packed, **settings}


def _too_many(kind: str, count: int) -> dict[str, Any]:
    return {"why": f"the {count} values of its {kind} are too many for the record"}


def _pack_small(values: Any) -> str | None:
    """Return the values compressed; None, without reading them all, if that is too large."""
    data, packer, packed = memoryview(values.tobytes()), zlib.compressobj(), bytearray()
    for first in range(0, len(data), 2**16):
        packed += packer.compress(data[first : first + 2**16])
        if len(packed) * 4 > MOST_BYTES * 3:  # base64 makes 4 characters of 3 bytes
            return None
    packed += packer.flush()
    text = base64.b64encode(packed).decode("ascii")
    return text if len(text) <= MOST_BYTES else None


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def generator_states(loader: Loader) -> dict[str, str]:
    """Return the states of the generator of a sampler of torch at the starts of the newest passes."""
    reader = loader.reader
    if not isinstance(reader, IndexReader):
        return {}
    sampler = reader.order.sampler.sampler if loader.shard_plan.of_samples else reader.order.sampler
    generator = getattr(sampler, "generator", None)
    names = [name for name, each in reader.generators.items() if each is generator]
    if not names or not isinstance(generator, torch.Generator):
        return {}
    loader.keep_generator_states()
    return {
        str(number): base64.b64encode(zlib.compress(states[names[0]].numpy().tobytes())).decode("ascii")
        for number, states in loader.generator_states.items()
        if names[0] in states
    }


# ---- drawing it again --------------------------------------------------------------------------------------


class LoaderOrder:
    """The order of one loader, from its description."""

    def __init__(
        self, name: str, known: dict[str, Any], states: dict[str, str], live: Loader | None = None
    ) -> None:
        """Take the description of a loader, and the states of its sampler's generator by pass.

        live: the loader, if this process has it; then the order may come from a sampler of any class.
        """
        self.name, self.known, self.states = name, known, states
        self.given = live
        self.live = live if known["sampler"] is None else None
        self.exclusions = Exclusions()
        self.exclusions.load_state_dict(known)
        self._passes = functools.lru_cache(maxsize=2)(self._draw)

    def samples(self, number: int, position: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each rank with the indices of its samples in a batch of a pass; a padding batch has none."""
        for rank in range(self.known["ranks"]):
            units = self._passes(number, 0 if self.known["shared"] else rank)
            yield rank, self._batch(units, number, position, rank)

    def _batch(self, units: Units, number: int, position: int, rank: int) -> list[int]:
        """Return the samples of a rank's batch, from the samples or batches of a pass."""
        known = self.known
        first, start, before = known["start"]
        world_size = known["ranks"] if known["shared"] else 1
        plan = ShardPlan(
            rank if known["shared"] else 0,
            world_size,
            known["size"],
            known["of_samples"],
            known["drops_short"],
        )
        passed_over = (
            before + (position - start) * plan.per_turn
            if number == first and position >= start
            else position * plan.per_turn
        )
        turn = list(units[passed_over : passed_over + plan.per_turn])
        if not turn or (len(turn) < plan.per_turn and plan.drops_short):
            raise UnknownSamples(
                f"The loader {self.name!r} has no batch {position} in its pass {number}: the number "
                "is too high, or the order in the record is not that of the training (was the dataset "
                "changed?)."
            )
        if plan.of_samples:
            return _as_indices(self.name, turn[plan.rank :: world_size])
        return _as_indices(self.name, turn[plan.rank] if plan.rank < len(turn) else [])

    def _draw(self, number: int, rank: int) -> Units:
        """Return a pass without the excluded samples."""
        sampler = self._sampler(number, rank)
        # it expects a loader
        set_epoch(SimpleNamespace(sampler=sampler, batch_sampler=getattr(sampler, "sampler", None)), number)
        with OwnStream(key_of(self.known["seed"] or 0, number, self.name)):
            cuts = self.exclusions.cuts(number)
            if isinstance(sampler, range) and not cuts:
                return sampler
            units = list(sampler) if not cuts else list(without(sampler, cuts))
        if self.live is None and self.known["of_samples"]:
            return array("q", units)  # an eighth of the memory
        if self.live is not None:
            self._compare(number, units, self.live)
        return units

    def _compare(self, number: int, units: Units, live: Loader) -> None:
        """Raise if a user's sampler does not return the order of the training again."""
        known = live.first_batches
        if number not in known:  # the pass was read by another process, or long ago
            if known and number < (newest := max(known)):
                self._passes(newest, 0)  # is compared
            return
        position, drawn = known[number]
        found = self._batch(units, number, position, live.sharding.ranks.data_rank)
        had = _as_indices(self.name, drawn)
        if found and found != had:
            raise UnknownSamples(
                f"The samples of the loader {self.name!r} cannot be computed: {self.known['why']}, and a "
                f"copy of it returns {list_some(map(str, found))} for batch {position} of pass {number}, "
                f"where the training had {list_some(map(str, had))}. Does it count its passes? Let set_epoch "
                "or its generator determine the order."
            )

    def _sampler(self, number: int, rank: int) -> Iterable[Any]:
        known = self.known["sampler"]
        if known is None:
            return self._copied_sampler(number)
        generator = self._generator(number)
        kind = known["class"]
        if kind == "SequentialSampler":
            return range(known["samples"])
        if kind == "RandomSampler":
            drawn = known["drawn"] if known["replacement"] or known["drawn"] != known["samples"] else None
            return RandomSampler(range(known["samples"]), known["replacement"], drawn, generator)
        if kind == "DistributedSampler":
            return DistributedSampler(
                range(known["samples"]),  # type: ignore[arg-type]  # it reads the length only
                known["ranks"],
                known["rank"] if self.known["shared"] else rank,
                known["shuffle"],
                known["seed"],
                known["drop_last"],
            )
        values = np.frombuffer(_unpack(known["values"]), known["type"]).tolist()
        if kind == "WeightedRandomSampler":
            return WeightedRandomSampler(values, known["drawn"], known["replacement"], generator)
        return SubsetRandomSampler(values, generator) if kind == "SubsetRandomSampler" else values

    def _generator(self, number: int) -> torch.Generator | None:
        states = self.states
        if not self.known["has_generator"]:
            return None
        if str(number) not in states:
            kept = sorted(map(int, states))
            which = f"the passes {kept[0]} to {kept[-1]}" if kept else "no pass"
            raise UnknownSamples(
                f"The sampler of the loader {self.name!r} has its own generator, and the record has its "
                f"states for {which}, not for pass {number}. Leave out the generator: Trainer(seed=...) "
                "determines the order."
            )
        generator = torch.Generator()
        data = bytearray(_unpack(states[str(number)]))
        generator.set_state(torch.frombuffer(data, dtype=torch.uint8))
        return generator

    def _copied_sampler(self, number: int) -> Iterable[Any]:
        """Return a copy of the live loader's sampler, at the start of a pass; the original stays as it is."""
        live = self.live
        is_drawn_again = self.known.get("program_has_it", False)
        if live is None or not isinstance(live.reader, IndexReader) or not is_drawn_again:
            instead = (
                "In that program, trainer.samples(step) returns them, during the fit and after it."
                if is_drawn_again
                else "Let `loader.sample_ids = lambda batch: [...]` name them, and write the fact "
                "`sample_ids` to the log in a hook."
            )
            raise UnknownSamples(
                f"The samples of the loader {self.name!r} cannot be computed: {self.known['why']}. {instead}"
            )
        live.keep_generator_states()
        order = live.reader.order
        if order.stateful is not None:
            raise UnknownSamples(
                f"The samples of the loader {self.name!r} cannot be computed: its "
                f"{type(order.stateful).__name__} has a state of its own, which only goes forward."
            )
        given = order.sampler.sampler if live.shard_plan.of_samples else order.sampler
        source: Any = live.source
        shared = (source.dataset, getattr(given, "data_source", None), getattr(given, "dataset", None))
        try:
            copied = copy.deepcopy(given, {id(each): each for each in shared})
        except Exception as error:  # a sampler is user code
            raise UnknownSamples(
                f"The samples of the loader {self.name!r} cannot be computed: a copy of its "
                f"{type(given).__name__} failed: {type(error).__name__}: {error}"
            ) from error
        states, copies = live.generator_states.get(number, {}), find_generators(given=copied)
        for name, generator in find_generators(given=given).items():
            known = [each for each, other in live.reader.generators.items() if other is generator]
            if not known or known[0] not in states:
                raise UnknownSamples(
                    f"The {type(given).__name__} of the loader {self.name!r} has its own generator, and this "
                    f"process does not have its state for pass {number}, which is long ago or was read by "
                    "another process."
                )
            put_back({name: copies[name]}, {name: states[known[0]]})
        return copied  # type: ignore[no-any-return]


def _as_indices(name: str, drawn: Any) -> list[int]:
    found = list(drawn) if isinstance(drawn, list | tuple) else [drawn]
    try:
        return [int(each) for each in found]
    except (TypeError, ValueError):
        raise UnknownSamples(
            f"The sampler of the loader {name!r} returns {type(found[0]).__name__}, not indices."
        ) from None
