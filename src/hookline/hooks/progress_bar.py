"""A live line of progress on a terminal, plain lines every few seconds elsewhere."""

from __future__ import annotations

import time
from typing import Any

from hookline.hook import Hook


class ProgressBar(Hook):
    """Shows epoch, batches, rate and metrics. Between two refreshes a batch pays only for a look at the clock."""

    tier = "builtin"
    ranks = "zero"
    on_error = "disable"

    def __init__(self, refresh: float = 0.25, plain_every: float = 5.0) -> None:
        self.refresh = refresh
        self.plain_every = plain_every
        self._next = 0.0
        self._progress: Any = None
        self._task: Any = None

    def on_train_start(self, batches_seen: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        self._started, self._seen, self._task = time.monotonic(), batches_seen, None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                       TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"))  # fmt: skip
            self._progress = Progress(*columns, console=self.console, auto_refresh=False)
            self._progress.start()
        self._pause = self.refresh if self._progress else self.plain_every
        self._next = self._started + self._pause

    def on_train_epoch_start(self, trainer: Any, epoch: int) -> None:
        self._total = trainer.num_training_batches
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(f"epoch {epoch}", total=self._total, numbers="")

    def on_train_batch_end(self, state: Any, clock: Any = time.monotonic) -> None:
        if clock() >= self._next:
            self._show(state)

    def on_train_epoch_end(self, state: Any) -> None:
        if self._progress is not None:
            self._show(state)

    def on_train_end(self, state: Any) -> None:
        self._show(state)

    def teardown(self) -> None:
        if self._progress is not None:
            self._progress.stop()  # leaves the terminal as it was, whatever happened
            self._progress = None

    def _show(self, state: Any) -> None:
        now = time.monotonic()
        self._next = now + self._pause
        rate = (state.batches_seen - self._seen) / max(now - self._started, 1e-9)
        numbers = {"loss": state.loss, **state.log.bar, **{k: v for k, v in state.metrics.items() if k.startswith("val/")}}
        text = " ".join(f"{name} {float(value):.4g}" for name, value in numbers.items() if value is not None)
        text = f"{rate:.1f} it/s {text}"
        if self._progress is not None:
            self._progress.update(self._task, completed=state.batch_idx + 1, numbers=text, refresh=True)
        else:
            self.console.print(f"epoch {state.epoch} batch {state.batch_idx + 1}/{self._total or '?'} {text}", highlight=False)
