"""The position of a run in its mixture: one pick at a time, changes during the run, and exact resume."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hookline.data.mixing.schedule import Stretch, asked_batches
from hookline.data.mixing.settings import Mixture, refuse_problems
from hookline.util.errors import CheckpointError, OptionError, closest

# ---- checks of a mixture against its loaders ---------------------------------------------------------------


def check_mixture(mixture: Mixture, names: Sequence[str], lengths: Mapping[str, int | None]) -> list[str]:
    """Raise for an invalid mixture; return warnings about a valid one, one sentence each.

    lengths: batches per pass; None for an endless loader or an unknown length.
    """
    problems = [
        *_loader_problems(names, lengths),
        *_name_problems(mixture, names),
        *_length_problems(mixture, names, lengths),
    ]
    refuse_problems([("", each) for each in problems])
    return _doubts(mixture, {name: lengths[name] for name in names})


def _loader_problems(names: Sequence[str], lengths: Mapping[str, int | None]) -> list[str]:
    if not names:
        return ["there is no loader to draw from."]
    found = [
        f"{count} loaders are named {name!r}; each needs a different name."
        for name, count in Counter(names).items()
        if count > 1
    ]
    for name in dict.fromkeys(names):
        length = lengths[name]
        if length is not None and length < 1:
            found.append(
                f"the loader {name!r} is empty ({length} batches); leave it out, or check its dataset, "
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
                    f"{where} names {name!r}, which is not a loader.{closest(name, names)} "
                    f"Loaders: {', '.join(names)}."
                )
    if mixture.weights:
        for name in dict.fromkeys(names):
            if name not in mixture.weights:
                found.append(
                    f"weights has no entry for the loader {name!r}; give it a weight, or 0 to exclude it "
                    "for now."
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
            f"An epoch of {end} batches contains no batch of {', '.join(map(repr, never))}: increase the "
            "weight, add it to the pattern, make the epoch longer, or leave it out."
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
                f"The weights cannot be met, because loaders end before the epoch does: {', '.join(off)}."
            )
    return found


Lengths = dict[str, int | None]


class MixtureCursor:
    """An iterator over the index of the loader of each batch of an epoch; `begin` opens the next epoch.

    >>> cursor = MixtureCursor(Mixture("alternating", pattern=["web", "web", "code"]), {"web": 4, "code": 2})
    >>> [cursor.names[index] for index in cursor]
    ['web', 'web', 'code', 'web', 'web', 'code']

    The index of a name never changes: a removed loader keeps it, a new loader gets the next one. The picks of
    a window are fixed when it is opened; a change takes effect at the next window.
    """

    def __init__(self, mixture: Mixture, lengths: Mapping[str, int | None], epoch: int = 0) -> None:
        self.doubts: list[str] = check_mixture(mixture, list(lengths), lengths)
        """Warnings about settings that are valid but probably not intended."""
        self.epoch = epoch
        self._given = (mixture, dict(lengths))
        self._now = self._given
        self._pending: tuple[Mixture, Lengths] | None = None
        self._later: Lengths | None = None
        """The lengths from the next epoch on, if those of this epoch differ."""
        self._names = list(lengths)
        self._passes = [0] * len(lengths)
        """Finished or abandoned passes of each loader, over all epochs."""
        self._pass_began = [0] * len(lengths)
        """Each loader's batches in this epoch before its current pass."""
        self._window: list[int] = []
        """The fixed picks."""
        self._at = self._fixed = 0
        """The number of drawn picks of the window, and of all its picks."""
        self._enter(Stretch.begin(mixture, lengths))

    # ---- drawing -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        at = self._at
        if at == self._fixed:
            self._open_window()
            at = 0
        self._at = at + 1
        return self._window[at]

    def ended(self, index: int) -> bool:
        """Report that the picked loader is exhausted. Return True to start it again, False to draw again.

        Required for loaders with an unknown or wrong length, and allowed for others. Raise if a loader has no
        batch at all, which would loop forever.
        """
        if not self._at or self._window[self._at - 1] != index:
            raise ValueError(f"ended({index}) must directly follow the pick of that loader.")
        name, served = self._names[index], self._count(index) - 1
        if served == self._pass_began[index]:
            raise OptionError(
                f"The loader {name!r} did not yield a batch (epoch {self.epoch}, its pass "
                f"{self._passes[index] + 1}). Check its dataset; a generator can be iterated over only "
                "once, so pass a list, a DataLoader or another iterable that can start again."
            )
        if self.mixture.cycles:
            length = self._now[1].get(name)
            passes, rest = divmod(served - self._pass_began[index], length) if length else (1, 0)
            self._passes[index] += passes + (rest > 0)  # several after a resume without calls of `ended`
            self._pass_began[index] = served
            return True
        self._at -= 1
        del self._window[self._at :]
        self._close_window()
        mixture, lengths = self._stretch.mixture, {**self._stretch.lengths, name: served}
        self._enter(
            Stretch(
                mixture, tuple(self._names), lengths, self._start, tuple(self._counts), self._stretch.asked
            )
        )
        return False

    def begin(self, epoch: int) -> None:
        """Open an epoch. Every loader starts a new pass, and a pending change takes effect."""
        for index in range(len(self._names)):
            passes, read = self.reading(index)
            self._passes[index] = passes + (read > 0)
        self._pass_began = [0] * len(self._names)
        self.epoch = epoch
        if self._pending is not None:
            self._now, self._pending = self._pending, None
            self._learn_names()
        if self._later is not None:
            mixture, lengths = self._now
            self._now, self._later = (
                (mixture, {name: self._later.get(name, length) for name, length in lengths.items()}),
                None,
            )
        mixture, lengths = self._now
        zeros = (0,) * len(self._names)
        self._enter(Stretch(mixture, tuple(self._names), lengths, 0, zeros, asked_batches(mixture, lengths)))

    # ---- position ------------------------------------------------------------------------------------------

    @property
    def mixture(self) -> Mixture:
        """Return the current settings."""
        return self._stretch.mixture

    @property
    def latest(self) -> tuple[Mixture, Lengths]:
        """Return the newest settings and lengths, which may be pending until the next window."""
        return self._pending or self._now

    @property
    def is_pending(self) -> bool:
        """Return whether a change takes effect at the next window."""
        return self._pending is not None

    @property
    def lengths(self) -> Lengths:
        """Return the batches in a pass of each loader in this epoch."""
        return self._now[1]

    @property
    def drawn_from(self) -> list[str]:
        """Return the loaders that the rest of the run may use."""
        return list({**self._stretch.lengths, **self._now[1], **self.latest[1]})

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by index, including removed loaders."""
        return tuple(self._names)

    @property
    def position(self) -> int:
        """Return the number of batches drawn in this epoch."""
        return self._start + self._at

    @property
    def total(self) -> int:
        """Return the number of batches in this epoch; a change or an early end of a loader changes it."""
        return self._end

    @property
    def counts(self) -> dict[str, int]:
        """Return the batches drawn from each loader in this epoch."""
        drawn = Counter(self._window[: self._at])
        return {name: self._counts[index] + drawn[index] for index, name in enumerate(self._names)}

    @property
    def next_window(self) -> int:
        """Return the position at which a change made now takes effect; the end means the next epoch."""
        return min(-(-self.position // self.mixture.window) * self.mixture.window, self._end)

    def reading(self, index: int) -> tuple[int, int]:
        """Return the pass of a loader's next batch, over all epochs, and the batches read in this pass."""
        passes, read = self._passes[index], self._count(index) - self._pass_began[index]
        length = self._now[1].get(self._names[index])
        return (passes + read // length, read % length) if length else (passes, read)

    # ---- changes -------------------------------------------------------------------------------------------

    def revise(self, mixture: Mixture | None = None, lengths: Mapping[str, int | None] | None = None) -> int:
        """Change settings or loaders from the next window on; return its position.

        Defaults come from `latest`. The check runs now, so that a wrong name raises in the caller.
        """
        mixture, lengths = mixture or self.latest[0], dict(self.latest[1] if lengths is None else lengths)
        self.doubts = check_mixture(mixture, list(lengths), lengths)
        self._pending = (mixture, lengths)
        return self.next_window

    # ---- state ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def as_of(self, position: int) -> Iterator[None]:
        """Set the cursor to a position inside the block: the current one, or that before the newest pick."""
        undone = min(max(self.position - position, 0), 1, self._at)
        self._at -= undone
        try:
            yield
        finally:
            self._at += undone

    def state_dict(self) -> dict[str, Any]:
        """Return plain data without the picks, which are computed from the start of the current stretch."""
        stretch = self._stretch
        return {
            "epoch": self.epoch,
            "position": self.position,
            "names": list(self._names),
            "counts": list(self.counts.values()),
            "passes": list(self._passes),
            "pass_began": list(self._pass_began),
            "stretch": {
                **_settings_to_plain((stretch.mixture, dict(stretch.lengths))),
                "start": stretch.start,
                "asked": stretch.asked,
                "counts": list(stretch.counts),
            },
            "now": _settings_to_plain(self._now),
            "pending": None if self._pending is None else _settings_to_plain(self._pending),
            "given": _settings_to_plain(self._given),
            "later": self._later,
        }

    def load_state_dict(self, state: Mapping[str, Any], awaited: Collection[str] = ()) -> None:
        """Continue from a saved state.

        If this cursor was created with other settings or lengths than the saved one, that is a change at the
        next window. Otherwise the saved settings continue. Loaders that were added during the saved run must
        be passed to this cursor or added by `revise`; `awaited` are names that will be added later.
        """
        saved, names = state["stretch"], list(state["names"])
        needed, here = (
            {**saved["lengths"], **(state["pending"] or state["now"])["lengths"]},
            {**self._given[1], **self.latest[1]},
        )
        if missing := [name for name in needed if name not in here and name not in awaited]:
            raise CheckpointError(
                f"The checkpoint uses the training loaders {', '.join(map(repr, missing))}, but this run has "
                f"only {', '.join(map(repr, here))}. Add them before the checkpoint is loaded."
            )
        self.epoch, self._names = state["epoch"], names
        self._passes, self._pass_began = list(state["passes"]), list(state["pass_began"])
        self._now, self._later = _settings_from_plain(state["now"]), state["later"]
        self._pending = None if state["pending"] is None else _settings_from_plain(state["pending"])
        if _settings_to_plain(self._given) not in (state["given"], state["pending"] or state["now"]):
            self._pending = self._given
        mixture, lengths = _settings_from_plain(saved)
        stretch = Stretch(
            mixture, tuple(names), lengths, saved["start"], tuple(saved["counts"]), saved["asked"]
        )
        self._enter(stretch, state["counts"])

    def rebatch(self, left: Mapping[str, int | None]) -> None:
        """Continue a loaded state with another world size or batch size; `left` are the remaining batches.

        No sample of this epoch is skipped or repeated.
        """
        mixture, now = self._given[0], self._now[1]
        lengths: Lengths = {}
        for index, name in enumerate(self._names):
            passes, read = self.reading(index)
            count, whole, rest = self._counts[index], self._given[1].get(name), left.get(name)
            if name not in now:
                continue
            self._passes[index], self._pass_began[index], lengths[name] = passes, count - read, whole
            if self.mixture.cycles and whole is not None and rest is not None:
                self._pass_began[index] = count - (whole - rest)
            elif rest is not None:
                is_done = count > 0 and read == 0
                lengths[name] = count + (0 if is_done else rest)
        asked = asked_batches(mixture, lengths)
        # keep the remaining fraction of the epoch
        if self.mixture.cycles and isinstance(mixture.epoch_length, str) and self._stretch.asked:
            asked = self._start + round(
                asked * max(0, self._stretch.asked - self._start) / self._stretch.asked
            )
        self._pending, self._later, self._now = None, dict(self._given[1]), (mixture, lengths)
        self._enter(Stretch(mixture, tuple(self._names), lengths, self._start, tuple(self._counts), asked))

    # ---- windows -------------------------------------------------------------------------------------------

    def _enter(self, stretch: Stretch, counts: Sequence[int] | None = None) -> None:
        """Draw from this stretch, from its start or from the position with these counts."""
        self._stretch = stretch
        self._end = stretch.end
        self._picks = stretch.picks(self.epoch, counts)
        self._counts = list(stretch.counts if counts is None else counts)
        self._start = sum(self._counts)
        self._window, self._at, self._fixed = [], 0, 0

    def _open_window(self) -> None:
        self._close_window()
        if self._pending is not None and self._start % self.mixture.window == 0 and self._start < self._end:
            self._now, self._pending = self._pending, None
            self._learn_names()
            mixture, lengths = self._now
            removed = sum(
                count for name, count in zip(self._names, self._counts, strict=True) if name not in lengths
            )
            asked = asked_batches(mixture, lengths, removed)
            self._enter(
                Stretch(mixture, tuple(self._names), lengths, self._start, tuple(self._counts), asked)
            )
        size = self.mixture.window - self._start % self.mixture.window
        self._window = list(itertools.islice(self._picks, size))
        self._fixed = len(self._window)
        if not self._window:
            raise StopIteration

    def _close_window(self) -> None:
        for index in self._window:
            self._counts[index] += 1
        self._start += len(self._window)
        self._window, self._at, self._fixed = [], 0, 0

    def _learn_names(self) -> None:
        for name in self._now[1]:
            if name not in self._names:
                self._names.append(name)
                self._counts.append(0)
                self._passes.append(0)
                self._pass_began.append(0)

    def _count(self, index: int) -> int:
        return self._counts[index] + self._window[: self._at].count(index)


def _settings_to_plain(settings: tuple[Mixture, Lengths]) -> dict[str, Any]:
    return {"mixture": settings[0].to_dict(), "lengths": dict(settings[1])}


def _settings_from_plain(data: Mapping[str, Any]) -> tuple[Mixture, Lengths]:
    return Mixture(**data["mixture"]), dict(data["lengths"])
