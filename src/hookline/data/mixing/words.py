"""A mixture in words: what an epoch will be made of, and what it came to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from hookline.data.mixing.schedule import epoch_batches, planned, schedule
from hookline.data.mixing.settings import Mixture


class Proportion(NamedTuple):
    """A loader's part of the batches, from 0 to 1."""

    reached: float
    asked: float


def proportions(counts: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, Proportion]:
    """What each loader gave (batches, samples or tokens) against what was asked of it, as
    parts of the whole.
    """
    given, asked = sum(counts.values()), sum(weights.values())
    return {
        name: Proportion(
            counts.get(name, 0) / given if given else 0.0, weights.get(name, 0) / asked if asked else 0.0
        )
        for name in dict.fromkeys([*counts, *weights])
    }


def describe(mixture: Mixture, lengths: Mapping[str, int | None], epoch: int = 0, picks: int = 20) -> str:
    """A few lines for people: the order, each loader's part of an epoch, and the first picks by name."""
    total = epoch_batches(mixture, lengths)
    width = max(map(len, lengths), default=0)
    lines = [_headline(mixture, total)]
    about = "about " if mixture.order == "random" else ""
    for name, batches in planned(mixture, lengths, epoch).items():
        lines.append(
            f"  {name:<{width}}  {_weight(mixture, name)}{about}{batches} "
            f"batches{_use(batches, lengths[name])}"
        )
    names = list(lengths)
    shown = [names[pick.loader] for pick in itertools.islice(schedule(mixture, lengths, epoch), picks)]
    more = " ..." if total > picks else ""
    lines.append(f"  begins: {' '.join(shown)}{more}")
    return "\n".join(lines)


def _headline(mixture: Mixture, total: int) -> str:
    burst = f", {mixture.burst} in a row" if mixture.burst > 1 else ""
    pattern = f" ({' '.join(mixture.pattern)})" if mixture.pattern else ""
    seed = f", seed {mixture.seed}" if mixture.order == "random" else ""
    rule = "" if not isinstance(mixture.epoch_length, str) else f" ({mixture.epoch_length})"
    ends = "start again" if mixture.cycles else "end"
    return f"{mixture.order}{pattern}{burst}{seed}: {total} batches an epoch{rule}; exhausted loaders {ends}"


def _weight(mixture: Mixture, name: str) -> str:
    if not mixture.weights:
        return ""
    return f"{mixture.weights[name] / sum(mixture.weights.values()):6.1%}  "


def _use(batches: int, length: int | None) -> str:
    if length is None:
        return " of an endless loader" if batches else ", left out"
    if not batches:
        return f" of {length}, left out"
    if batches == length:
        return ", all of them once"
    return f" of {length}" if batches < length else f", {batches / length:.3g} times all {length}"
