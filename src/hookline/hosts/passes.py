"""One evaluation inside a hosted run: its events, its means, and everything of the training put back after
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.loops.parts import EmittingRun
from hookline.loops.pass_events import VALIDATION, EvaluationEvents, Interlude, Names
from hookline.metrics import Metrics


class Pass:
    """A pass over validation or test data that another loop drives."""

    def __init__(self, run: EmittingRun, names: Names = VALIDATION) -> None:
        self.run, self.state = run, run.state
        self.events = EvaluationEvents(run, names)
        self.results: dict[str, Any] = {}
        self.told: Mapping[str, Any] = {}
        """What the host has measured itself."""
        self._interlude = Interlude(run.state)
        self._batches = 0
        self._has_results = False

    def start(self) -> None:
        """Emit its start."""
        self._interlude.__enter__()
        self.events.start()

    def start_batch(self, batch: Any, batch_idx: int | None = None, dataloader_idx: int = 0) -> None:
        """Emit the start of a batch."""
        if dataloader_idx != self.state.dataloader_idx:
            self._batches = 0
        self.events.take(batch, self._batches if batch_idx is None else batch_idx, dataloader_idx)
        self._batches += 1
        self.events.start_batch()

    def end_batch(self, outputs: Any = None) -> None:
        """Emit the end of the batch; a loss in `outputs` becomes part of `val/loss`."""
        self.events.end_batch(outputs)

    def end_data(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Emit the end of the data. metrics: what the host has measured itself."""
        self._has_results = True
        self.told = metrics or {}
        self.results = {**self.events.finish(), **self.told}
        self.events.end_data(self.results)

    def end(self) -> Metrics:
        """Emit the end, and put the facts of the training back. Return the results, with what hooks added."""
        if not self._has_results:
            self.end_data()
        self.events.end(self.results)
        self.results.update(self.run.rows.reduce(self.state.log.pending, "evaluation"))
        self.leave()
        return Metrics(self.results)

    def leave(self) -> None:
        """Put the facts of the training back, without an event: the pass is over, or has failed."""
        self._interlude.__exit__(None)
