"""Change the number of batches per update during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from hookline.engine.checks import AtLeast, checked_parameters, refused
from hookline.engine.hook import Hook
from hookline.hooks._settings import current_value, read_moments
from hookline.util.errors import OptionError

WHO = "AccumulationSchedule"


class AccumulationSchedule(Hook):
    """Changes gradient accumulation at moments of the run: `{'0 epochs': 8, '4 epochs': 4, '1000 steps': 1}`.

    A number of batches applies from the first accumulation window after its moment. Before the first moment
    the trainer's `accumulate_grad_batches` applies. Step and epoch decide, so a resumed run is right, also
    inside a window. `trainer.estimated_stepping_batches`, and with it a learning-rate schedule, includes
    the schedule.
    """

    tier = "builtin"
    may_listen = ("on_step_end",)

    @checked_parameters
    def __init__(self, schedule: Mapping[int | str, int], name: str | None = None) -> None:
        """Map moments to numbers of batches per update.

        schedule: moments (a step, or text such as '500 steps' or '2 epochs') and the number of batches per
        update from there on. If several moments have passed, the one that is last in the mapping applies.
        """
        super().__init__(name)
        if not isinstance(schedule, Mapping) or not schedule:
            raise refused(f"{WHO}: schedule", schedule, "a mapping such as {'0 epochs': 8, '4 epochs': 4}")
        for moment, batches in schedule.items():
            AtLeast(1)(f"{WHO}: the batches from {moment!r} on", batches)
        self.moments = read_moments(schedule, f"{WHO}: schedule")
        self._steps = sorted({number for count, number, _ in self.moments if count == "step" and number})
        self._due: float = 0
        """The next step at which the number may change."""
        if self._steps:
            self.__dict__["on_step_end"] = self._after_update

    def batches_at(self, step: int, epoch: int) -> int | None:
        """Return the batches per update after so many steps and epochs; None before the first moment."""
        found: int | None = current_value(self.moments, SimpleNamespace(step=step, epochs_seen=epoch))
        return found

    def count_updates(self, batches: int, epochs: int, own: int, most: float = math.inf) -> int:
        """Return the updates of a run. batches: per epoch. own: those of an update before the first moment.
        most: the largest number of updates.
        """
        step = 0
        for epoch in range(epochs):
            left = batches
            while left > 0 and step < most:
                size = self.batches_at(step, epoch) or own
                windows = int(min(-(-left // size), self._next(step) - step, most - step))
                step, left = step + windows, left - windows * size
        return step

    def _next(self, step: int) -> float:
        return next((each for each in self._steps if each > step), math.inf)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._due = 0

    def on_fit_start(self, trainer: Any) -> None:
        """Check every number now, so that none is refused during the run."""
        for count, number, batches in self.moments:
            try:
                trainer.check_accumulation(batches)
            except OptionError as error:
                unit = "epochs" if count == "epochs_seen" else "steps"
                raise OptionError(f"{WHO}: {batches} batches from {number} {unit} on: {error}") from None
        own, first = trainer.options.accumulate_grad_batches, self.batches_at(0, 0)
        if first is not None and own not in (1, first):
            raise OptionError(
                f"accumulate_grad_batches={own} would never be used: {WHO} begins the run with {first}. "
                "Leave the option out, or begin the schedule later.",
                option="accumulate_grad_batches",
                value=own,
            )

    def on_train_start(self, state: Any) -> None:
        self._set(state)

    def on_train_epoch_start(self, state: Any) -> None:
        self._set(state)

    def _after_update(self, step: int, state: Any) -> None:
        if step >= self._due:
            self._set(state)

    def _set(self, state: Any) -> None:
        self._due = self._next(state.step)
        batches = current_value(self.moments, state)
        if batches is not None and batches != state.trainer.accumulate_grad_batches:
            state.trainer.accumulate_grad_batches = batches
