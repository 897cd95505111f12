"""Does a mixture fit the loaders? Everything that is wrong is said at once, before the first batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hookline.data.mixing.schedule import Stretch
from hookline.data.mixing.settings import Mixture, refuse
from hookline.errors import closest


def check(mixture: Mixture, names: Sequence[str], lengths: Mapping[str, int | None]) -> list[str]:
    """Refuse what cannot work; return what works but may not be meant, one sentence each.

    `lengths` are batches per pass; None is a loader without end, or one that does not know.
    """
    problems = [
        *_loader_problems(names, lengths),
        *_name_problems(mixture, names),
        *_length_problems(mixture, names, lengths),
    ]
    refuse([("", each) for each in problems])
    return _doubts(mixture, {name: lengths[name] for name in names})


def _loader_problems(names: Sequence[str], lengths: Mapping[str, int | None]) -> list[str]:
    if not names:
        return ["there is no loader to draw from."]
    found = [
        f"{count} loaders are named {name!r}; each needs a name of its own."
        for name, count in Counter(names).items()
        if count > 1
    ]
    for name in dict.fromkeys(names):
        length = lengths[name]
        if length is not None and length < 1:
            found.append(
                f"the loader {name!r} is empty ({length} batches); leave it out, or look at its dataset, "
                "batch_size and drop_last."
            )
    return found


def _name_problems(mixture: Mixture, names: Sequence[str]) -> list[str]:
    found = []
    for where, given in (
        ("weights", mixture.weights),
        ("pattern", dict.fromkeys(mixture.pattern)),
        ("loss_weights", mixture.loss_weights),
        ("optimizers", mixture.optimizers),
    ):
        for name in given:
            if name not in names:
                found.append(
                    f"{where} names {name!r}, and there is no such loader.{closest(name, names)} "
                    f"Loaders: {', '.join(names)}."
                )
    if mixture.weights:
        for name in dict.fromkeys(names):
            if name not in mixture.weights:
                found.append(
                    f"weights says nothing about the loader {name!r}; give it a weight, or 0 to leave it "
                    f"out for now."
                )
    return found


def _length_problems(mixture: Mixture, names: Sequence[str], lengths: Mapping[str, int | None]) -> list[str]:
    endless = [name for name in names if lengths[name] is None]
    if not endless:
        return []
    found = []
    without_length = f"{', '.join(map(repr, endless))} {'has' if len(endless) == 1 else 'have'} no length"
    if mixture.epoch_length in ("sum", "max") or (
        mixture.epoch_length == "min" and len(endless) == len(names)
    ):
        rest = "" if len(endless) == len(names) else ", or 'min' for the shortest of the others"
        found.append(
            f"epoch_length={mixture.epoch_length!r}, but {without_length}; give a number of batches{rest}."
        )
    early = [name for name in names[:-1] if lengths[name] is None]
    if mixture.order == "sequential" and early:
        found.append(
            f"order='sequential' would never get past {early[0]!r}, which has no length; put it last, or "
            "choose another order."
        )
    return found


def _doubts(mixture: Mixture, lengths: Mapping[str, int | None]) -> list[str]:
    stretch = Stretch.begin(mixture, lengths)
    end, counts = stretch.end, stretch.planned(0)
    found = []
    never = [
        name for index, name in enumerate(lengths) if not counts.get(index) and mixture.weights.get(name, 1)
    ]
    if never and mixture.order != "random":
        found.append(
            f"An epoch of {end} batches draws nothing from {', '.join(map(repr, never))}: give more weight, "
            "a turn in the pattern or a longer epoch, or leave it out."
        )
    if end < stretch.asked:
        found.append(
            f"An epoch has {end} batches, not {stretch.asked}, because the loaders end; "
            "when_exhausted='cycle' starts them again."
        )
    if mixture.weights and end:
        sum_ = sum(mixture.weights.values())
        asked = {name: mixture.weights[name] / sum_ for name in lengths}
        off = [
            f"{name!r} {counts[index] / end:.1%} instead of {asked[name]:.1%}"
            for index, name in enumerate(lengths)
            if abs(counts[index] - end * asked[name]) > 1
        ]
        if off:
            found.append(
                f"The weights cannot be kept, because loaders end before the epoch does: {', '.join(off)}."
            )
    return found
