"""Report a metric to a trial of Optuna, and end the run if the study prunes the trial."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from hookline.engine.checks import checked_parameters, refused
from hookline.engine.filters import FilterSettings
from hookline.hooks._monitor import MetricCheck, Mode, Monitored, raw_values
from hookline.util.errors import OptionError, missing_package

log = logging.getLogger("hookline")
WHO = "OptunaPruning"
DIRECTIONS = {"MINIMIZE": "min", "MAXIMIZE": "max"}
IN_PYTHON = (
    "A configuration file cannot name it: add the hook in Python, `trainer.add_hook(OptunaPruning(trial))`."
)
STEP_LOSS = "train/loss"
SHARED = "TorchDistributedTrial"
"""Optuna's trial for several ranks. It holds the real trial on rank zero."""


class OptunaPruning(MetricCheck):
    """Reports a metric to an Optuna trial after every validation, and ends the run if the trial is pruned.

    A pruned run ends as a stopped one does: it saves its last state, and its status is 'pruned'. Then `fit`
    raises `optuna.TrialPruned`, so that `study.optimize` records the trial as pruned.

    The reports are numbered from 0, one for each check, so that trials with other batch sizes compare.
    """

    may_listen = ("on_step_end",)
    rewinds = False

    @checked_parameters
    def __init__(
        self,
        trial: Any = None,
        monitor: str = "val/loss",
        mode: Mode | None = "auto",
        every: int | str | None = None,
        strict: bool = True,
        name: str | None = None,
    ) -> None:
        """Watch a metric for a trial.

        trial: the trial that Optuna passes to the objective. With several ranks: on rank zero; None, or
        Optuna's TorchDistributedTrial, on the others. monitor: the metric's name.
        mode: 'min' or 'max', which is better; 'auto' or None: as the study's direction says, without a study
        by the metric's name. every: report at an interval, such as '100 steps'; None: after every validation,
        or at the end of epochs for a metric of training. strict: a missing metric is an error, else a
        warning.
        """
        if importlib.util.find_spec("optuna") is None:
            raise OptionError(missing_package(WHO, "optuna", "optuna"))
        self.trial = _real_trial(trial)
        mode = _check_mode(self.trial, mode)
        super().__init__(Monitored(WHO, monitor, mode, strict=strict), name=name)
        self.every = every
        if every is not None:
            self.__dict__["on_step_end"] = FilterSettings(every=every)(functools.partial(self._after_steps))
        self._begin()

    def _begin(self) -> None:
        self.reports = 0
        """The number of values that were reported so far."""
        self.best_score: float | None = None
        self._validated = False
        self._known: set[int] = set()
        """Numbers of reports that the trial has. Optuna keeps the first value of each."""
        self._newest: Any = None

    # ---- before the first step -----------------------------------------------------------------------------

    def setup(self, stage: str, rank: int, hooks: Any) -> None:
        self.watch.begin(stage, rank)
        if stage != "fit":
            return
        self._begin()
        if self.ranks != "all":
            raise OptionError(
                f"{WHO}: ranks={self.ranks!r}, but all ranks must end together; leave it at 'all'.",
                option="ranks",
                value=self.ranks,
            )
        if any(isinstance(each, OptunaPruning) and each is not self for each in hooks):
            raise OptionError(f"Two {WHO} hooks would number their reports twice: keep one.")
        if rank == 0 and self.trial is None:
            raise OptionError(
                f"{WHO}: trial=None on rank 0. Pass the trial that study.optimize passes to your objective. "
                f"{IN_PYTHON}",
                option="trial",
                value=None,
            )

    def on_fit_start(self, resumed: bool) -> None:
        study = getattr(self.trial, "study", None)
        if study is not None:
            self._known = set(study.get_trials(deepcopy=False)[self.trial.number].intermediate_values)
        if self._known and not resumed:
            log.warning(
                "%s: trial %d has %d reports of an earlier fit already. Optuna keeps the first value of "
                "each number, so equal numbers of this fit are not reported.",
                WHO,
                self.trial.number,
                len(self._known),
            )

    # ---- reports -------------------------------------------------------------------------------------------

    def on_validation_end(self, state: Any, metrics: Any) -> None:
        if self.every is None or state.sanity_checking:
            super().on_validation_end(state, metrics)

    def on_train_epoch_end(self, state: Any, metrics: Any) -> None:
        if self.every is None:
            super().on_train_epoch_end(state, metrics)
        elif not self.reports and (self._validated or not self.watch.may_follow(state, metrics)):
            self.watch.find(metrics)  # raises for a metric that was not logged in a whole epoch

    def _after_steps(self, state: Any) -> None:
        self._ask(state, functools.partial(self._find_newest, state))

    def _check(self, state: Any, metrics: Any) -> None:
        self._ask(state, functools.partial(self.watch.find, metrics))

    def _ask(self, state: Any, find: Callable[[], float | None]) -> None:
        """Let rank zero find the value and report it to the study. All ranks end with the answer."""
        answer = state.trainer.ranks.decide(functools.partial(self._report, find))
        if answer is None:
            return
        value, is_pruned = answer
        number, self.reports = self.reports, self.reports + 1
        if self.watch.is_better(value, self.best_score):
            self.best_score = value
        if is_pruned:
            self._end(
                state,
                f"{WHO}: {self.watch.monitor} = {value:.6g} at step {state.step} (report {number}) is not "
                "promising",
            )

    def _find_newest(self, state: Any) -> float | None:
        """Return the value that was logged since the last report; None if there is none."""
        if self.watch.monitor == STEP_LOSS:  # the metrics have its mean at the end of an epoch only
            loss: float | None = state.window_loss
            return loss
        newest = raw_values(state.metrics).get(self.watch.monitor)
        if newest is None or newest is self._newest:
            return None
        self._newest = newest
        return float(newest)

    def _report(self, find: Callable[[], float | None]) -> list[Any] | None:
        """Report the metric; return its value and whether the study prunes the trial."""
        value = find()
        if value is None:
            return None
        if self.reports not in self._known:
            self.trial.report(value, self.reports)
            self._known.add(self.reports)  # a rollback repeats numbers
        return [value, bool(self.trial.should_prune())]

    def _end(self, state: Any, reason: str) -> None:
        from optuna import TrialPruned

        state.request_stop(reason, status="pruned", raises=TrialPruned(reason))

    def on_train_end(self) -> None:
        if not self.reports:
            self.watch.warn(
                "%s never reported %r: the run ended before a report was due.", WHO, self.watch.monitor
            )

    def on_fit_end(self, state: Any) -> None:
        if state.status == "pruned":  # in this fit, or by its record before it was started again
            self._end(state, state.stop_reason)

    def state_dict(self) -> dict[str, Any]:
        return {"reports": self.reports, "best_score": self.best_score, "validated": self._validated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reports, self.best_score = state["reports"], state["best_score"]
        self._validated = state["validated"]


def _real_trial(given: Any) -> Any:
    """Return the trial to report to; None on a rank without one."""
    trial = given._delegate if type(given).__name__ == SHARED else given
    if trial is not None and not all(
        callable(getattr(trial, each, None)) for each in ("report", "should_prune")
    ):
        raise refused(
            f"{WHO}: trial", given, "the trial that Optuna passes to the objective", f" {IN_PYTHON}"
        )
    return trial


def _check_mode(trial: Any, mode: str | None) -> str:
    """Return the direction of the study, or raise if it contradicts `mode`. A FixedTrial has no study."""
    directions = [each.name for each in getattr(getattr(trial, "study", None), "directions", ())]
    if len(directions) > 1:
        raise OptionError(
            f"{WHO}: the study has {len(directions)} objectives, and Optuna cannot prune the trials of such "
            "a study. Remove the hook, or optimize one value."
        )
    wanted = DIRECTIONS.get(directions[0]) if directions else None
    mode = mode or "auto"
    if wanted is not None and mode not in ("auto", wanted):
        raise OptionError(
            f"{WHO}: mode={mode!r}, but the study has direction={directions[0].lower()!r}: pass "
            f"mode={wanted!r} or 'auto', or create the study with another direction.",
            option="mode",
            value=mode,
            allowed=(wanted,),
        )
    return wanted or mode
