"""One run of one verb: what the loops work with, and nothing that outlives it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.checkpoint.saves import SaveRequest
from hookline.data.loaders import Loader
from hookline.loops.finite import FiniteWatch
from hookline.metrics import Metrics
from hookline.module import Actions
from hookline.optimizers import Schedule
from hookline.options import Options
from hookline.plan import Plan, nobody
from hookline.state import State
from hookline.strategies import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable


class Window:
    """The accumulation window: the batches whose gradients make one update."""

    __slots__ = ("batches", "count", "had_none", "held", "losses", "size")

    def __init__(self) -> None:
        self.size = 1
        self.batches = 0
        """Batches of the loader so far, skipped ones included."""
        self.count = 0
        """Those that have added gradients."""
        self.had_none = False
        """Whether a step returned no loss."""
        self.losses: list[Any] = []
        self.held: list[tuple[Any, float]] = []
        """Losses that join the epoch's mean only if the window turns out finite."""

    def clear(self) -> None:
        """The next batch opens a new window."""
        self.batches = self.count = 0
        self.had_none = False
        if self.losses:
            self.losses = []
        if self.held:
            self.held = []


def see_off(run: Run) -> None:
    """Hooks that were removed in the middle get their teardown, now that nobody is calling them any more."""
    leaving, run.leaving = run.leaving, []
    for listener in leaving:
        run.plan.caller(listener)(run.state)


class Run:
    """Everything one call of fit, validate, test or predict needs."""

    __slots__ = (  # slots, because the batch body reads them all the time
        "accumulate",
        "brought",
        "clips",
        "clips_otherwise",
        "datamodule",
        "epoch_advanced",
        "epoch_rng",
        "given_loaders",
        "is_manual",
        "leaving",
        "loaders",
        "log_every",
        "manual_backward",
        "manual_optimizers",
        "manual_unscale",
        "module",
        "moves",
        "on_cpu",
        "options",
        "plan",
        "position",
        "recomputes",
        "restored",
        "resume_from",
        "run_dir",
        "save_requests",
        "scaler",
        "schedules",
        "setup_began",
        "skips_nonfinite",
        "stage",
        "started",
        "state",
        "step_before_batch",
        "stepped",
        "steps",
        "strategy",
        "trainer",
        "unscaled",
        "validated_at",
        "watch",
        "window",
    )  # fmt: skip

    def __init__(
        self, trainer: Any, stage: str, options: Options, plan: Plan, state: State, strategy: Strategy,
        module: nn.Module, steps: Actions, datamodule: Any, loaders: dict[str, Any], run_dir: Callable[[], Path],
    ) -> None:  # fmt: skip
        self.trainer = trainer
        self.stage = stage
        self.options = options
        self.plan = plan
        self.state = state
        self.strategy = strategy
        self.module = module
        self.steps = steps
        self.datamodule = datamodule
        self.given_loaders = loaders
        self.run_dir = run_dir
        self.loaders: dict[str, list[Loader]] = {}
        self.schedules: list[Schedule] = []
        self.window = Window()
        # what the batch body asks for every time, settled once
        self.accumulate = options.accumulate_grad_batches
        self.skips_nonfinite = options.nonfinite == "skip"
        self.log_every = options.log_every_n_steps
        self.scaler = strategy.precision.begin() if stage == "fit" else strategy.precision.scaler
        self.on_cpu = strategy.device.type == "cpu"
        self.is_manual = not steps.automatic_optimization
        self.unscaled: dict[int, bool] = {}
        """Manual optimization: the optimizers whose gradients were unscaled since the scaler's last update; True: overflowed."""
        self.stepped: set[int] = set()
        self.manual_unscale: Callable[[Any], Any] = lambda optimizer: None
        self.leaving: list[Any] = []
        """Entries of hooks that were removed and get their teardown at the next batch boundary."""
        self.watch = FiniteWatch(strategy.device)
        self.epoch_advanced = False
        self.step_before_batch = 0
        """However many optimizers take part in a batch, `step` counts one."""
        self.position = 0
        """Batches of this epoch that are done: where a resumed epoch goes on."""
        self.validated_at: tuple[int, ...] = (-1, -1)
        """Epoch and `batches_seen` at the last validation."""
        self.setup_began = False
        self.save_requests: list[SaveRequest] = []
        self.brought: list[Any] = []
        """Entries of the hooks that the module brought, once the run is over."""
        self.epoch_rng: dict[str, Any] = {}
        """The random streams when this epoch's loader was opened."""
        self.resume_from: Path | None = None
        self.restored: dict[str, Any] = {}
        self.manual_optimizers: list[Any] = []
        self.manual_backward: Callable[..., None] = lambda loss: None
        self.recomputes = False
        """Whether an optimizer calls the closure to compute the loss anew."""
        self.moves = False
        self.clips = False
        self.clips_otherwise = False
        """Clipping changes the gradients without telling their norm, so it is captured before if somebody asks."""
        self.started = time.monotonic()

    @property
    def out_of_time(self) -> bool:
        """Whether `max_time` is over."""
        limit = self.options.max_seconds
        return limit is not None and time.monotonic() - self.started >= limit

    def write_row(self, values: dict[str, Any], train: bool = True) -> None:
        """Let listeners edit a row of metrics, then hand it to the loggers: one device read for all of it."""
        s = self.state
        heard = train and self.plan.on_train_metrics is not nobody
        if not values or not (s.logger or heard):
            return
        s.row = Metrics(values)
        if train:
            self.plan.on_train_metrics(s)
        if s.logger:
            s.logger.log_metrics(s.row.read(), s.step, s.epoch)
        s.row = None

    def write_pending(self) -> None:
        """Send out what was logged since the last row."""
        pending = self.state.log.pending
        if pending:
            self.state.log.pending = {}
            self.write_row(pending)
