"""One run of one verb: what the loops work with, and nothing that outlives it."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from hookline.loops.finite import FiniteWatch
from hookline.loops.parts import Identity, Manual, Participants, Progress, ReceivedSignal, Resume, RunData, Saves, Traits, Window
from hookline.loops.reducing import Rows
from hookline.loops.timer import RunTimer
from hookline.metrics import Metrics, NotANumber
from hookline.module import Actions
from hookline.optimizers import Schedule
from hookline.options import Options
from hookline.plan import Plan, blame, nobody
from hookline.rundir import RunDirectory
from hookline.state import State
from hookline.strategies import Strategy

F = TypeVar("F", bound=Callable[..., Any])


def phase(text: str) -> Callable[[F], F]:
    """Let a function of the run write into `State.running` that this phase runs, while it runs."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def in_phase(run: Run, *given: Any, **named: Any) -> Any:
            s = run.state
            outer = s.running
            s.running = (text, outer)
            try:
                return function(run, *given, **named)
            finally:
                s.running = outer

        return cast(F, in_phase)

    return decorate


def told_to_stop(run: Run) -> bool:
    """Whether the run is to stop: as asked for, or with several ranks as agreed."""
    return run.state.should_stop if run.agreement is None else run.agreement.stop


def ending(run: Run) -> str:
    """The status of a run that ended as meant, or was interrupted in good order."""
    if run.signals.number:
        return "interrupted" if run.signals.number == signal.SIGINT else "preempted"
    return "stopped" if told_to_stop(run) else "completed"


def write_row(plan: Plan, s: State, values: dict[str, Any], over: str, step: int | None = None, epoch: int | None = None) -> None:
    """Let listeners edit a row of metrics, then hand it to the loggers: one device read for all of it.

    over: 'step', 'epoch' or 'evaluation', what the numbers are values or means of. step, epoch: if not of now.
    """
    train = over != "evaluation"
    heard = train and plan.on_train_metrics is not nobody
    if not values or not (s.logger or heard):
        return
    s.row = Metrics(values)
    if heard:
        measured = dict(values)
        with rescued_row(s, measured, over, step, epoch, with_pending=False):
            plan.on_train_metrics(s)
            row = _read_edited(plan, s, measured) if s.logger else {}
    else:
        row = s.row.read()
    if s.logger:
        s.logger.log_row(row, s.step if step is None else step, s.epoch if epoch is None else epoch, over)
    s.row = None


def _read_edited(plan: Plan, s: State, measured: dict[str, Any]) -> Mapping[str, float]:
    """Return a row that hooks have edited, read; a value that is not a number is an error of theirs."""
    try:
        return s.row.read()  # type: ignore[no-any-return]
    except NotANumber as error:
        if error.name not in measured or measured[error.name] is not s.row.raw()[error.name]:
            _blame_editors(error, plan, s)
        raise


@contextlib.contextmanager
def rescued_row(
    s: State, values: dict[str, Any], over: str, step: int | None = None, epoch: int | None = None, with_pending: bool = True
) -> Iterator[None]:
    """For events that come before a row is written: if a listener fails, write the row as it was measured, then let it fail.

    with_pending: and what listeners have logged at these events.
    """
    try:
        yield
    except BaseException as error:
        if s.logger and not s.sanity_checking:
            try:
                pending, s.log.pending = (s.log.pending, {}) if with_pending else ({}, s.log.pending)
                row = Metrics({**values, **pending}).read()
                s.logger.log_row(row, s.step if step is None else step, s.epoch if epoch is None else epoch, over)
            except Exception as problem:  # the first error is the one to be raised
                error.add_note(f"its metrics could not be logged: {type(problem).__name__}: {problem}")
        raise


def _blame_editors(error: NotANumber, plan: Plan, s: State) -> None:
    """Name the hook that has put a metric into a row, or those of which one has."""
    editors = plan.listeners("on_train_metrics")
    if len(editors) == 1:
        blame(error, editors[0], s)
    else:
        error.add_note(f"put there in on_train_metrics, by one of {', '.join(each.label for each in editors)}")


