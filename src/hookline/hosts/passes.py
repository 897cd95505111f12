"""One evaluation inside a hosted run: its events, its means, and everything of the training put back after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hookline.data.batch import batch_size
from hookline.loops.evaluate import VALIDATION, Interlude, Names, OwnMetrics
from hookline.loops.rows import rescued_row
from hookline.metrics import Metrics
from hookline.plan import Plan
from hookline.state import State


class Pass:
    """A pass over validation or test data that somebody else drives."""

    def __init__(self, plan: Plan, state: State, finish: Callable[..., dict[str, Any]], names: Names = VALIDATION) -> None:
        """finish: takes the kind of pass and its own sums, and gives the means."""
        self.plan = plan
        self.state = state
        self.finish = finish
        self.names = names
        self.own = OwnMetrics(names.kind, several=False)
        self.results: dict[str, Any] = {}
        self.told: Mapping[str, Any] = {}
        """What the host has measured itself."""
        self._interlude = Interlude(state)
        self._batches = 0
        self._has_results = False

    def start(self) -> None:
        """Everyone hears that it begins."""
        s, plan = self.state, self.plan
        self._interlude.__enter__()
        s.log.begin("eval")
        s.log.prefix = self.names.kind
        self.names.start(plan)(s)
        self.names.epoch_start(plan)(s)

    def start_batch(self, batch: Any, batch_idx: int | None = None, dataloader_idx: int = 0) -> None:
        """A batch is ready."""
        s = self.state
        s.cache.clear()
        s.log.batch_values.clear()
        if dataloader_idx != s.dataloader_idx:
            self._batches = 0
        s.batch, s.batch_idx, s.dataloader_idx = batch, self._batches if batch_idx is None else batch_idx, dataloader_idx
        self._batches += 1
        s.batches_in_pass += 1
        s.log.mode, s.log.weight = "eval", batch_size(batch)
        self.names.batch_start(self.plan)(s)

    def end_batch(self, outputs: Any = None) -> None:
        """The batch is measured; a loss in `outputs` becomes part of `val/loss`."""
        s = self.state
        s.returned = outputs
        s.last_loss = self.own.take(outputs, s.log.weight, "")
        self.names.batch_end(self.plan)(s)

    def end_data(self, metrics: Mapping[str, Any] | None = None) -> None:
        """All data was seen: the means are there, with what the host has found itself."""
        s = self.state
        s.log.mode = "now"
        self._has_results = True
        self.told = metrics or {}
        self.results = {**self.finish("eval", self.own.sums), **self.told}
        s.log.newest.raw().update(self.results)
        with rescued_row(s, self.results, "evaluation"):
            self.names.epoch_end(self.plan)(s)

    def end(self) -> Metrics:
        """Everyone hears that it is over; the training finds its facts as it left them. The results, with what hooks added."""
        s = self.state
        if not self._has_results:
            self.end_data()
        with rescued_row(s, self.results, "evaluation"):
            self.names.end(self.plan)(s)
        self.results.update(s.log.pending)
        self.leave()
        return Metrics(self.results)

    def leave(self) -> None:
        """Without a word: it is over, or has failed."""
        self._interlude.__exit__(None)
