"""Check every n steps that all ranks answer, that none is slow, and that their learning rates are equal."""

from __future__ import annotations

import logging
import socket
import statistics
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Annotated, Any, Literal

from hookline.engine.checks import Above, Count, Duration, checked_parameters
from hookline.engine.hook import Hook
from hookline.util.errors import OptionError, PeerError

NOISE = 0.01
"""Seconds by which the times of ranks may differ without being slow."""
MOST_NAMED = 8
"""The largest number of ranks in the message about learning rates."""
log = logging.getLogger("hookline")


class HealthCheck(Hook):
    """Pings all ranks every n steps over the control group, and names ranks that are silent or slow, or that
    have another learning rate.

    A rank is slow if its own part of a step takes much longer than the median of all ranks, and 10 ms longer.
    It is the time from the end of a batch to the next backward: hooks, waiting for data, and the forward.
    Waiting for other ranks does not count. A rank that is slow at two checks in a row is named, and again
    after 2, 4, 8, ... such checks. `seconds` has the newest time of every rank. Ranks with different learning
    rates have different weights from then on. They are named at the 1st, 2nd, 4th, ... such check. What it
    reports is also in the log of the run, as a `warning`. With one process it does nothing.
    """

    tier = "builtin"
    observes = True

    @checked_parameters
    def __init__(
        self,
        every_n_steps: Annotated[int, Count(1)] = 100,
        patience: str | float | timedelta = "1 minute",
        slower: Annotated[float, Above(1, most=sys.float_info.max)] = 1.5,
        action: Literal["warn", "raise"] = "warn",
    ) -> None:
        """every_n_steps: steps between two checks. patience: how long to wait for a rank before a report.
        action: warn, or end the run ('raise') if a rank is silent or learning rates differ. slower: a rank is
        slow above this multiple of the median time.
        """
        self.every_n_steps = every_n_steps
        self.patience = Duration()("HealthCheck: patience", patience)
        self.slower = float(slower)
        self.action = action
        self.seconds: list[float] = []
        self.slow: list[int] = []
        """The ranks that were slow at the newest check."""
        self._since: float | None = None
        self._own, self._batches, self._check = 0.0, 0, 0
        self._slow_checks: Counter[int] = Counter()
        """For each rank, the checks at which it was slow, as at the check before."""
        self._unequal_checks = 0
        self._ranks: Any = None
        self._store: Any = None
        self._logger: Any = None
        self._epoch = 0

    def setup(self, trainer: Any) -> None:
        ranks = trainer.strategy.ranks
        if self.ranks != "all":
            raise OptionError(
                f"HealthCheck: ranks={self.ranks!r}, but it needs all ranks; leave it at 'all'.",
                option="ranks",
                value=self.ranks,
            )
        self.seconds, self.slow, self._ranks = [], [], None
        self._slow_checks, self._unequal_checks = Counter(), 0
        if not ranks.alone:
            self._ranks, self._store = ranks, ranks.store("health")
            self._run, self._hosts = ranks.from_zero(time.time_ns()), ranks.gather(socket.gethostname())

    def teardown(self) -> None:
        self._ranks = self._store = None

    # ---- this rank's own part of a step --------------------------------------------------------------------

    def on_train_batch_end(self, clock: Any = time.monotonic) -> None:
        self._since = clock()

    on_train_epoch_start = on_validation_end = on_checkpoint_save = on_train_batch_end

    def on_before_backward(self, clock: Any = time.monotonic) -> None:
        if self._since is not None:
            self._own += clock() - self._since
            self._batches += 1
            self._since = None

    # ---- the check -----------------------------------------------------------------------------------------

    def on_step_end(
        self, step: int, epoch: int, optimizers: Any, logger: Any, clock: Any = time.monotonic
    ) -> None:
        if step % self.every_n_steps or self._ranks is None:
            return
        self._check += 1
        self._logger, self._epoch = logger, epoch
        self._store.set(f"{self._run}/{self._check}/{self._ranks.rank}", "")
        self._wait(self._ranks.largest((0,)), step)
        rates = [group.get("lr") for optimizer in optimizers or () for group in optimizer.param_groups]
        # reading a tensor would wait for the device
        sum_of_rates = float(sum(each for each in rates if isinstance(each, int | float)))
        known = self._ranks.gather_numbers([self._own, self._batches, sum_of_rates])
        self.seconds = [own / batches if batches else 0.0 for own, batches, _ in known]
        self._own, self._batches = 0.0, 0
        self._report_slow(step)
        self._compare_rates([rate for _, _, rate in known], step)
        if self._since is not None:
            self._since = clock()  # the wait above is not this rank's own time

    def _report_slow(self, step: int) -> None:
        median, before = statistics.median_low(self.seconds), self.slow
        self.slow = [
            rank for rank, each in enumerate(self.seconds) if each > max(self.slower * median, median + NOISE)
        ]
        again = [rank for rank in self.slow if rank in before]
        self._slow_checks.update(again)
        due = [rank for rank in again if _is_due(self._slow_checks[rank])]
        if due and self._ranks.rank == 0:
            named = ", ".join(f"{self._name(rank)}: {1000 * self.seconds[rank]:.1f} ms" for rank in due)
            other = "time of the other rank" if len(self.seconds) == 2 else "median of all ranks"
            self._warn(
                f"HealthCheck: slow at step {step} and at the check before: {named} of its own per step; "
                f"the {other} is {1000 * median:.1f} ms",
                step,
            )

    def _compare_rates(self, rates: list[float], step: int) -> None:
        """Report ranks whose learning rates differ."""
        if len(set(map(repr, rates))) == 1:  # as text, because NaN is not equal to itself
            return
        self._unequal_checks += 1
        named = ", ".join(f"{self._name(rank)}: {each:g}" for rank, each in enumerate(rates[:MOST_NAMED]))
        text = (
            f"HealthCheck: the learning rates of the ranks differ at step {step}, so their weights drift "
            f"apart: {named}{', ...' if len(rates) > MOST_NAMED else ''} (the sum over all parameter "
            "groups). Does a hook or a scheduler change them on some ranks only? `hookline diverge RUN "
            '--ranks` finds the first step that differs, in a run with Trainer(digest="every 10 steps").'
        )
        if self.action == "raise":
            raise PeerError(text)
        if self._ranks.rank == 0 and _is_due(self._unequal_checks):
            self._warn(text, step)

    def _wait(self, answer: Any, step: int) -> None:
        """Wait until all ranks have answered. Report the missing ranks each time the patience ends."""

        def report(waited: float) -> None:
            keys = {rank: f"{self._run}/{self._check}/{rank}" for rank in range(self._ranks.world_size)}
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            text = (
                f"HealthCheck: no answer at step {step} for {waited:.1f} s from "
                f"{', '.join(map(self._name, missing)) or 'ranks that reached the step and then stopped'}"
            )
            if self.action == "raise":
                raise PeerError(f"{text}.")
            self._warn(text, step)

        answer.wait(self.patience, report)
        answer.read()

    def _warn(self, text: str, step: int) -> None:
        """Log a warning, also in the log of the run, which rank zero writes."""
        log.warning("%s", text)
        self._logger.log_event("warning", {"step": step, "epoch": self._epoch, "message": text})

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._hosts[rank]})"


def _is_due(count: int) -> bool:
    """Return whether to report something for the 1st, 2nd, 4th, ... time."""
    return count & (count - 1) == 0
