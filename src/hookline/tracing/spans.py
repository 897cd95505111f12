"""What lies around the events of a trace: batches, epochs, validations. Found out while the
trace is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPENS = {
    "on_train_epoch_start": "epoch",
    "on_validation_start": "validation",
    "on_test_start": "test",
    "on_predict_start": "predict",
}
CLOSES = {
    "on_train_epoch_end": "epoch",
    "on_validation_end": "validation",
    "on_validation_abandoned": "validation",
    "on_test_end": "test",
    "on_predict_end": "predict",
}


MARGIN = 20
"""Nanoseconds that a span is longer than what lies in it, on either side. Viewers read times as floating
point numbers, and drop what seems to end after the span around it.
"""


@dataclass(slots=True)
class Span:
    """From its first event to its last one."""

    name: str
    start: int
    end: int
    step: int
    epoch: int = 0
    batch: int = -1
    is_real: bool = True
    """False for a batch that was only asked for: the loader may have no more."""


class Spans:
    """Gets every event when it is over, in that order; gives the spans that are over by then."""

    def __init__(self) -> None:
        self._batch: Span | None = None
        self._around: dict[str, Span] = {}

    def take(
        self, name: str, is_often: bool, start: int, end: int, counters: tuple[int, ...]
    ) -> Sequence[Span]:
        """`is_often`: the event is one of a batch's; `counters` begin with step, epoch, batch_idx."""
        batch = self._batch
        if is_often:
            if batch is not None and batch.batch == counters[2] and batch.epoch == counters[1]:
                batch.end, batch.is_real = end + MARGIN, True
                return ()
            self._batch = Span(
                f"batch {counters[2]}",
                start - MARGIN,
                end + MARGIN,
                counters[0],
                counters[1],
                counters[2],
                name != "on_before_batch_fetch",
            )
            return () if batch is None or not batch.is_real else (batch,)
        over: list[Span] = []
        opened, closed = OPENS.get(name), CLOSES.get(name)
        if (opened or closed) and batch is not None:
            over += [batch] if batch.is_real else []
            self._batch = None
        if opened:
            title = f"epoch {counters[1]}" if opened == "epoch" else opened
            self._around[opened] = Span(title, start - 2 * MARGIN, end, counters[0])
        for each in self._around.values():
            each.end = max(each.end, end + 2 * MARGIN)
        if closed and (span := self._around.pop(closed, None)) is not None:
            over.append(span)
        return over

    def rest(self) -> list[Span]:
        """Those that are still open when the trace ends."""
        left = [
            *([self._batch] if self._batch is not None and self._batch.is_real else []),
            *self._around.values(),
        ]
        last = max((each.end for each in left), default=0) + MARGIN
        self._batch, self._around = None, {}
        for each in left:
            each.end = last if each.batch < 0 else each.end
        return left
