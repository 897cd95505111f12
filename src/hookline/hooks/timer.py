"""Limit the time of training and measure the time of each stage, over resumes."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

from hookline.engine.checks import check_choice, checked_parameters, parse_time
from hookline.engine.hook import Hook
from hookline.util.errors import OptionError

TIMED_STAGES = ("train", "validate", "sanity_check", "test", "predict")
log = logging.getLogger("hookline")


class Timer(Hook):
    """Stops the run after a duration of training, including validation and the time before a resume.

    `time_elapsed("train")` returns the seconds of a stage, `time_remaining()` those that are left.
    """

    tier = "builtin"
    rewinds = False

    @checked_parameters
    def __init__(
        self,
        duration: str | float | datetime.timedelta | Mapping[str, float] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        """`duration`: seconds, '2 hours', 'DD:HH:MM:SS', a timedelta or its arguments as a mapping; None only
        measures.

        `interval`: check the time after every batch ('step') or only when an epoch is over ('epoch').
        `verbose`: log when the time is over.
        """
        self.duration = _limit_seconds(duration)
        self.interval = interval
        self.verbose = verbose
        self._clock_is_watched = self.duration is not None and interval == "step"
        self._spent: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._deadline = float("inf")

    # ---- results -------------------------------------------------------------------------------------------

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds of a stage so far."""
        check_choice("Timer: stage", stage, TIMED_STAGES)
        running = time.monotonic() - self._began[stage] if stage in self._began else 0.0
        return self._spent.get(stage, 0.0) + running

    def time_remaining(self) -> float | None:
        """Return the seconds of training that are left, or None without a limit."""
        return None if self.duration is None else self.duration - self.time_elapsed("train")

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in TIMED_STAGES}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._began:  # a rollback during training does not bring time back
            self._spent = {stage: float(seconds) for stage, seconds in state["time_elapsed"].items()}

    # ---- measuring -----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        self._began = {}
        if stage == "fit":
            self._spent = {}  # a new run; a resumed one gets its times from load_state_dict next

    def on_train_start(self, trainer: Any) -> None:
        self._begin("train")
        if self.duration is not None:
            self._deadline = time.monotonic() + self.duration - self._spent.get("train", 0.0)
            self._check(trainer)

    def on_train_batch_end(self, trainer: Any, clock: Any = time.monotonic) -> None:
        if clock() >= self._deadline and self._clock_is_watched:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Any) -> None:
        self._check(trainer)

    def _check(self, trainer: Any) -> None:
        if self.duration is not None and time.monotonic() >= self._deadline and not trainer.should_stop:
            reason = f"Timer: training has taken its {datetime.timedelta(seconds=self.duration)}"
            if self.verbose:
                log.warning("%s and stops", reason)
            trainer.stop(reason)

    def on_validation_start(self, sanity_checking: bool) -> None:
        self._begin("sanity_check" if sanity_checking else "validate")

    def on_validation_end(self, sanity_checking: bool) -> None:
        self._end("sanity_check" if sanity_checking else "validate")

    def on_test_start(self) -> None:
        self._begin("test")

    def on_predict_start(self) -> None:
        self._begin("predict")

    def teardown(self) -> None:
        for stage in list(self._began):  # stages without an end event, or ended by an error
            self._end(stage)
        self._deadline = float("inf")

    def _begin(self, stage: str) -> None:
        self._began[stage] = time.monotonic()

    def _end(self, stage: str) -> None:
        if stage in self._began:
            self._spent[stage] = self.time_elapsed(stage)
            del self._began[stage]


def _limit_seconds(duration: Any) -> float | None:
    try:
        if isinstance(duration, Mapping):
            duration = datetime.timedelta(**duration)
        return parse_time(duration)
    except (OptionError, TypeError):
        raise OptionError(
            f"Timer: duration={duration!r}: use seconds, '2 hours', 'DD:HH:MM:SS', a timedelta, a mapping "
            "such as {'hours': 2}, or None for no limit; above 0.",
            option="duration",
            value=duration,
        ) from None