@dataclass(slots=True, eq=False)  # slots, because the batch body reads them all the time
class Run:
    """Everything one call of fit, validate, test or predict needs."""

    trainer: Any
    stage: str
    options: Options
    plan: Plan
    state: State
    strategy: Strategy
    module: nn.Module
    steps: Actions
    datamodule: Any
    directory: RunDirectory
    data: RunData
    schedules: list[Schedule] = field(default_factory=list)
    window: Window = field(default_factory=Window)
    step: Any = None
    """What a training batch goes through (`TrainStep`), chosen when an epoch begins."""
    traits: Traits = field(init=False)
    watch: FiniteWatch = field(init=False)
    progress: Progress = field(default_factory=Progress)
    saves: Saves = field(default_factory=Saves)
    resume: Resume = field(default_factory=Resume)
    identity: Identity = field(default_factory=Identity)
    record: Any = None
    """What rank zero writes into run.json (`RunRecord`); None on other ranks, and for a run that leaves nothing on disk."""
    manual: Manual = field(default_factory=Manual)
    participants: Participants = field(default_factory=Participants)
    signals: ReceivedSignal = field(default_factory=ReceivedSignal)
    rows: Rows | None = None
    """How ranks bring their metrics together; None on one process."""
    together: Any = None
    """What ranks settle about each window (`Together`); None on one process."""
    agreement: Any = None
    """How the ranks of a fit agree (`Agreement`); None: there is only one."""
    peers: Any = None
    """Who hears of the other ranks' failures, and tells them of this one's (`Peers`); None: there are none."""
    steers_batches: bool = False
    """Whether a hook on some rank may end an epoch for all of them."""
    steers_updates: bool = False
    """Whether a hook on some rank may skip an update for all of them."""

    def __post_init__(self) -> None:
        options, strategy = self.options, self.strategy
        self.traits = Traits(
            options.accumulate_grad_batches, options.nonfinite == "skip", options.log_every_n_steps,
            strategy.precision.begin() if self.stage == "fit" else strategy.precision.scaler,
            strategy.device.type == "cpu", not self.steps.automatic_optimization, bool(self.state.logger), self.state.clock(),
        )  # fmt: skip
        self.window.by = options.accumulate_by
        if self.window.by != "batches":
            self.window.unit = 0
        others = None if strategy.ranks.alone or self.traits.is_manual else strategy.ranks
        self.watch = FiniteWatch(strategy.device, others)
        if options.count_tokens is not None:
            self.data.count_tokens = options.count_tokens
        if self.stage == "fit":
            self.state.timer = RunTimer(self.plan, self.state, strategy.device)
        if not strategy.ranks.alone:
            self.rows = Rows(strategy.ranks, self.state.log)

    def run_dir(self) -> Path:
        """Where the run writes; it exists from now on."""
        return self.directory.path()

    @property
    def stamp(self) -> tuple[Any, ...]:
        """How far the run is: two equal values mean that nothing was trained, measured or announced in between."""
        s, own = self.state, self.progress
        return s.step, s.batches_seen, s.epochs_seen, own.position, own.validated_at, own.revision

    @property
    def out_of_time(self) -> bool:
        """Whether `max_time` is over."""
        limit = self.options.max_seconds
        return limit is not None and self.state.clock() - self.traits.started >= limit

    def write_row(self, values: dict[str, Any], over: str = "step", step: int | None = None, epoch: int | None = None) -> None:
        """Let listeners edit a row of metrics, then hand it to the loggers."""
        write_row(self.plan, self.state, values, over, step, epoch)

    def write_pending(self) -> None:
        """Send out what was logged since the last row; with several ranks when they next meet."""
        pending, s = self.state.log.pending, self.state
        if pending:
            s.log.pending = {}
            if self.rows is None:
                self.write_row(pending)
            else:
                self.rows.keep(pending, s.step, s.epoch, self.traits.logs or "on_train_metrics" in self.plan.wanted_at)

    def over_ranks(self, values: dict[str, Any], kind: str = "row") -> dict[str, Any]:
        """A row's values over all ranks; rows that were waiting for this go out. On one process they are what they are."""
        if self.rows is None:
            return values
        row, before = self.rows.settle(kind, values, self.state.step)
        for step, epoch, kept in before:
            self.write_row(kept, "step", step, epoch)
        return row

    def write_waiting(self) -> None:
        """What no rank was there any more to be asked about: as this one knows it."""
        for step, epoch, kept in self.rows.alone() if self.rows is not None else ():
            self.write_row(kept, "step", step, epoch)
