"""Samples that a loader leaves out: part of its order, so the batches stay full and a resume is exact.

An exclusion takes effect where the data is opened next: at the start of a run, after a rollback or a resume
with a longer list at that position, otherwise in the next pass. What was read before stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler

from hookline.util.errors import OptionError
from hookline.util.text import list_some

Cut = tuple[int, frozenset[int]]
"""The number of samples or batches of a pass before an exclusion takes effect, and the excluded indices."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Samples that are left out from a place in the order on."""

    samples: tuple[int, ...]
    first_pass: int
    cut: int
    """The samples (or batches of a batch sampler) of that pass, over all ranks, that came before it."""


class Exclusions:
    """The excluded samples of one loader."""

    __slots__ = ("entries", "pending")

    def __init__(self) -> None:
        self.entries: list[Exclusion] = []
        self.pending: set[int] = set()
        """Samples to leave out from where the data is opened next."""

    def __bool__(self) -> bool:
        return bool(self.entries or self.pending)

    @property
    def samples(self) -> set[int]:
        """Return all excluded samples."""
        return self.pending.union(*(each.samples for each in self.entries))

    def add(self, samples: Iterable[int]) -> set[int]:
        """Leave out these samples from where the data is opened next; return those that are new."""
        new = set(samples) - self.samples
        self.pending |= new
        return new

    def open(self, number: int, cut: int) -> None:
        """Let the pending exclusions take effect in a pass, after so many samples or batches."""
        if self.pending:
            self.entries.append(Exclusion(tuple(sorted(self.pending)), number, cut))
            self.pending = set()

    def cuts(self, number: int) -> list[Cut]:
        """Return what is left out in a pass, and from where on."""
        return [
            (each.cut if each.first_pass == number else 0, frozenset(each.samples))
            for each in self.entries
            if each.first_pass <= number
        ]

    def state_dict(self, number: int) -> dict[str, Any]:
        """Return the exclusions for a checkpoint in a pass; the pending ones belong to the next pass."""
        pending = [Exclusion(tuple(sorted(self.pending)), number + 1, 0)] if self.pending else []
        return {
            "exclusions": [[list(each.samples), each.first_pass, each.cut] for each in self.entries + pending]
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the exclusions. Those that this process has added since hold from the position on."""
        wanted = self.samples
        self.entries = [Exclusion(tuple(samples), *place) for samples, *place in saved.get("exclusions", [])]
        self.pending = set()
        self.pending = wanted - self.samples


def without(units: Iterable[Any], cuts: Sequence[Cut]) -> Iterator[Any]:
    """Yield the samples, or batches of samples, that are not excluded."""
    count, excluded, later = 0, set[int](), sorted(cuts, key=lambda each: each[0])
    for unit in units:
        while later and count >= later[0][0]:
            excluded |= later.pop(0)[1]
        if isinstance(unit, list | tuple):
            unit = [each for each in unit if each not in excluded]
            if not unit:
                continue
        elif unit in excluded:
            continue
        count += 1
        yield unit


# ---- checks ------------------------------------------------------------------------------------------------


def known_samples(source: Any) -> Collection[int] | None:
    """Return the samples that are in every pass of a loader exactly once; None if that is not known."""
    sampler = source.batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement:
        samples = len(sampler.data_source)
        return range(samples) if sampler.num_samples == samples else None
    if type(sampler) is SubsetRandomSampler:
        known = {int(each) for each in sampler.indices}
        return known if len(known) == len(sampler) else None
    return None


def check_samples(name: str, samples: Iterable[Any], length: int | None) -> list[int]:
    """Return the indices of samples; raise if one is not an index of the loader's dataset."""
    given = list(samples)
    wrong = [
        each
        for each in given
        if isinstance(each, bool)
        or not isinstance(each, Integral)
        or not 0 <= int(each) < (int(each) + 1 if length is None else length)
    ]
    if wrong:
        allowed = "whole numbers from 0 on" if length is None else f"from 0 to {length - 1}"
        raise OptionError(
            f"The loader {name!r} has no such sample: {list_some([repr(each) for each in wrong])}. Samples "
            f"are the indices of its dataset, {allowed}."
        )
    return [int(each) for each in given]


def refuse_exclusion(name: str, reader: Any, shards_itself: bool) -> None:
    """Raise if a loader cannot leave out samples."""
    if reader.kind != "indices" or not reader.caps:
        why = f"is not read by index ({reader.describe()})"
        advice = "Leave the samples out in its dataset, or use a map-style dataset with a DataLoader."
    elif reader.order.stateful is not None:
        why = f"has a sampler with a state of its own ({type(reader.order.stateful).__name__})"
        advice = "Leave the samples out in the sampler."
    elif shards_itself:
        why = "shards itself over the ranks"
        advice = "Leave out its DistributedSampler: Hookline gives each rank its part of the samples."
    else:
        return
    raise OptionError(f"The training loader {name!r} {why}, so it cannot leave out samples. {advice}")
