"""Stops a run when a metric stops improving."""

from __future__ import annotations

import math
from typing import Annotated, Any

from hookline.engine.checks import Count, Number, checked_parameters
from hookline.hooks._monitor import MetricCheck, Mode, Monitored
from hookline.run.state import count_noun


class EarlyStopping(MetricCheck):
    """Requests a stop after `patience` checks in a row without improvement.

    It checks after every validation, or at the end of every training epoch with
    `check_on_train_epoch_end=True`. Patience counts checks, so it also works in runs that are measured in
    steps. The run stops at the next batch boundary, after `min_epochs`. In a loop of your own, a metric that
    was not logged before the first validation is checked there.
    """

    @checked_parameters
    def __init__(
        self,
        monitor: str = "val/loss",
        patience: Annotated[int, Count(0)] = 3,
        mode: Mode = "auto",
        min_delta: float = 0.0,
        check_on_train_epoch_end: bool | None = None,
        strict: bool = True,
        verbose: bool = False,
        stopping_threshold: Annotated[float, Number()] | None = None,
        divergence_threshold: Annotated[float, Number()] | None = None,
        check_finite: bool = True,
        name: str | None = None,
    ) -> None:
        """Watch a metric.

        monitor: the metric's name. mode: 'min' or 'max', which is better; 'auto': 'max' if the name says that
        higher is better (accuracy, f1, auc, ...), else 'min'. patience: checks without improvement.
        min_delta: an improvement must be greater than this.
        check_on_train_epoch_end: True: at epoch ends; False: after validations; None: after validations if
        there are any, but at epoch ends for a metric of training ('train/loss').
        strict: a missing metric is an error, else a warning. verbose: print the result of each check.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as it is worse than this. check_finite: stop when it is NaN or
        infinite.
        """
        watch = Monitored("EarlyStopping", monitor, mode, min_delta, strict)
        super().__init__(watch, check_on_train_epoch_end, name)
        self.patience, self.verbose, self.check_finite = patience, verbose, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self._begin()

    def _begin(self) -> None:
        self.wait_count = 0
        self.best_score: float | None = None
        self.best_epoch: int | None = None
        self.checks = 0
        self.stopped_epoch: int | None = None
        self.stopped_step: int | None = None
        self._validated = False

    def setup(self, stage: str, rank: int) -> None:
        self.watch.begin(stage, rank)
        if stage == "fit":  # a second fit is a new run; a resumed one gets its state right after this
            self._begin()

    def on_train_end(self) -> None:
        if not self.checks:
            self.watch.warn_of_no_check()

    def _check(self, state: Any, metrics: Any) -> None:
        value = self.watch.find(metrics)
        if value is None:
            return
        self.checks += 1
        name, what = self.watch.monitor, ""
        if self.check_finite and not math.isfinite(value):
            what = f"{name} became {value}"
        elif self.stopping_threshold is not None and self.watch.passes(value, self.stopping_threshold):
            what = f"{name} = {value:.6g} has reached the threshold {self.stopping_threshold:g}"
        elif self.divergence_threshold is not None and self.watch.passes(self.divergence_threshold, value):
            what = f"{name} = {value:.6g} is worse than the limit {self.divergence_threshold:g}"
        if self.watch.is_better(value, self.best_score):
            self._say(
                f"{name} improved to {value:.6g}"
                + (f" from {_digits(self.best_score)}" if self.best_score is not None else "")
            )
            self.best_score, self.best_epoch, self.wait_count = value, state.epoch, 0
        else:
            self.wait_count += 1
            self._say(
                f"{name} = {value:.6g} did not improve on {_digits(self.best_score)} "
                f"({self.wait_count} of {self.patience})"
            )
            if not what and self.wait_count >= self.patience:
                best = f"the best was {_digits(self.best_score)}"
                where = "" if self.best_epoch is None else f" in epoch {self.best_epoch}"
                checks = count_noun(self.wait_count, "check", "checks")
                what = f"{name} did not improve in {checks}; {best}{where}"
        if what:
            self.stopped_epoch, self.stopped_step = state.epoch, state.step
            self._say(what)
            state.request_stop(f"EarlyStopping: {what}")

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"EarlyStopping: {text}")

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.watch.saved_with(),
            "wait_count": self.wait_count,
            "best_score": self.best_score,
            "best_epoch": self.best_epoch,
            "checks": self.checks,
            "stopped_epoch": self.stopped_epoch,
            "stopped_step": self.stopped_step,
            "validated": self._validated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count, self.best_score, self.checks = (
            state["wait_count"],
            state["best_score"],
            state["checks"],
        )
        self.stopped_epoch, self.stopped_step = state["stopped_epoch"], state["stopped_step"]
        self.best_epoch = state.get("best_epoch")
        # so that a resumed run does not repeat the check of the saved epoch
        self._validated = state["validated"]
        if difference := self.watch.difference(state):
            self.watch.warn(
                "%s: its best value, %s, is not used, and its patience starts anew.",
                difference,
                _digits(self.best_score),
            )
            self.best_score, self.wait_count, self.stopped_epoch, self.stopped_step = None, 0, None, None


def _digits(score: float | None) -> str:
    """Return a score as messages show it."""
    return "none" if score is None else f"{score:.6g}"
