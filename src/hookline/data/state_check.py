"""Whether the state_dict of a loader or sampler advances as batches are read."""

from __future__ import annotations

import logging
from typing import Any

from hookline.data.fingerprint import digest

log = logging.getLogger("hookline")


class StateCheck:
    """Compares the states of one pass: a state that is the same at two batches cannot say where the loader
    is.

    It looks when a pass is opened, after the first batch, and at each save. Loaders that are not trained on
    are not looked at.
    """

    def __init__(self, owner: Any, trains: bool) -> None:
        self.owner = owner
        self.trains = trains
        self.is_stuck = False
        self._is_reported = False
        self._first = 0
        self._passes = 0
        self._at_open: str | None = None
        self._after_first: str | None = None

    def open(self, position: int, stuck: bool = False) -> None:
        """Note where a pass begins. stuck: whether the state it was begun with is known not to advance."""
        self._first, self._after_first = position, None
        self.is_stuck = self.is_stuck or stuck
        # later passes may be put back to the beginning only when they are first read
        self._at_open = self._now() if self._passes == 0 else None
        self._passes += 1

    def after_first(self) -> None:
        """Note the state after the first batch of the pass."""
        self._after_first = self._now()

    def check(self, state: Any, position: int) -> bool:
        """Return whether this state, of a save at this batch, does not advance. The first time it is
        reported.
        """
        read = position - self._first
        before = self._after_first if read > 1 else self._at_open
        if read > 0 and before is not None:
            self.is_stuck = digest(state) == before
        if self.is_stuck and not self._is_reported:
            self._is_reported = True
            log.warning(
                "%s.state_dict() does not advance: at batch %d it is the same as at batch %d, so it cannot "
                "say where the run is. A resume will not rely on it and will read the epoch again up to "
                "the saved batch. Let state_dict() count what was yielded.",
                type(self.owner).__name__,
                position,
                self._first + (read > 1),
            )
        return self.is_stuck

    def _now(self) -> str | None:
        try:
            return digest(self.owner.state_dict()) if self.trains else None
        except Exception:  # one that has no state before it is read; when it is saved, the error counts
            return None
