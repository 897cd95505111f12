"""Which batches made which update, as few numbers: a regular stretch of any length is one entry."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_STRETCHES = 5_000
"""The number of stretches that are kept, the newest ones: about 100 kB in the record."""
MOST_SKIPPED = 5_000


NEVER = -(1 << 62)
"""A lag at which no update ends with the expected batch, so that the next one is noted."""


class Stretch(NamedTuple):
    """Updates that each use the next `size` batches, over the ends of epochs."""

    step: int
    """The first update: the one that makes this step."""
    epoch: int
    first: int
    """Its first batch in the epoch."""
    size: int
    length: int
    """Batches in an epoch; the last update of an epoch may have fewer than the others. 0: not known."""


class UpdateWindow(NamedTuple):
    """The batches of one update."""

    epoch: int
    first: int
    last: int


@dataclass(slots=True, eq=False)
class UpdateWindows:
    """The batches behind each update of a run.

    The loop compares the batch of each update with the expected one, `lag + step * size`, and calls `note` if
    they differ: after a skipped batch or update, a change of the accumulation, a short epoch.
    """

    size: int = 1
    lag: int = -1
    stretches: list[Stretch] = field(default_factory=list)
    skipped: dict[int, set[int]] = field(default_factory=dict)
    """Batches that are part of no update, by epoch."""
    ended: tuple[int, int] = (-1, -1)
    """The epoch and the last batch of the newest update that was not made."""
    ended_first: int = -1
    """Its first batch."""

    def begin_epoch(self, step: int, epoch: int, position: int, length: int, size: int) -> None:
        """Begin an epoch, or continue it at a position. size: the batches of an update in a new run."""
        expected = self.find(step + 1)
        if not (
            expected is not None
            and expected.epoch == epoch
            and expected.first <= position <= expected.last
            and self.stretches[-1].length == length
        ):
            first = position
            if expected is not None and expected.epoch == epoch and expected.first <= position:
                first = expected.first  # a window that another process began
            self._add(Stretch(step + 1, epoch, first, self.size if self.stretches else size, length))
        self._expect(step + 1)
        window = self.find(step + 1)
        if window is not None and window.epoch == self.ended[0] == epoch and window.first <= self.ended[1]:
            self.lag = NEVER  # the window before this one had no update

    def note(self, step: int, epoch: int, batch: int) -> None:
        """Note an update that did not end with the expected batch."""
        expected = self.find(step)
        first = expected.first if expected is not None and expected.epoch == epoch else batch
        first = self._after_ended(epoch, min(first, batch), batch)
        if expected != (epoch, first, batch):  # else it is the short window at the end of an epoch
            length = self.stretches[-1].length if self.stretches else 0
            self._add(Stretch(step, epoch, first, batch - first + 1, length))
        self._expect(step)

    def skip(self, epoch: int, batch: int) -> None:
        """Note a batch that is not trained on."""
        self.skipped.setdefault(epoch, set()).add(batch)
        while len(self.skipped) > 1 and sum(map(len, self.skipped.values())) > MOST_SKIPPED:
            del self.skipped[min(self.skipped)]

    def end_without_update(self, step: int, epoch: int, batch: int) -> None:
        """Note the last batch of an update that is not made. step: the steps that the run has made."""
        window = self.open_window(step, epoch, batch)
        self.ended_first = batch if window is None else window.first
        self.ended = (epoch, batch)
        self.lag = NEVER

    def find(self, step: int) -> UpdateWindow | None:
        """Return the batches of the update that makes a step; None for steps before the first stretch."""
        index = bisect.bisect_right(self.stretches, step, key=lambda each: each.step) - 1
        if index < 0:
            return None
        stretch = self.stretches[index]
        epoch, size, length = stretch.epoch, stretch.size, stretch.length
        first = stretch.first + (step - stretch.step) * size
        if length and first >= length:
            later = step - stretch.step + (stretch.first - length) // size  # updates after that epoch
            per_epoch = -(-length // size)
            epoch, first = epoch + 1 + later // per_epoch, later % per_epoch * size
        last = first + size - 1
        return UpdateWindow(epoch, first, min(last, length - 1) if length else last)

    def batches(self, step: int) -> tuple[int, list[int]] | None:
        """Return the epoch and the batches of an update, without skipped ones."""
        window = self.find(step)
        return None if window is None else (window.epoch, self.trained(window))

    def open_window(self, step: int, epoch: int, batch: int) -> UpdateWindow | None:
        """Return the batches after the newest update, up to this one; None if there are none.

        step: the steps that the run has made. An update that was skipped at this batch counts as open.
        """
        window = self.find(step + 1)
        if window is None or window.epoch != epoch or batch < window.first:
            return None
        first = self.ended_first if self.ended == (epoch, batch) else self._after_ended(*window[:2], batch)
        return UpdateWindow(epoch, first, batch)

    def open_batches(self, step: int, epoch: int, batch: int) -> list[int]:
        """Return the batches, up to this one, of an update that is being made after so many steps."""
        window = self.find(step + 1)
        first = window.first if window is not None and window.epoch == epoch else batch
        first = self._after_ended(epoch, min(first, batch), batch)
        return self.trained(UpdateWindow(epoch, first, batch))

    def trained(self, window: UpdateWindow) -> list[int]:
        """Return the batches of a window without skipped ones."""
        skipped = self.skipped.get(window.epoch, ())
        return [each for each in range(window.first, window.last + 1) if each not in skipped]

    def _after_ended(self, epoch: int, first: int, batch: int) -> int:
        """Return the first batch of a window, after one whose update was not made."""
        ended = self.ended
        return ended[1] + 1 if ended[0] == epoch and first <= ended[1] < batch else first

    def _add(self, stretch: Stretch) -> None:
        while self.stretches and self.stretches[-1].step >= stretch.step:
            self.stretches.pop()
        self.stretches.append(stretch)
        del self.stretches[:-MOST_STRETCHES]

    def _expect(self, step: int) -> None:
        """Expect the batch of this update, and of those after it in the epoch."""
        window, self.size = self.find(step), self.stretches[-1].size
        assert window is not None
        self.lag = window.first + self.size - 1 - step * self.size

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the windows as plain data."""
        return {
            "stretches": [list(each) for each in self.stretches],
            "skipped": [[epoch, *sorted(batches)] for epoch, batches in self.skipped.items()],
            "ended": [*self.ended, self.ended_first],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the windows."""
        self.stretches = [Stretch(*each) for each in saved["stretches"]]
        self.skipped = {epoch: set(batches) for epoch, *batches in saved["skipped"]}
        epoch, last, *first = saved["ended"]  # older versions do not write the first one
        self.ended, self.ended_first = (epoch, last), first[0] if first else last
        if self.stretches:
            self.size = self.stretches[-1].size
