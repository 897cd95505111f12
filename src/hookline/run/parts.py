"""The parts of a `Run`: small objects, each with one owner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hookline.data.batch import count_tokens as elements_of_ids
from hookline.data.loaders import Loader
from hookline.engine.cost import Costs
from hookline.engine.plan import Plan
from hookline.metrics.metric_log import Metrics
from hookline.run.commands import CommandQueue
from hookline.run.optimizer_router import OptimizerRouter
from hookline.run.options import Options
from hookline.run.rows import MetricRows
from hookline.run.save_request import RollbackRequest, Saved, SaveRequest
from hookline.run.state import State
from hookline.run.update_windows import UpdateWindows
from hookline.util.errors import Signal

# ---- Protocols of the objects that higher layers set on a run


class ClearsGradients(Protocol):
    """The update of a step."""

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step."""


class Step(Protocol):
    """Trains on a batch: `TrainStep`, or a class that replaces its methods."""

    @property
    def backward(self) -> Any:
        """The backward, with its events."""

    @property
    def update(self) -> ClearsGradients:
        """The update, which calls every optimizer."""
        ...

    def __call__(self, batches_left: int | None) -> Signal | None:
        """Train on `state.batch`."""

    def close_window(self) -> None:
        """Update with the gradients of an accumulation window that ends early."""

    def close_failed_batch(self) -> None:
        """Count a batch that failed after its update, before the save after the failure."""


class GradientSync(Protocol):
    """Synchronizes the ranks in each accumulation window: `RankGradientSync`."""

    is_clear: bool
    all_or_none: bool

    def renewed(self) -> GradientSync:
        """Return a new one for the same run."""
        ...


class FailureMonitor(Protocol):
    """Exchanges failures between ranks: `RankMonitor`."""

    failure: Any
    nested: Any

    def report_failure(self, error: BaseException) -> BaseException:
        """Report this rank's failure. Return the error to raise."""
        ...

    def post(self, text: str, failed: bool = True) -> None:
        """Report a text to the other ranks."""

    def wait_for_all_ranks(self, where: str) -> None:
        """Wait for all ranks."""

    def raise_failure(self) -> None:
        """Raise if another rank has failed."""


class ControlSocket(Protocol):
    """The control socket of a fit: `Control`."""

    def open(self) -> None:
        """Begin to listen."""

    def defer(self, number: str, done: dict[str, Any]) -> None:
        """Answer a request later."""

    def report_saved(self, saved: Saved) -> None:
        """Answer the requests for a checkpoint."""

    def report_validated(self, metrics: Mapping[str, float] | None) -> None:
        """Answer the requests for a validation, and keep its metrics. None: there was no data."""

    def repeat_validated(self) -> bool:
        """Answer the requests for a validation with the newest metrics; return False if there are none."""
        ...


class Graphs(Protocol):
    """The graphs of a compiled training step: `CompiledStep`."""

    def compose(self) -> None:
        """Choose the content of each graph for the current listeners."""

    def text(self) -> str:
        """Return a description of the graphs."""
        ...

    def close(self) -> None:
        """Restore torch's options."""


class FirstBatch(Protocol):
    """Checks the first batch after a save or a resume: `FirstBatches`."""

    waiting: Any

    def fetched(self) -> None:
        """Check the batch that was fetched."""


class BackgroundWriter(Protocol):
    """Writes checkpoints in the background: `BackgroundSaver`."""

    def start(self, contents: Any, path: Any, about: Any, on_done: Any, staging: Any = None) -> None:
        """Copy the contents and write them in a thread."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no checkpoint is being written."""
        ...


