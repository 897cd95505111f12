"""What the ranks of a hosted run decide together: to stop, to save, and what a hook's signal means for all of
them.

After every batch each rank says in a few numbers whether it wants something, and reads what all of them said
one batch ago: nobody waits. Only if somebody wants something they exchange the details, and all act on it at
the same batch. A rank whose epoch is over keeps answering until all others are there too, so epochs may
differ in length.
"""

from __future__ import annotations

from typing import Any

from hookline.distributed.comm import Answer, Ranks
from hookline.interop.hosted.view import HostView
from hookline.run.save_request import SaveRequest
from hookline.training.ranks.rank_sync import as_plain, as_request
from hookline.util.errors import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, HooklineError, Signal

AFTER_BATCH, AT_VALIDATION, BETWEEN = range(3)
PLACES = ("after a training batch", "at a validation", "at the end or the beginning of an epoch")


class HostedRankSync:
    """One rank's part in it."""

    def __init__(self, line: HostView, ranks: Ranks) -> None:
        self.line = line
        self.ranks = ranks
        self.stop = False
        """Whether the ranks have agreed to stop; `should_stop` of the state is what this one wants."""
        self.agreed: list[SaveRequest] = []
        """Checkpoints that all ranks are about to write together."""
        self._kept: list[SaveRequest] = []
        """Those that this rank, but not all, have asked for."""
        self._asked: Answer | None = None
        self._steers_batches = self._steers_updates = False

    # ---- meeting -------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """After a batch: say what is new, hear what was new one batch ago."""
        asked = self._ask(AFTER_BATCH)
        before, self._asked = self._asked, asked
        if before is not None and self._has_news(before.read()):
            self._exchange()
        elif (
            self.line.save_requests
        ):  # a checkpoint is worth the wait: it is of this very step if everybody wants it
            self._exchange_if_all_save(asked.read())

    def settle(self, place: int) -> None:
        """Wait until all ranks are here, and do what any of them wants."""
        while True:
            asked = self._ask(place)
            before, self._asked = self._asked, asked
            if before is not None and self._has_news(before.read()):
                self._exchange()
                continue
            answer = asked.read()
            has_news = self._has_news(answer)
            if answer[3] == -answer[4]:
                self._asked = None
                if has_news or answer[1]:
                    self._exchange()
                return
            self._exchange_if_all_save(answer)

    def _ask(self, place: int) -> Answer:
        saves, news = (
            len(self.line.save_requests),
            self.line.state.should_stop is not self.stop or bool(self._kept),
        )
        return self.ranks.largest((news, saves, -saves, place, -place))

    def _has_news(self, answer: list[int]) -> bool:
        news, most, fewest, place, least = answer
        if place != -least and AT_VALIDATION in (place, -least):
            raise HooklineError(
                f"The ranks are out of step: one is {PLACES[-least]}, another {PLACES[place]}. A validation "
                "that hooks hear is gone through by every rank, each with its part of the data."
            )
        return bool(news) or most != -fewest

    def _exchange_if_all_save(self, answer: list[int]) -> None:
        if -answer[2] > 0:
            self._exchange()
        else:
            self._kept += self.line.save_requests
            self.line.save_requests = []

    def _exchange(self) -> None:
        """Everybody tells everything, and all do the same with it."""
        line, s = self.line, self.line.state
        mine, line.save_requests, self._kept = [*self._kept, *line.save_requests], [], []
        stop = (s.stop_reason or "a stop was asked for") if s.should_stop else None
        everybody = self.ranks.gather({"stop": stop, "saves": [as_plain(each) for each in mine]})
        if self._asked is not None:  # what it would say has been said
            self._asked.read()
            self._asked = None
        saves = {repr(save[:2]): save for said in everybody for save in said["saves"]}
        self.agreed += [as_request(each) for each in saves.values()]
        reasons = {rank: said["stop"] for rank, said in enumerate(everybody) if said["stop"] is not None}
        if reasons and not self.stop:
            first = next(iter(reasons.values()))
            who = (
                ""
                if len(reasons) == len(everybody)
                else f" (asked for by rank {', '.join(map(str, reasons))})"
            )
            self.stop = True
            s.ending.set_stop(f"{first}{who}")

    # ---- what hooks return ---------------------------------------------------------------------------------

    def note_steering(self) -> None:
        """Whether any hook may return a signal: only then the ranks wait to hear of it. All of them have the
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
        """A batch that one rank leaves out is left out by all, an epoch that one ends is ended by all."""
        if not self._steers_batches:
            return signal
        strongest = self._most(signal)[0]
        return {0: None, SKIP_BATCH.strength: SKIP_BATCH, END_EPOCH.strength: END_EPOCH}[strongest]

    def on_update(self, signal: Signal | None) -> Signal | None:
        """An update that one rank leaves out is left out by all: their weights must stay the same."""
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
