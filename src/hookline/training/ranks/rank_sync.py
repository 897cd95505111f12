"""What the ranks of a run decide together: to stop, to save, to heed a signal, and which clock they go by.

After every batch each rank says in a few numbers whether it has something to discuss, and reads what all of
them said one batch ago: nobody waits, and everybody acts on the same answer at the same boundary. Only when
somebody has something to discuss do they all stop for a moment and exchange the details. So what one rank
wants is done by all, at most two batches later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

from hookline.distributed.comm import Round
from hookline.engine.listener import Listener
from hookline.reliability.signals import heed_signal
from hookline.run.commands import Boundary, run_commands
from hookline.run.run import Run
from hookline.run.save_request import SaveRequest
from hookline.util.errors import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, HooklineError, Signal

AFTER_BATCH, ELSEWHERE = 0, 1
STEERED = ("on_train_batch_start", "on_before_optimizer_step")


class RankSync(Boundary):
    """The boundary of one rank among several: what all of them decide."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.ranks = run.strategy.ranks
        self.stop = False
        """Whether the ranks have agreed to stop; `should_stop` of the state is what this one wants."""
        self.steers_batches = False
        """Whether a hook on some rank may end an epoch for all of them."""
        self.steers_updates = False
        """Whether a hook on some rank may skip an update for all of them."""
        self.polls = 0
        """How often the ranks have met: the same number at the same place of the run."""
        self._seconds: float = self.ranks.from_zero(time.monotonic())
        self._rounds = self.ranks.rounds(6)
        self._asked: Round | None = None
        self._kept: list[SaveRequest] = []
        """Checkpoints that this rank, but not all, asked for."""
        self._told: Any = None
        """What the hooks asked for when the ranks last spoke about that."""
        self._agree_on_wants(self.ranks.gather(self._wants()))

    def now(self) -> float:
        """Rank zero's clock when the ranks last agreed: all of them find the same time is over at the same
        batch.
        """
        return self._seconds

    # ---- meeting -------------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self.stop

    @property
    def waits_for_signals(self) -> bool:  # type: ignore[override]
        """Whether all ranks wait for what hooks return before a batch."""
        return self.steers_batches

    @property
    def signal_filters(self) -> tuple[Callable[[Signal | None], Signal | None], ...]:
        """What becomes of the signal that hooks return before an update."""
        return (self.on_update,)

    def stop_by_clock(self) -> None:
        """Stop because the time is over, by a clock that is the same for all ranks."""
        self.stop = True

    def poll(self) -> None:
        """After a batch: say what is new, hear what was new one batch ago. Nobody waits, unless there is
        something to do.
        """
        run = self.run
        asked = self._ask(AFTER_BATCH)
        before, self._asked = self._asked, asked
        if before is not None and self._hear(before.read()):
            self._exchange()
        elif run.saves.requests or run.plan.asked_at is not self._told:
            self._poll_now(asked)

    def _poll_now(self, asked: Round) -> None:
        """This rank wants a checkpoint, or has other hooks. If all do, it is worth the wait: it is of this
        very step.
        """
        run, mine = self.run, self._requests()
        if (mine or run.plan.asked_at is not self._told) and -asked.read()[3] > 0:
            self._exchange()
        else:
            self._kept += mine
            for each in mine:
                run.saves.requests.remove(each)

    def sync_point(self) -> None:
        """Between batches: wait for all, and do at once what any of them wants."""
        if self._asked is not None:
            self._hear(self._asked.read())
            self._asked = None
        answer = self._ask(ELSEWHERE).read()
        if self._hear(answer) or answer[2]:
            self._exchange()

    def _ask(self, kind: int) -> Round:
        run, s = self.run, self.run.state
        self.polls += 1
        wishes = len(self._requests()) if run.saves.requests else 0
        if run.plan.asked_at is not self._told:
            wishes += 1
        is_signalled = run.signals.received > 0 and not run.signals.number
        news = (
            s.should_stop is not self.stop
            or is_signalled
            or run.participants.commands.waiting
            or bool(self._kept)
        )
        clock = int(time.monotonic() * 1000) if self.ranks.rank == 0 else 0
        place = 2 * run.progress.position + kind
        return self._rounds.ask((news, clock, wishes, -wishes, place, -place))

    def _hear(self, answer: list[int]) -> bool:
        """Set the clock; whether there is something to discuss."""
        news, clock, most, fewest, place, least = answer
        self._seconds = clock / 1000
        if place != -least:
            raise HooklineError(
                f"The ranks are out of step: one is {_where(-least)}, another {_where(place)}. "
                "All of them must train on the same number of batches."
            )
        return bool(news) or most != -fewest

    def _requests(self) -> list[SaveRequest]:
        return [each for each in list(self.run.saves.requests) if each is not None]

    # ---- what is discussed ---------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Everybody tells everything, and all do the same with it."""
        run, s = self.run, self.run.state
        mine = self._requests()
        for each in mine:
            run.saves.requests.remove(each)
        told = {
            "stop": s.stop_reason or "a stop was asked for" if s.should_stop else None,
            "signal": run.signals.received,
            "commands": run.participants.commands.left(),
            "saves": [as_plain(each) for each in (*self._kept, *mine)],
            "wants": self._wants(),
        }
        everybody = self.ranks.gather(told)
        if self._asked is not None:  # what it would say has been said
            self._asked.read()
            self._asked = None
        self._kept = []
        self._agree_on_wants([each["wants"] for each in everybody])
        for rank, each in enumerate(everybody):
            run_commands(run, each["commands"], rank)
        if any(each["commands"] for each in everybody):  # they may have changed the hooks
            self._agree_on_wants(self.ranks.gather(self._wants()))
        for each in {repr(save[:2]): save for said in everybody for save in said["saves"]}.values():
            run.saves.requests.append(as_request(each))
        self._agree_to_stop([each["stop"] for each in everybody])
        number = max(each["signal"] for each in everybody)
        if number and not run.signals.number:
            heed_signal(run, number)
            self.stop = True

    def _agree_to_stop(self, reasons: list[str | None]) -> None:
        """One rank that wants to stop is enough."""
        s = self.run.state
        asking = [rank for rank, reason in enumerate(reasons) if reason is not None]
        if asking and not self.stop:
            reason = reasons[asking[0]]
            if len(asking) < len(reasons):
                reason = f"{reason} (asked for by rank {', '.join(map(str, asking))})"
            s.ending.settle_stop(str(reason))
        elif asking:
            s.request_stop("")
        self.stop = s.should_stop  # a command may have asked for it too, on every rank

    # ---- what hooks return ---------------------------------------------------------------------------------

    def _wants(self) -> list[Any]:
        """The facts that this rank's hooks ask for, by event, and at which events they may return a signal.

        Some facts take all ranks, and signals are waited for only where somebody may give one: so all must
        know it of each other.
        """
        run, hooks = self.run, self.run.state.hooks
        self._told = run.plan.asked_at
        steering = {
            event
            for event in STEERED
            for each in (*run.plan.listeners(event), *_switched_off(hooks))
            if each.event.name == event and each.steers
        }
        return [{event: sorted(facts) for event, facts in self._told.items()}, sorted(steering)]

    def _agree_on_wants(self, everybody: list[list[Any]]) -> None:
        """What a hook on any rank asks for is worked out by all. Hooks that come and go on one rank keep
        nobody waiting.
        """
        wanted: dict[str, frozenset[str]] = {}
        for facts, _ in everybody:
            for event, names in facts.items():
                wanted[event] = wanted.get(event, frozenset()).union(names)
        self.run.plan.agree_on_wants(wanted)
        steering = {event for _, events in everybody for event in events}
        self.steers_batches, self.steers_updates = (event in steering for event in STEERED)

    def refuse(self, signal: Signal) -> Never:
        """A signal from a hook that has only just come: the other ranks do not wait for it yet, and would go
        another way.
        """
        raise HooklineError(
            f"{signal!r} was returned by a hook that was added in the middle of a run of several ranks. "
            "They all wait for such signals from the second batch after that on, not before: return it "
            "later, or add the hook before the run."
        )

    def on_batch(self, signal: Signal | None) -> Signal | None:
        """An epoch that one rank wants to end ends for all. A batch is skipped by the rank that says so; by
        all of them where a forward alone makes ranks wait for each other.
        """
        if not self.steers_batches:
            return signal if signal is None else self.refuse(signal)
        most = self.ranks.largest((0 if signal is None else signal.strength,)).read()[0]
        if most and self.run.strategy.forward_communicates:
            return END_EPOCH if most == END_EPOCH.strength else SKIP_BATCH
        return END_EPOCH if most == END_EPOCH.strength else signal

    def on_update(self, signal: Signal | None) -> Signal | None:
        """An update that one rank wants to skip is skipped by all: their weights must stay the same."""
        if not self.steers_updates:
            return signal if signal is None else self.refuse(signal)
        mine = 0 if signal is None else signal.strength
        most, fewest = self.ranks.largest((mine, -mine)).read()
        if most == STEP_DONE.strength and -fewest != most:
            said = self.ranks.gather(repr(signal))
            who = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(said))
            raise HooklineError(
                "STEP_DONE was returned from on_before_optimizer_step on some ranks only, so their weights "
                f"would no longer be the same: {who}."
            )
        return SKIP_STEP if most == SKIP_STEP.strength else signal


def _switched_off(hooks: Any) -> list[Listener]:
    """Of hooks that may be switched on again."""
    return [listener for entry in hooks.entries() if not entry.enabled for listener in entry.listeners]


def _where(place: int) -> str:
    batches, kind = divmod(place, 2)
    return (
        f"{'after' if kind == AFTER_BATCH else 'done with, or about to begin,'} batch {batches} of its epoch"
    )


def as_plain(request: SaveRequest) -> list[Any]:
    """For other ranks to read."""
    path = request.path
    return [
        None if path is None else str(path),
        request.reason,
        request.monitor,
        isinstance(path, Path),
        request.is_automatic,
    ]


def as_request(plain: list[Any]) -> SaveRequest:
    """The opposite."""
    path, reason, monitor, is_path, is_automatic = plain
    return SaveRequest(Path(path) if is_path else path, reason, monitor, is_automatic)