class Window:
    """The accumulation window: the batches whose gradients make one update."""

    __slots__ = (
        "batches",
        "by",
        "correction",
        "count",
        "factors",
        "fed",
        "had_none",
        "held",
        "losses",
        "size",
        "unit",
        "weight",
    )

    def __init__(self) -> None:
        self.size = 1
        self.batches = 0
        """Batches of the loader so far, skipped ones included."""
        self.by = "batches"
        """The unit of a batch's weight: `accumulate_by`."""
        self.weight = 1
        """The weight of the newest batch."""
        self.count: float = 0
        """The total weight of the batches that have added gradients."""
        self.unit: float = 1
        """The weight of a batch whose loss is not scaled; 0: not known yet."""
        self.correction = 1.0
        """The factor of the newest update's gradients, which corrects the planned total to the real one."""
        self.had_none = False
        """Whether a step returned no loss."""
        self.losses: list[Any] = []
        self.factors: list[float] = []
        """The weight of each loss relative to the losses of other ranks in the same batch."""
        self.held: list[tuple[Any, float, str]] = []
        """Losses that enter the epoch's mean only if the window is finite, with their weight and loader."""
        self.fed: dict[int, float] = {}
        """The total weight of the batches that trained each optimizer, if loaders do not train all."""

    def begin(self, by: str) -> None:
        """Begin as in a new run. by: the unit of a batch's weight."""
        self.clear()
        self.by, self.unit = by, 1 if by == "batches" else 0
        self.size, self.weight, self.correction = 1, 1, 1.0

    def clear(self) -> None:
        """Clear the window for the next batch."""
        self.batches = self.count = 0
        self.had_none = False
        if self.losses or self.factors:
            self.losses, self.factors = [], []
        if self.held:
            self.held = []
        if self.fed:
            self.fed = {}


@dataclass(slots=True, eq=False)
class RunData:
    """The data of a run: the user's data, and the loaders made from it."""

    given: dict[str, Any]
    loaders: dict[str, list[Loader]] = field(default_factory=dict)
    train: Any = None
    """The source of training batches: the loader, or several as one (`MixedLoader`)."""
    mixture: Any = None
    """The user's settings for mixing several training loaders."""
    is_mixture: bool = False
    """Whether there are several training loaders."""
    loss_weights: dict[str, float] | None = None
    """The factor of each loader's losses before backward, by name; None: no factors."""
    router: OptimizerRouter | None = None
    """The optimizers that each loader trains, if not all."""
    totals: Any = None
    """Counts over all ranks (`BatchTotals`) or in a weighted window (`WeightedBatches`), or None."""
    order: Any = None
    """The order of the training data (`SampleOrder`), once it is open."""
    count_tokens: Callable[[Any], int] = elements_of_ids
    batch_size: int | None = None
    """The batch size of the training loader; None: its own."""

    def readings(self) -> dict[str, str]:
        """Return a description of how each loader is read, by its kind and name."""
        several = {kind: {each.name for each in loaders} - {kind} for kind, loaders in self.loaders.items()}
        return {
            f"{kind} {each.name}" if several[kind] else kind: each.reader.describe()
            for kind, loaders in self.loaders.items()
            for each in loaders
        }


@dataclass(slots=True, eq=False)
class Traits:
    """Settings that are fixed before the first batch of a run, and the number of batches per update."""

    accumulate: int
    skips_nonfinite: bool
    log_every: int
    scaler: Any
    on_cpu: bool
    is_manual: bool
    logs: bool
    """Whether rows of metrics go to loggers, which is so on rank zero."""
    started: float
    """The start of the run, by its clock."""
    transfers: tuple[Callable[[Any], Any], ...] = ()
    """Functions that move a batch to the device; empty if batches are not moved."""
    clips: bool = False
    measures_norm: bool = False
    """Whether the gradient norm is computed before the update if a listener requests it.

    It is if clipping does not report it, or if the gradients are sharded, so that all ranks must take part.
    """
    recomputes: bool = False
    """Whether an optimizer calls the closure to recompute the loss."""
    compiled: Graphs | None = None
    """The graphs of the training step (`CompiledStep`), with compile="step"."""
    step_choices: tuple[Callable[[Any, Any], Any], ...] = ()
    """Return another class for the training step of one process, from the run and the chosen class."""
    warned_of_none: bool = False
    """Whether a batch that is None was reported."""
    rules: Any = None
    """The decisions of the loop that trainers take differently (`LoopRules`)."""


