"""validate() inside a hook, where there are several ranks: all of them must call it, and one that calls it
alone is told so.

It cannot find out by itself: whoever does not come may be slow. So after a while it asks in the notes that
all ranks read, and those that have gone past the place answer, from a thread of their own.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from hookline.errors import HooklineError
from hookline.loops.run import Run
from hookline.loops.stacks import stack_of, waits_for_ranks

ASKING = 1.0
"""Seconds to wait for the others before asking where they are."""
STANDING = 2.0
"""Seconds that a rank has waited for others elsewhere when it is sure that it will not come."""
PAUSE, LONG_PAUSE = 0.005, 0.1


class Nested:
    """This rank's part in it: how often its hooks have called validate(), and how often another's are known
    to have.
    """

    def __init__(self, run: Run, board: Any, notes: Any) -> None:
        """`board`: the notes as the thread that trains sees them; `notes`: as the thread does that watches
        them.
        """
        self.run = run
        self.count = 0
        self._board, self._notes = board, notes
        self._thread = threading.get_ident()
        self._awaited = self._asks = 0
        self._since: float | None = None

    def begin(self) -> None:
        """Wait until all ranks have called it, or one says that it will not."""
        peers = self.run.peers
        assert peers is not None
        self.count += 1
        key, began, asked = f"nested/{self.count}", time.monotonic(), False
        self._board.add(key, 1)
        while self._board.add(key, 0) < self.run.strategy.world_size:
            peers.raise_failure()
            if not asked and time.monotonic() - began > ASKING:
                peers.ask_for(self.count, self.run.boundary.asks)
                asked = True
            if asked and self._board.check([f"{key}/past"]):
                other = self._board.get(f"{key}/past").decode()
                raise HooklineError(
                    f"validate() was called inside a hook on rank {self.run.strategy.rank}, but not on rank "
                    f"{other}, which has gone on. It takes all ranks: call it on each of them at the same "
                    "event, not in a hook with ranks = 'zero' and not under `if rank == 0`."
                )
            time.sleep(LONG_PAUSE if asked else PAUSE)

    # ---- in the thread that reads the notes ----------------------------------------------------------------

    def heard(self, number: int, asks: int) -> None:
        """Somebody waits for this rank to call it for that time; the ranks had met so often then."""
        self._awaited, self._asks, self._since = number, asks, None

    def look(self) -> None:
        """Answer, if this rank has gone past the place."""
        if self.count >= self._awaited:
            return
        if self.run.boundary.asks <= self._asks and not self._waits():
            self._since = None
            return
        now = time.monotonic()
        self._since = self._since or now
        if self.run.boundary.asks > self._asks or now - self._since >= STANDING:
            self._notes.set(f"nested/{self._awaited}/past", str(self.run.strategy.rank))
            self._awaited = 0

    def _waits(self) -> bool:
        """Whether the run waits for other ranks: it has come to something later that all of them do."""
        return waits_for_ranks(stack_of(self._thread), backward=False)
