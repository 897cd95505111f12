"""Write records about a run, one JSON object per line."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Annotated, Any

from hookline.engine.checks import Count, check_file, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks.console_log import perplexity_of
from hookline.loggers.jsonl import JSONLines
from hookline.util.text import error_text, redact


class JSONLog(Hook):
    """Writes the records train_begin, batch, validation_end, epoch_end, train_end and exception.

    Every line is complete and valid JSON. Values that JSON cannot hold are written as text.
    """

    tier = "builtin"
    observes = True
    ranks = "zero"
    on_error = "warn"

    @checked_parameters
    def __init__(
        self,
        log_every_n_batches: Annotated[int, Count(1)] = 100,
        path: Annotated[str | Path, check_file] | None = None,
    ) -> None:
        """log_every_n_batches: batches between two records `batch`. path: the file, by default
        `logs/training_<time>.jsonl`, relative to the run's directory.
        """
        self.log_every_n_batches = log_every_n_batches
        self.path = None if path is None else Path(path).expanduser()
        self._file: JSONLines | None = None
        self._began = self._epoch_began = 0.0

    def on_train_start(self, trainer: Any, state: Any, resumed: bool) -> None:
        self._began = self._epoch_began = time.monotonic()
        now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self._file = JSONLines(trainer.run_dir / (self.path or f"logs/training_{now}.jsonl"))
        self._write(
            "train_begin",
            state,
            model=type(state.module).__name__,
            model_params=state["model_params"],
            device=state.device,
            resumed=resumed,
            max_epochs=trainer.options.max_epochs,
            max_steps=trainer.options.max_steps,
            batches_per_epoch=trainer.num_training_batches,
            world_size=state.world_size,
        )

    def on_train_epoch_start(self) -> None:
        self._epoch_began = time.monotonic()

    def on_train_batch_end(self, state: Any) -> None:
        if (state.batch_idx + 1) % self.log_every_n_batches:
            return
        loss = state.loss
        self._write(
            "batch",
            state,
            batch=state.batch_idx,
            batches_seen=state.batches_seen,
            samples_seen=state.samples_seen,
            loss=loss,
            avg_loss=state["avg_loss"],
            perplexity=None if loss is None else perplexity_of(loss),
            lr=state.lr,
            metrics=dict(state.batch_metrics.read()),
        )

    def on_validation_end(self, state: Any, sanity_checking: bool) -> None:
        if not sanity_checking:
            self._write("validation_end", state, metrics=dict(state.metrics.read()))

    def on_train_epoch_end(self, state: Any) -> None:
        seconds = round(time.monotonic() - self._epoch_began, 3)
        self._write(
            "epoch_end",
            state,
            seconds=seconds,
            avg_loss=state["avg_loss"],
            metrics=dict(state.metrics.read()),
        )

    def on_train_end(self, state: Any) -> None:
        self._write(
            "train_end",
            state,
            status=state.status,
            reason=state.stop_reason,
            epochs=state.epochs_seen,
            seconds=round(time.monotonic() - self._began, 3),
            metrics=dict(state.metrics.read()),
        )

    def on_exception(self, state: Any, exception: BaseException) -> None:
        kind, text = error_text(exception)
        self._write("exception", state, status=state.status, exception=kind, message=redact(text))

    def teardown(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, state: Any, **record: Any) -> None:
        if self._file is not None:  # a run that failed before it began has no records
            self._file.write(kind, epoch=state.epoch, step=state.step, **record)
