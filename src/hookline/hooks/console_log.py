"""Print lines about a run: starts, ends, and the loss every n batches."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any

from hookline.engine.checks import Count, checked_parameters
from hookline.engine.hook import Hook


class ConsoleLog(Hook):
    """Prints to stdout when the run and its epochs begin and end, and the loss in between.

    A batch line has the batch's loss, its perplexity and the mean loss of the epoch so far. Only batches with
    a line read the device.
    """

    tier = "builtin"
    observes = True
    ranks = "zero"
    on_error = "warn"

    @checked_parameters
    def __init__(
        self, log_every_n_batches: Annotated[int, Count(1)] | None = 10, perplexity: bool = True
    ) -> None:
        """`log_every_n_batches`: None for no batch lines. `perplexity`: also print exp(loss)."""
        self.log_every_n_batches = log_every_n_batches
        self.perplexity = perplexity
        self._every: float = log_every_n_batches or math.inf
        self._began = self._epoch_began = 0.0

    def on_train_start(self, state: Any, resumed: bool) -> None:
        self._began = time.monotonic()
        what = f"{type(state.module).__name__}, {state['model_params']:,} parameters, on {state.device}"
        where = f", resumed in epoch {state.epochs_seen} at step {state.step}" if resumed else ""
        self._say(f"training started: {what}{where}")

    def on_train_epoch_start(self, epoch: int) -> None:
        self._epoch_began = time.monotonic()
        self._say(f"epoch {epoch} started")

    def on_train_batch_end(self, state: Any) -> None:
        if (state.batch_idx + 1) % self._every:
            return
        total = state.trainer.num_training_batches
        place = f"epoch {state.epoch}, batch {state.batch_idx + 1}" + (f"/{total}" if total else "")
        self._say(", ".join([place, *self._numbers(state)]))

    def _numbers(self, state: Any) -> list[str]:
        loss, mean = state.loss, state["avg_loss"]
        texts = [] if loss is None else [f"loss {loss:.4f}"]
        if mean is not None:
            texts.append(f"average {mean:.4f}")
        if self.perplexity and loss is not None:
            texts.append(f"perplexity {perplexity_of(loss):.4g}")
        return texts

    def on_train_epoch_end(self, epoch: int, metrics: Any) -> None:
        loss = f", loss {metrics['train/loss']:.4f}" if "train/loss" in metrics else ""
        seconds = time.monotonic() - self._epoch_began
        self._say(f"epoch {epoch} completed in {seconds:.1f} s{loss}{_validation_text(metrics)}")

    def on_train_end(self, state: Any) -> None:
        why = f" ({state.stop_reason})" if state.stop_reason else ""
        epochs, steps = state.epochs_seen, state.step
        self._say(
            f"training {state.status}{why}: {epochs} epoch{'s' * (epochs != 1)}, {steps} "
            f"step{'s' * (steps != 1)}, {time.monotonic() - self._began:.1f} s"
        )

    def on_exception(self, exception: BaseException, state: Any) -> None:
        self._say(f"{state.stage} ended by {type(exception).__name__} at {state.position}: {exception}")

    def _say(self, text: str) -> None:
        print(text, flush=True)  # so that a log file is up to date


def perplexity_of(loss: float) -> float:
    """Return the exponential of a loss, or infinity if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _validation_text(metrics: Any) -> str:
    shown = [name for name in metrics if name.startswith("val/") and not name.startswith("val/dl_")]
    return "".join(f", {name} {metrics[name]:.4f}" for name in shown)
