"""Show progress: live bars on a terminal, one cell in a notebook, plain lines every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any

from hookline.engine.checks import Number, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks._screens import Bar, Screen, choose_screen


class ProgressBar(Hook):
    """Shows batches, rate, time left and metrics of training, sanity check, validation, test and prediction.

    Between two refreshes a batch only reads the clock. Only a refresh reads numbers from the device.
    """

    tier = "builtin"
    ranks = "zero"
    on_error = "disable"
    only_one = "progress bar"
    """A second one is refused when it is added."""

    @checked_parameters
    def __init__(
        self, refresh: Annotated[float, Number(0.0)] = 0.25, plain_every: Annotated[float, Number(0.0)] = 5.0
    ) -> None:
        """`refresh`: seconds between two refreshes. `plain_every`: the same without a terminal."""
        self.refresh = refresh
        self.plain_every = plain_every
        self._next = math.inf
        self._screen: Screen | None = None
        self._training: Bar | None = None
        self._passes: list[Bar] = []
        """One bar per loader of the current evaluation."""

    # ---- training ------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, state: Any) -> None:
        self._open()
        self._training = Bar(
            f"epoch {state.epoch}", trainer.num_training_batches, state.batch_idx, word=" batch"
        )

    def on_train_batch_end(self, state: Any, clock: Any = time.monotonic) -> None:
        if clock() >= self._next:
            self._show_training(state)

    def on_train_epoch_end(self, state: Any) -> None:
        if self._screen is not None and self._screen.live:
            self._show_training(state)

    def on_train_end(self, state: Any) -> None:
        self._show_training(state)

    def _show_training(self, state: Any) -> None:
        if self._training is not None:
            numbers = {"loss": state.loss, **state.log.bar, **_of_pass(state, "val/")}
            self._training.advance(state.batch_idx + 1, numbers)
            self._draw()

    # ---- evaluation and prediction -------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, sanity_checking: bool) -> None:
        self._begin_pass(
            trainer,
            "val",
            "sanity check" if sanity_checking else "validation",
            trainer.options.num_sanity_val_steps if sanity_checking else -1,
        )

    def on_test_start(self, trainer: Any) -> None:
        self._begin_pass(trainer, "test", "test")

    def on_predict_start(self, trainer: Any) -> None:
        self._begin_pass(trainer, "predict", "prediction")

    def on_validation_batch_end(self, state: Any, clock: Any = time.monotonic) -> None:
        if clock() >= self._next:
            self._show_pass(state)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, state: Any) -> None:
        self._end_pass(state, {} if state.sanity_checking else _of_pass(state, "val/"))

    def on_test_epoch_end(self, state: Any) -> None:
        self._end_pass(state, _of_pass(state, "test/"))

    def on_predict_epoch_end(self, state: Any) -> None:
        self._end_pass(state, {})

    def _begin_pass(self, trainer: Any, kind: str, name: str, limit: int = -1) -> None:
        self._open()
        self._began = time.monotonic()
        lengths = trainer.num_batches(kind)
        self._waiting = [
            (
                f"{name} {loader}" if len(lengths) > 1 else name,
                length if limit < 0 else min(limit, length or limit),
            )
            for loader, length in lengths.items()
        ]

    def _show_pass(self, state: Any, numbers: dict[str, Any] | None = None) -> None:
        while len(self._passes) <= state.dataloader_idx:  # the loaders before this one are done
            self._finish_passes()
            self._passes.append(Bar(*self._waiting[len(self._passes)], began=self._began))
        self._passes[-1].advance(state.batch_idx + 1, numbers or {})
        self._draw()

    def _finish_passes(self) -> None:
        for bar in self._passes:
            bar.advance(bar.total or bar.done, {})

    def _end_pass(self, state: Any, numbers: dict[str, Any]) -> None:
        if state.stage != "fit":  # outside a fit there is no bar of training to show the results
            self._show_pass(state, numbers)
        else:
            self._passes.clear()
            if self._training is not None:
                self._training.pause(time.monotonic() - self._began)

    # ---- the screen ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        self._screen, self._training, self._next = None, None, math.inf
        self._passes.clear()

    def teardown(self) -> None:
        if self._screen is not None:
            self._screen.close()  # restores the terminal, also after an error
            self._screen = None

    def _open(self) -> None:
        if self._screen is None:
            self._screen = choose_screen()
            self._pause = self.refresh if self._screen.live else self.plain_every
            self._next = time.monotonic() + self._pause

    def _draw(self) -> None:
        if self._screen is not None:
            self._screen.draw([*([self._training] if self._training else []), *self._passes])
            self._next = time.monotonic() + self._pause


def _of_pass(state: Any, prefix: str) -> dict[str, Any]:
    """Return an evaluation's results without reading the device, and without those of single loaders."""
    values = state.metrics.raw().items()
    return {
        key: value for key, value in values if key.startswith(prefix) and not key.startswith(f"{prefix}dl_")
    }