@dataclass(slots=True, eq=False)
class Progress:
    """The progress of a fit, beyond the counters that hooks read (`State`)."""

    position: int = 0
    """The number of completed batches of this epoch, from which a resumed epoch continues."""
    epoch_advanced: bool = False
    """Whether the schedulers with interval 'epoch' have advanced in this epoch."""
    validated_at: tuple[int, ...] = (-1, -1)
    """Epoch and `batches_seen` at the last validation."""
    newest_validation: Metrics | None = None
    """The results of the last validation that was completed."""
    validation_requested: bool = False
    """Whether a command requests a validation, which the loop runs at the next place for one."""
    validation_pending: bool = False
    """Whether a validation was begun and not completed. It is repeated after a resume."""
    before_validation: dict[str, Any] = field(default_factory=dict)
    """The state before an abandoned validation, which a checkpoint saves instead of the changed one."""
    unfinished: dict[str, Any] = field(default_factory=dict)
    """The state of an epoch that was stopped, which its end resets and a checkpoint saves."""
    revision: int = 0
    """The number of events between batches whose listeners may have changed the state."""
    plateau_due: bool = False
    """Whether an update was made after which a per-step scheduler with a metric has not advanced yet."""
    schedulers_advanced_at: int = -1
    """The step at which schedulers last advanced."""
    step_before_batch: int = 0
    """The step before this batch, because several optimizers in a batch count as one step."""
    is_updating: bool = False
    """Whether an optimizer's step is running. If it fails, some weights are updated and some are not."""
    skips: int = 0
    """The number of skipped updates."""
    last_skip: tuple[str, int] = ("", -1)
    """The reason of the newest skip, and the batches seen before it."""
    skip_reasons: set[str] = field(default_factory=set)
    """The reasons of all skips."""
    has_skipped_nonfinite: bool = False
    """Whether an update was skipped because a value was not finite; the first one is a warning."""
    windows: UpdateWindows = field(default_factory=UpdateWindows)
    """The batches behind each update."""
    epoch_began: tuple[int, int, int] = (0, 0, 0)
    """Updates, skips and batches before this epoch. Updates are -1 if another process began the epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the progress for a checkpoint."""
        return {
            "batches": self.position,
            "validated_at": self.validated_at,
            "epoch_advanced": self.epoch_advanced,
            "owes_validation": self.validation_pending,
            **({"plateau_due": True} if self.plateau_due else {}),
        }

    @contextlib.contextmanager
    def shown_as(self, **fields: Any) -> Iterator[None]:
        """Set fields within the context, such as those of the next save point."""
        before = {name: getattr(self, name) for name in fields}
        for name, value in fields.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the progress from a checkpoint."""
        self.position, self.validated_at = saved["batches"], tuple(saved["validated_at"])
        self.epoch_advanced, self.validation_pending = saved["epoch_advanced"], saved["owes_validation"]
        self.plateau_due = bool(saved.get("plateau_due", False))

    def mark_changed(self) -> None:
        """Record a change that the counters do not show: a checkpoint with the same counters is outdated."""
        self.revision += 1

    def abandon(self) -> None:
        """Forget what is not in a checkpoint, before another state is restored.

        The revision makes the new state differ from an abandoned one with the same counters.
        """
        self.mark_changed()
        self.unfinished = {}
        self.before_validation, self.schedulers_advanced_at, self.last_skip = {}, -1, ("", -1)


@dataclass(slots=True, eq=False)
class Manual:
    """The state of manual optimization."""

    unscaled: dict[int, bool] = field(default_factory=dict)
    """The optimizers whose gradients were unscaled since the scaler's last update; True: overflow."""
    stepped: set[int] = field(default_factory=set)
    unscale: Callable[[Any], Any] = lambda optimizer: None
    backward: Callable[..., None] = lambda loss: None
    optimizers: list[Any] = field(default_factory=list)
    is_inside: bool = False
    """Whether the training step has called backward or an optimizer and has not ended yet."""

    def forget_scaling(self) -> None:
        """Forget which optimizers have unscaled their gradients and made their steps."""
        self.unscaled.clear()
        self.stepped.clear()


@dataclass(slots=True, eq=False)
class Participants:
    """The participants of a run besides its loops: commands, the control socket, and hooks that change."""

    commands: CommandQueue = field(default_factory=CommandQueue)
    """The commands for the next batch boundary, from one rank or from another thread."""
    control: ControlSocket | None = None
    """The control socket (`Control`)."""
    setup_began: bool = False
    leaving: dict[int, list[Any]] = field(default_factory=dict)
    """Entries of removed hooks whose teardown runs at the next batch boundary, by the id of the hook."""
    module_hooks: list[Any] = field(default_factory=list)
    """Entries of the module's own hooks, after the run is over."""
    teardown_removed: Callable[[], object] = bool
    """Calls the teardown of hooks that were removed during the run."""
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Called after the run, to restore hooks that hooks of the module replaced."""
    costs: Costs = field(default_factory=Costs)
    """The cost of the hooks, after the run is over."""


@dataclass(slots=True, eq=False)
class Identity:
    """The identity of a run, which its resumes keep."""

    id: str = ""
    """The id in all its checkpoints."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the run (`collect_settings`), for its checkpoints."""
    started_at: str = ""
    """The start of this job by the wall clock, but never before the newest time in its directory."""
    record: Any = None
    """The record that rank zero writes to run.json (`RunRecord`); None on other ranks and without files."""


