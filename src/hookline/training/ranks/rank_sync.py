"""Decisions of all ranks: to stop, to save, to handle a signal, and one shared clock.

After every batch each rank starts an all-reduce of a few numbers, which say whether it has a request, and
reads the result of the one before. No rank waits, and all act on the same result after the same batch. Only
if a rank has a request do all ranks wait and exchange the details. So all ranks carry out the request of one
rank, at most two batches later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any, Never

from hookline.distributed.comm import Round
from hookline.reliability.signals import stop_for_signal
from hookline.run.commands import Boundary, run_commands
from hookline.run.run import Run
from hookline.run.save_request import RollbackRequest, SaveRequest
from hookline.util.errors import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, HooklineError, Signal

AFTER_BATCH, ELSEWHERE = 0, 1
STEERED = ("on_train_batch_start", "on_before_optimizer_step")


class RankSync(Boundary):
    """The boundary of one rank among several, where all ranks decide together."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.ranks = run.strategy.ranks
        self.stop = False
        """Whether the ranks have agreed to stop; `should_stop` of the state is this rank's own request."""
        self.waits_for_signals = False
        """Whether a hook on some rank may end an epoch for all ranks, so that they exchange its signals."""
        self.steers_updates = False
        """Whether a hook on some rank may skip an update for all ranks."""
        self.polls = 0
        """The number of exchanges so far: the same on every rank at the same place of the run."""
        self._seconds: float = self.ranks.from_zero(time.monotonic())
        self._rounds = self.ranks.rounds(6)
        self._asked: Round | None = None
        self._kept: list[SaveRequest] = []
        """Checkpoints that this rank, but not all ranks, requested."""
        self._rollback: RollbackRequest | None = None
        """A rollback that this rank requests."""
        self._shared: Any = None
        """The facts that hooks request, as last exchanged with the other ranks."""
        self._agree_on_wants(self.ranks.gather(self._wants()))

    def now(self) -> float:
        """Return rank zero's clock at the last poll, so that max_time ends all ranks at the same batch."""
        return self._seconds

    # ---- polling -------------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self.stop

    @property
    def signal_filters(self) -> tuple[Callable[[Signal | None], Signal | None], ...]:
        """Replace the signal that hooks return before an update by the one that all ranks agree on."""
        return (self.on_update,)

    def stop_by_clock(self) -> None:
        """Stop because max_time is over, by the clock that all ranks share."""
        self.stop = True

    def request_rollback(self, request: RollbackRequest) -> None:
        """Go back to a checkpoint when all ranks agree: now if all request it, else one batch later."""
        self._rollback = self._rollback or request

    def poll(self) -> None:
        """Announce this rank's requests after a batch, and read those of one batch ago, without waiting."""
        run = self.run
        asked = self._ask(AFTER_BATCH)
        before, self._asked = self._asked, asked
        if before is not None and self._has_requests(before.read()):
            self._exchange()
        elif run.saves.requests or run.plan.asked_at is not self._shared or self._rollback is not None:
            self._poll_now(asked)

    def _poll_now(self, asked: Round) -> None:
        """Wait for the other ranks, because this one requests a checkpoint or a rollback or has other hooks.

        If all ranks do, the checkpoint is of this step. Otherwise keep the request for the next exchange.
        """
        run, mine = self.run, self._requests()
        has_more = run.plan.asked_at is not self._shared or self._rollback is not None
        if (mine or has_more) and -asked.read()[3] > 0:
            self._exchange()
        else:
            self._kept += mine
            for request in mine:
                run.saves.requests.remove(request)

    def sync_point(self) -> None:
        """Wait for all ranks outside the batches, and carry out the requests of any rank at once."""
        if self._asked is not None:
            self._has_requests(self._asked.read())
            self._asked = None
        answer = self._ask(ELSEWHERE).read()
        if self._has_requests(answer) or answer[2]:
            self._exchange()

    def _ask(self, kind: int) -> Round:
        run, s = self.run, self.run.state
        self.polls += 1
        has_other_hooks, has_rollback = run.plan.asked_at is not self._shared, self._rollback is not None
        saves = len(self._requests()) if run.saves.requests else 0
        requests = saves + has_other_hooks + has_rollback
        is_signalled = run.signals.received > 0 and not run.signals.number
        is_new = (
            s.should_stop is not self.stop
            or is_signalled
            or run.participants.commands.waiting
            or bool(self._kept)
        )
        clock = int(time.monotonic() * 1000) if self.ranks.rank == 0 else 0
        position = 2 * run.progress.position + kind
        return self._rounds.ask((is_new, clock, requests, -requests, position, -position))

    def _has_requests(self, answer: list[int]) -> bool:
        """Set the clock; return whether the ranks have requests to exchange."""
        is_new, clock, most, fewest, position, least = answer
        self._seconds = clock / 1000
        if position != -least:
            raise HooklineError(
                f"The ranks are out of step: one is {_describe_position(-least)}, another "
                f"{_describe_position(position)}. All of them must train on the same number of batches."
            )
        return bool(is_new) or most != -fewest

    def _requests(self) -> list[SaveRequest]:
        return [each for each in list(self.run.saves.requests) if each is not None]

    # ---- exchanging requests -------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Gather the requests of all ranks; each rank carries out all of them, in the same order."""
        run, s = self.run, self.run.state
        own_saves = self._requests()
        for request in own_saves:
            run.saves.requests.remove(request)
        mine = {
            "stop": [s.stop_reason or "a stop was requested", s.stop_status] if s.should_stop else None,
            "signal": run.signals.received,
            "commands": run.participants.commands.left(),
            "saves": [as_plain(each) for each in (*self._kept, *own_saves)],
            "wants": self._wants(),
            "rollback": None if self._rollback is None else list(astuple(self._rollback)),
        }
        of_all = self.ranks.gather(mine)
        if self._asked is not None:  # this exchange has answered it
            self._asked.read()
            self._asked = None
        self._kept, self._rollback = [], None
        if rollback := next(filter(None, (each["rollback"] for each in of_all)), None):
            run.resume.request_rollback(RollbackRequest(*rollback))
        self._agree_on_wants([each["wants"] for each in of_all])
        for rank, requests in enumerate(of_all):
            run_commands(run, requests["commands"], rank)
        if any(each["commands"] for each in of_all):  # commands may have changed the hooks
            self._agree_on_wants(self.ranks.gather(self._wants()))
        for save in {repr(save[:2]): save for each in of_all for save in each["saves"]}.values():
            run.saves.requests.append(as_request(save))
        self._agree_to_stop([each["stop"] for each in of_all])
        number = max(each["signal"] for each in of_all)
        if number and not run.signals.number:
            stop_for_signal(run, number)
            self.stop = True

    def _agree_to_stop(self, requests: list[list[str] | None]) -> None:
        """Stop all ranks if one rank requests it, as the first of them requests it."""
        s = self.run.state
        asking = {rank: each for rank, each in enumerate(requests) if each is not None}
        if asking and not self.stop:
            reason, status = next(iter(asking.values()))
            if len(asking) < len(requests):
                reason = f"{reason} (asked for by rank {', '.join(map(str, asking))})"
            s.ending.set_stop(reason, status)
        elif asking:
            s.request_stop("")
        self.stop = s.should_stop  # a command may have requested it too, on every rank

    # ---- signals that hooks return -------------------------------------------------------------------------

    def _wants(self) -> list[Any]:
        """Return the facts that this rank's hooks request, by event, and the events whose signals they use.

        All ranks need to know them: some facts need a reduction over ranks, and ranks exchange signals only
        at events where a hook may return one.
        """
        run, hooks = self.run, self.run.state.hooks
        self._shared = run.plan.asked_at
        # hooks that are switched off may be switched on again
        switched_off = [x for entry in hooks.entries() if not entry.enabled for x in entry.listeners]
        steering = {
            event
            for event in STEERED
            for each in (*run.plan.listeners(event), *switched_off)
            if each.event.name == event and each.steers
        }
        return [{event: sorted(facts) for event, facts in self._shared.items()}, sorted(steering)]

    def _agree_on_wants(self, of_all: list[list[Any]]) -> None:
        """Compute on all ranks the facts that a hook on any rank requests, so that collectives match."""
        wanted: dict[str, frozenset[str]] = {}
        for facts, _ in of_all:
            for event, names in facts.items():
                wanted[event] = wanted.get(event, frozenset()).union(names)
        self.run.plan.agree_on_wants(wanted)
        steering = {event for _, events in of_all for event in events}
        self.waits_for_signals, self.steers_updates = (event in steering for event in STEERED)

    def refuse(self, signal: Signal) -> Never:
        """Raise, because a hook that was just added returned a signal that the other ranks do not expect."""
        raise HooklineError(
            f"{signal!r} was returned by a hook that was added during a run of several ranks. The ranks "
            "exchange such signals from the second batch after that on: return it later, or add the hook "
            "before the run."
        )

    def on_batch(self, signal: Signal | None) -> Signal | None:
        """Return the signal for this batch. If one rank ends the epoch, all end it.

        A skipped batch is skipped on its own rank; on all ranks if the forward pass communicates.
        """
        if not self.waits_for_signals:
            return signal if signal is None else self.refuse(signal)
        most = self.ranks.largest((0 if signal is None else signal.strength,)).read()[0]
        if most and self.run.strategy.forward_communicates:
            return END_EPOCH if most == END_EPOCH.strength else SKIP_BATCH
        return END_EPOCH if most == END_EPOCH.strength else signal

    def on_update(self, signal: Signal | None) -> Signal | None:
        """Return the signal for this update. If one rank skips it, all do, so that weights stay equal."""
        if not self.steers_updates:
            return signal if signal is None else self.refuse(signal)
        mine = 0 if signal is None else signal.strength
        most, fewest = self.ranks.largest((mine, -mine)).read()
        if most == STEP_DONE.strength and -fewest != most:
            signals = self.ranks.gather(repr(signal))
            by_rank = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(signals))
            raise HooklineError(
                "STEP_DONE was returned from on_before_optimizer_step on some ranks only, so their weights "
                f"would no longer be the same: {by_rank}."
            )
        return SKIP_STEP if most == SKIP_STEP.strength else signal


def _describe_position(position: int) -> str:
    batches, kind = divmod(position, 2)
    return f"{'after' if kind == AFTER_BATCH else 'at the end of, or before,'} batch {batches} of its epoch"


def as_plain(request: SaveRequest) -> list[Any]:
    """Return a save request as JSON values, for the other ranks."""
    path = request.path
    return [
        None if path is None else str(path),
        request.reason,
        request.monitor,
        isinstance(path, Path),
        request.is_automatic,
        request.weights,
    ]


def as_request(plain: list[Any]) -> SaveRequest:
    """Return the save request that `as_plain` has packed."""
    path, reason, monitor, is_path, is_automatic, weights = plain
    return SaveRequest(Path(path) if is_path else path, reason, monitor, is_automatic, weights=weights)
