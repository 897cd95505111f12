"""Synchronizes the ranks of a hosted run: stops, saves, and the signals that hooks return.

After every batch each rank contributes a few numbers to a reduction and reads the result of the previous
batch, so no rank waits. If the result says that a rank requests something, the ranks exchange the details,
and all act on them at the same batch. A rank whose epoch is over keeps taking part until all others are
there, so epochs may differ in length.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from hookline.distributed.comm import Answer, Ranks
from hookline.interop.hosted.view import HostView
from hookline.run.save_request import SaveRequest
from hookline.run.state import count_noun
from hookline.training.ranks.failure_monitor import RankFailures
from hookline.training.ranks.rank_sync import as_plain, as_request
from hookline.util.errors import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, HooklineError, Signal

log = logging.getLogger("hookline")

PATIENCE = 30.0
"""Seconds of waiting for other ranks that are reported."""
AFTER_BATCH, AT_VALIDATION, BETWEEN_EPOCHS = range(3)
POINT_NAMES = ("after a training batch", "at a validation", "at the end or the beginning of an epoch")


class HostedRankSync:
    """Synchronizes one rank with the others."""

    def __init__(self, line: HostView, ranks: Ranks) -> None:
        self.line = line
        self.ranks = ranks
        self.stop = False
        """Whether the ranks have agreed to stop; `should_stop` of the state is the request of this rank."""
        self.agreed: list[SaveRequest] = []
        """Checkpoints that all ranks are about to write together."""
        self.failures: RankFailures | None = None
        """Finds the rank that has failed, in a loop whose errors the run may replace."""
        self._own_requests: list[SaveRequest] = []
        """Checkpoints that this rank has requested, but not all ranks."""
        self._pending: Answer | None = None
        self._steers_batches = self._steers_updates = self._has_warned = False

    def compare_lengths(self, batches: int | None) -> None:
        """Warn if the epoch that begins has another number of batches on other ranks. All ranks call it.

        batches: their number on this rank, if it is known.
        """
        lengths = self.ranks.gather(-1 if batches is None else batches)
        known = [each for each in lengths if each >= 0]
        if self.ranks.rank == 0 and len({*known}) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "The ranks have different numbers of batches: %s. DistributedDataParallel waits for all "
                "ranks in every batch, so the loop hangs after %d batches. Shard the data with a "
                "DistributedSampler, leave the epoch at the same batch on all ranks, or use torch's Join.",
                ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(lengths)),
                min(known),
            )

    # ---- polling -------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Contribute the requests of this rank after a batch, and act on those of the previous batch."""
        asked = self._send(AFTER_BATCH)
        before, self._pending = self._pending, asked
        if before is not None and self._has_requests(before.read()):
            self._exchange()
        elif (
            self.line.save_requests
        ):  # wait for this answer: if all ranks save, the checkpoint is of this step
            self._exchange_if_all_save(asked.read())

    def sync_point(self, point: int) -> None:
        """Wait until all ranks are here, and act on the requests of any of them."""
        while True:
            asked = self._send(point)
            before, self._pending = self._pending, asked
            if before is not None and self._has_requests(before.read()):
                self._exchange()
                continue
            asked.wait(PATIENCE, functools.partial(self._report_wait, point))
            answer = asked.read()
            has_requests = self._has_requests(answer)
            if answer[3] == -answer[4]:
                self._pending = None
                if has_requests or answer[1]:
                    self._exchange()
                return
            self._exchange_if_all_save(answer)

    def _report_wait(self, point: int, seconds: float) -> None:
        """Log that other ranks do not arrive, the first time."""
        if seconds < 2 * PATIENCE:
            log.warning(
                "This rank has waited %.0f s for the other ranks %s, after %s of epoch %d. Do all ranks have "
                "the same number of batches?",
                seconds,
                POINT_NAMES[point],
                count_noun(self.line.state.batch_idx + 1, "batch", "batches"),
                self.line.state.epoch,
            )

    def _send(self, point: int) -> Answer:
        saves, changed = (
            len(self.line.save_requests),
            self.line.state.should_stop is not self.stop or bool(self._own_requests),
        )
        return self.ranks.largest((changed, saves, -saves, point, -point))

    def _has_requests(self, answer: list[int]) -> bool:
        changed, most, fewest, point, least = answer
        if point != -least and AT_VALIDATION in (point, -least):
            raise HooklineError(
                f"The ranks are out of step: one is {POINT_NAMES[-least]}, another {POINT_NAMES[point]}. "
                "Every rank must run each validation, with its part of the data."
            )
        return bool(changed) or most != -fewest

    def _exchange_if_all_save(self, answer: list[int]) -> None:
        if -answer[2] > 0:
            self._exchange()
        else:
            self._own_requests += self.line.save_requests
            self.line.save_requests = []

    def _exchange(self) -> None:
        """Gather the requests of all ranks, and act on them in the same way on each."""
        line, s = self.line, self.line.state
        mine, line.save_requests, self._own_requests = [*self._own_requests, *line.save_requests], [], []
        stop = [s.stop_reason or "a stop was requested", s.stop_status] if s.should_stop else None
        requests = self.ranks.gather({"stop": stop, "saves": [as_plain(each) for each in mine]})
        if self._pending is not None:  # its result is known by now
            self._pending.read()
            self._pending = None
        saves = {repr(save[:2]): save for request in requests for save in request["saves"]}
        self.agreed += [as_request(each) for each in saves.values()]
        reasons = {
            rank: request["stop"] for rank, request in enumerate(requests) if request["stop"] is not None
        }
        if reasons and not self.stop:
            first, status = next(iter(reasons.values()))
            who = (
                ""
                if len(reasons) == len(requests)
                else f" (requested by rank {', '.join(map(str, reasons))})"
            )
            self.stop = True
            s.ending.set_stop(f"{first}{who}", status)

    # ---- signals of hooks ----------------------------------------------------------------------------------

    def find_steering_hooks(self) -> None:
        """Record whether any hook may return a signal: only then the ranks wait for it. All ranks have the
        same hooks.
        """
        steering = {
            listener.event.name
            for entry in self.line.hooks.entries()
            for listener in entry.listeners
            if listener.steers
        }
        self._steers_batches = "on_train_batch_start" in steering
        self._steers_updates = "on_before_optimizer_step" in steering

    def on_batch(self, signal: Signal | None) -> Signal | None:
        """Return the strongest signal of any rank: all ranks skip the batch, or end the epoch, together."""
        if not self._steers_batches:
            return signal
        strongest = self._most(signal)[0]
        return {0: None, SKIP_BATCH.strength: SKIP_BATCH, END_EPOCH.strength: END_EPOCH}[strongest]

    def on_update(self, signal: Signal | None) -> Signal | None:
        """Skip the update on all ranks if one skips it, because their weights must stay the same."""
        if not self._steers_updates:
            return signal
        most, least = self._most(signal)
        if most == STEP_DONE.strength and most != least:
            raise HooklineError(
                "STEP_DONE was returned from on_before_optimizer_step on some ranks only, so their weights "
                "would no longer be the same."
            )
        return SKIP_STEP if most == SKIP_STEP.strength else signal

    def _most(self, signal: Signal | None) -> tuple[Any, Any]:
        mine = 0 if signal is None else signal.strength
        most, least = self.ranks.largest((mine, -mine)).read()
        return most, -least
