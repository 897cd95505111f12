"""One call of fit, validate, test or predict: the objects that the loops use, for the length of the call."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from hookline.distributed import Strategy
from hookline.engine.plan import Plan
from hookline.run.commands import Boundary
from hookline.run.directory import RunDirectory
from hookline.run.finite import FiniteWatch
from hookline.run.module import Actions
from hookline.run.optimizers import Schedule
from hookline.run.options import Options
from hookline.run.parts import (
    FailureMonitor,
    GradientSync,
    Identity,
    Manual,
    Participants,
    Progress,
    ReceivedSignal,
    Resume,
    RunData,
    Saves,
    Step,
    Traits,
    Window,
)
from hookline.run.reduction import RankRows
from hookline.run.rows import MetricRows
from hookline.run.state import State
from hookline.run.timer import RunTimer

F = TypeVar("F", bound=Callable[..., Any])


def phase(text: str) -> Callable[[F], F]:
    """Decorate a function of the run: write this text into `State.running` while it runs."""

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


def ending(run: Run) -> str:
    """Return the status of a run that ended without an error."""
    if run.signals.number:
        return "interrupted" if run.signals.number == signal.SIGINT else "preempted"
    return run.state.ending.stop_status if run.boundary.is_stopping else "completed"


@dataclass(slots=True, eq=False)  # slots, because the batch body reads them all the time
class Run:
    """Everything one call of fit, validate, test or predict needs."""

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
    step: Step | None = None
    """Trains on a batch (`TrainStep`); chosen when an epoch begins."""
    traits: Traits = field(init=False)
    watch: FiniteWatch = field(init=False)
    progress: Progress = field(default_factory=Progress)
    saves: Saves = field(default_factory=Saves)
    resume: Resume = field(default_factory=Resume)
    identity: Identity = field(default_factory=Identity)
    manual: Manual = field(default_factory=Manual)
    participants: Participants = field(default_factory=Participants)
    signals: ReceivedSignal = field(default_factory=ReceivedSignal)
    boundary: Boundary = field(init=False)
    """The work between two batches; with several ranks, their synchronization (`RankSync`)."""
    rows: MetricRows = field(init=False)
    gradient_sync: GradientSync | None = None
    """The agreement of the ranks on each window (`RankGradientSync`); None with one process."""
    failure_monitor: FailureMonitor | None = None
    """Exchanges failures between ranks (`RankMonitor`); None with one process."""

    def __post_init__(self) -> None:
        options, strategy = self.options, self.strategy
        self.traits = Traits(
            options.accumulate_grad_batches,
            options.nonfinite == "skip",
            options.log_every_n_steps,
            strategy.precision.begin() if self.stage == "fit" else strategy.precision.scaler,
            strategy.device.type == "cpu",
            not self.steps.automatic_optimization,
            bool(self.state.logger),
            self.state.clock(),
        )
        self.window.begin(options.accumulate_by)
        others = None if strategy.ranks.alone or self.traits.is_manual else strategy.ranks
        self.watch = FiniteWatch(strategy.device, others)
        if options.count_tokens is not None:
            self.data.count_tokens = options.count_tokens
        if self.stage == "fit":
            self.state.setup.timer = RunTimer(self.plan, self.state, strategy.device)
        self.boundary = Boundary(self)
        if strategy.ranks.alone:
            self.rows = MetricRows(self.plan, self.state)
        else:
            self.rows = RankRows(self.plan, self.state, strategy.ranks, self.traits)

    @property
    def trainer(self) -> Any:
        """The trainer of this run."""
        return self.state.trainer

    @property
    def stage(self) -> str:
        """The stage: 'fit', 'validate', 'test' or 'predict'."""
        return self.state.stage

    def run_dir(self) -> Path:
        """Return the directory of the run, created if necessary."""
        return self.directory.path()

    @property
    def reached(self) -> tuple[int, int]:
        """The epoch and the newest batch that was drawn in it; inside an evaluation, that before it."""
        s = self.state
        batch = s.current.batch_idx if s.current.interrupted_batch is None else s.current.interrupted_batch
        # after the epoch's end, the position is that of the next one
        return s.epoch, batch if s.epochs_seen > s.epoch else min(batch, self.progress.position)

    @property
    def stamp(self) -> tuple[Any, ...]:
        """The progress as a tuple. Two equal values mean that nothing was trained or evaluated in between."""
        s, own = self.state, self.progress
        return s.step, s.batches_seen, s.epochs_seen, own.position, own.validated_at, own.revision

    @property
    def out_of_time(self) -> bool:
        """Whether `max_time` is over."""
        limit = self.options.max_seconds
        return limit is not None and self.state.clock() - self.traits.started >= limit