STILL_NEEDED = ("hooks", "filters", "rng", "loader", "loggers", "record")
"""Parts of a checkpoint that are restored after the run has begun."""


@dataclass(slots=True, eq=False)
class Resume:
    """The checkpoint that a run resumes from."""

    path: Path | str | None = None
    contents: dict[str, Any] = field(default_factory=dict)
    """The parts of the checkpoint that are not restored yet."""
    is_auto: bool = False
    """Whether the run was started with resume='auto'."""
    finished: str = ""
    """Why a run that is started again has nothing to train."""
    rollback: RollbackRequest | None = None
    """The request to go back to a checkpoint that all ranks agree on; the loop reads it after every batch."""
    target: Any = None
    """The checkpoint that was found for this request (`Start`)."""
    rollbacks: int = 0
    """How often this process has gone back to a checkpoint."""

    def take(self, contents: dict[str, Any], path: Path | str | None = None) -> None:
        """Take the contents of a checkpoint, which are restored part by part."""
        self.path, self.contents = path, contents

    def request_rollback(self, request: RollbackRequest) -> None:
        """Request a rollback on which all ranks agree, unless there is a request already."""
        self.rollback = self.rollback or request

    def take_target(self) -> None:
        """Take the contents of the checkpoint to go back to."""
        self.rollbacks += 1
        self.take(self.target.contents, self.target.path)

    def end_rollback(self) -> None:
        """Drop the request, after it was carried out or nothing was found for it."""
        self.rollback = self.target = None

    def keep_needed(self) -> None:
        """Drop the parts that were restored."""
        self.contents = {name: self.contents.get(name) for name in STILL_NEEDED}

    @property
    def is_incomplete(self) -> bool:
        """Whether a checkpoint is being restored, so that the state of the run is partly that of another."""
        return self.path is not None and not self.contents.keys() <= set(STILL_NEEDED)

    @property
    def was_refused(self) -> bool:
        """Whether the run failed before its checkpoint was restored."""
        return self.is_incomplete and not self.rollbacks


@dataclass(slots=True, eq=False)
class ReceivedSignal:
    """The signal that ends a run."""

    received: int = 0
    """The signal that this process received; the ranks then agree on the step at which the run ends."""
    number: int = 0
    """The signal that ends the run."""
    is_handled: bool = False
    """Whether the run has ended for it and is saved. Then only Ctrl-C can still end what is left at once."""


@dataclass(slots=True, eq=False)
class Saves:
    """The requested checkpoints and their results."""

    requests: list[SaveRequest | None] = field(default_factory=list)
    """Requests, which the loop reads after every batch; None: a background write is complete."""
    background: BackgroundWriter | None = None
    """The background writer, with checkpoint='async'."""
    results: list[Saved] = field(default_factory=list)
    newest: Saved | None = None
    """The newest checkpoint that is durable."""
    on_disk: tuple[Any, ...] | None = None
    """`Run.stamp` of the newest durable checkpoint, or of the one that the run was resumed from."""
    count: int = 0
    """The number of checkpoints of the run so far, over its resumes."""
    abandoned: list[tuple[int, int]] = field(default_factory=list)
    """The first and last numbers of checkpoints that rollbacks have abandoned."""
    is_final: bool = False
    """Whether the checkpoint of a signal is written, which later ones must not replace."""
    last: Any = None
    """Keeps `checkpoints/last` of a fit (`LastCheckpoint`); None: only hooks save."""
    base: Any = None
    """The weights that a checkpoint of trainable weights leaves out (`BaseWeights`); None: it holds all."""
    first_batches: FirstBatch | None = None
    """Checks the first batch after a save or a resume (`FirstBatches`); None: it is done."""


class EmittingRun(Protocol):
    """A run that emits events: of a trainer, or a hosted run that another loop drives."""

    options: Options
    plan: Plan
    state: State
    progress: Progress
    participants: Participants
    resume: Resume
    rows: MetricRows
