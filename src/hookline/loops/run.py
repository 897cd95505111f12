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

from hookline.accounting import Cost
from hookline.checkpoint.saves import Saved, SaveRequest
from hookline.data.batch import count_tokens as elements_of_ids
from hookline.data.loaders import Loader
from hookline.loops.errands import Errands
from hookline.loops.feeding import Feeding
from hookline.loops.finite import FiniteWatch
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


class Window:
    """The accumulation window: the batches whose gradients make one update."""

    __slots__ = ("batches", "by", "correction", "count", "factors", "fed", "had_none", "held", "losses", "size", "unit", "weight")

    def __init__(self) -> None:
        self.size = 1
        self.batches = 0
        """Batches of the loader so far, skipped ones included."""
        self.by = "batches"
        """What a batch counts by: `accumulate_by`."""
        self.weight = 1
        """What the newest batch counts."""
        self.count: float = 0
        """What those that have added gradients count together."""
        self.unit: float = 1
        """What a batch counts that is differentiated at its full loss; 0: not known yet."""
        self.correction = 1.0
        """What the gradients of the newest update were multiplied by, to replace the planned count by the real one."""
        self.had_none = False
        """Whether a step returned no loss."""
        self.losses: list[Any] = []
        self.factors: list[float] = []
        """What each of the losses counts among those that other ranks had in the same turn."""
        self.held: list[tuple[Any, float, str]] = []
        """Losses that join the epoch's mean only if the window turns out finite, with their weight and loader."""
        self.fed: dict[int, float] = {}
        """What the batches that have trained each optimizer count, where loaders do not train all of them."""

    def clear(self) -> None:
        """The next batch opens a new window."""
        self.batches = self.count = 0
        self.had_none = False
        if self.losses or self.factors:
            self.losses, self.factors = [], []
        if self.held:
            self.held = []
        if self.fed:
            self.fed = {}


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
    if run.signal:
        return "interrupted" if run.signal == signal.SIGINT else "preempted"
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
    given_loaders: dict[str, Any]
    directory: RunDirectory
    loaders: dict[str, list[Loader]] = field(default_factory=dict)
    train: Any = None
    """What training batches come from: the loader, or several as one (`MixedLoader`)."""
    mixture: Any = None
    """How several training loaders are mixed, as the user said."""
    loss_weights: dict[str, float] | None = None
    """What a loader's losses are multiplied by before backward, by its name; None: nothing is."""
    feeds: Feeding | None = None
    """Which optimizers a loader trains, if not all."""
    mixes: bool = False
    """Whether there are several training loaders."""
    count_tokens: Callable[[Any], int] = elements_of_ids
    schedules: list[Schedule] = field(default_factory=list)
    window: Window = field(default_factory=Window)
    step: Any = None
    """What a training batch goes through (`TrainStep`), chosen when an epoch begins."""
    started: float = field(init=False)
    # what the batch body asks for every time, settled once
    accumulate: int = field(init=False)
    skips_nonfinite: bool = field(init=False)
    log_every: int = field(init=False)
    scaler: Any = field(init=False)
    on_cpu: bool = field(init=False)
    is_manual: bool = field(init=False)
    watch: FiniteWatch = field(init=False)
    rows: Rows | None = None
    """How ranks bring their metrics together; None on one process."""
    logs: bool = field(init=False)
    """Whether rows of metrics go to loggers, those of rank zero."""
    tally: Any = None
    """What ranks count together (`Tally`), or batches count in a weighted window (`WeightedBatches`); None: neither."""
    together: Any = None
    """What ranks settle about each window (`Together`); None on one process."""
    moves: bool = False
    clips: bool = False
    measures_norm: bool = False
    """The norm is captured before the update if somebody asks: clipping will change the gradients without telling it, or they
    are sharded, and a norm that was measured only when it is read would make ranks wait for a reader that they do not have."""
    recomputes: bool = False
    """Whether an optimizer calls the closure to compute the loss anew."""
    # manual optimization
    unscaled: dict[int, bool] = field(default_factory=dict)
    """The optimizers whose gradients were unscaled since the scaler's last update; True: overflowed."""
    stepped: set[int] = field(default_factory=set)
    manual_unscale: Callable[[Any], Any] = lambda optimizer: None
    manual_backward: Callable[..., None] = lambda loss: None
    manual_optimizers: list[Any] = field(default_factory=list)
    # who takes part
    errands: Errands = field(default_factory=Errands)
    """What is to be done at the next batch boundary, asked for by one rank or by another thread."""
    control: Any = None
    """Listens to what is asked of a fit from outside (`Control`)."""
    agreement: Any = None
    """How the ranks of a fit agree (`Agreement`); None: there is only one."""
    peers: Any = None
    """Who hears of the other ranks' failures, and tells them of this one's (`Peers`); None: there are none."""
    steers_batches: bool = False
    """Whether a hook on some rank may end an epoch for all of them."""
    steers_updates: bool = False
    """Whether a hook on some rank may skip an update for all of them."""
    setup_began: bool = False
    leaving: dict[int, list[Any]] = field(default_factory=dict)
    """Entries of hooks that were removed and get their teardown at the next batch boundary."""
    skips: int = 0
    """Updates that were not made."""
    last_skip: tuple[str, int] = ("", -1)
    """Why the newest of them was not made, and the batches seen before it."""
    epoch_began: tuple[int, int, int] = (0, 0, 0)
    """Updates (-1: it was begun by another process), skips and batches before this epoch."""
    costs: list[Cost] = field(default_factory=list)
    """What the hooks have cost, once the run is over."""
    brought: list[Any] = field(default_factory=list)
    """Entries of the hooks that the module brought, once the run is over."""
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """What is to be put back once the run is over: hooks that the module's have stood in for."""
    # where it is
    is_updating: bool = False
    """Whether an optimizer's step is running. If it fails, some weights are updated and some are not."""
    step_before_batch: int = 0
    """However many optimizers take part in a batch, `step` counts one."""
    advanced_at: int = -1
    """The step at which schedulers last advanced."""
    position: int = 0
    """Batches of this epoch that are done: where a resumed epoch goes on."""
    epoch_advanced: bool = False
    validated_at: tuple[int, ...] = (-1, -1)
    """Epoch and `batches_seen` at the last validation."""
    owes_validation: bool = False
    """A validation that was begun and has not come to its end: it is done again after a resume."""
    before_validation: dict[str, Any] = field(default_factory=dict)
    """What that validation may change, as it was before: it must leave no trace in a checkpoint."""
    # where it comes from, and how it ends
    run_id: str = ""
    """What all checkpoints of one run have in common, over its resumes."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the run was set up with (`settings_of`), for its checkpoints."""
    started_at: str = ""
    """When this job was started, by the wall clock, but never before anything that its directory knows of."""
    saves: int = 0
    """Checkpoints of the run so far, over its resumes: the number of the newest."""
    record: Any = None
    """What rank zero writes into run.json (`RunRecord`); None on other ranks, and for a run that leaves nothing on disk."""
    resume_from: Path | str | None = None
    restored: dict[str, Any] = field(default_factory=dict)
    finished_before: str = ""
    """Why a run that is started again has nothing to train."""
    heard: int = 0
    """A signal that this process has heard; with several ranks it ends the run once all know of it."""
    signal: int = 0
    """The signal that ends the run."""
    # checkpoints
    last: Any = None
    """Keeps `checkpoints/last` of a fit (`LastCheckpoint`); None: only hooks save."""
    save_requests: list[SaveRequest | None] = field(default_factory=list)
    """What the loop looks at after every batch; None: there is news of a checkpoint that was written in the background."""
    saver: Any = None
    """Writes in the background, if asked to."""
    news: list[Saved] = field(default_factory=list)
    saved: Saved | None = None
    """The newest checkpoint that is durable."""
    on_disk: tuple[Any, ...] | None = None
    """`progress` as of the newest durable checkpoint, or of the one that the run was resumed from."""
    revision: int = 0
    """Counts the events between batches whose listeners may have changed the state."""
    first_batches: Any = None
    """What to do with the first batch after a save or a resume (`FirstBatches`); None: it was done."""
    sealed: bool = False
    """The checkpoint of a signal is written: nothing of what follows may replace it."""

    def __post_init__(self) -> None:
        options, strategy = self.options, self.strategy
        self.started = self.state.clock()
        self.accumulate = options.accumulate_grad_batches
        self.window.by = options.accumulate_by
        if self.window.by != "batches":
            self.window.unit = 0
        self.skips_nonfinite = options.nonfinite == "skip"
        self.log_every = options.log_every_n_steps
        self.scaler = strategy.precision.begin() if self.stage == "fit" else strategy.precision.scaler
        self.on_cpu = strategy.device.type == "cpu"
        self.is_manual = not self.steps.automatic_optimization
        others = None if strategy.ranks.alone or self.is_manual else strategy.ranks
        self.watch = FiniteWatch(strategy.device, others)
        if options.count_tokens is not None:
            self.count_tokens = options.count_tokens
        self.logs = bool(self.state.logger)
        if self.stage == "fit":
            self.state.timer = RunTimer(self.plan, self.state, strategy.device)
        if not strategy.ranks.alone:
            self.rows = Rows(strategy.ranks, self.state.log)

    def run_dir(self) -> Path:
        """Where the run writes; it exists from now on."""
        return self.directory.path()

    @property
    def progress(self) -> tuple[Any, ...]:
        """How far the run is: two equal values mean that nothing was trained, measured or announced in between."""
        s = self.state
        return s.step, s.batches_seen, s.epochs_seen, self.position, self.validated_at, self.revision

    @property
    def out_of_time(self) -> bool:
        """Whether `max_time` is over."""
        limit = self.options.max_seconds
        return limit is not None and self.state.clock() - self.started >= limit

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
                self.rows.keep(pending, s.step, s.epoch, self.logs or "on_train_metrics" in self.plan.wanted_at)

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
