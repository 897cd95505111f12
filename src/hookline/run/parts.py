"""What makes up a run: small objects, each with one owner. `Run` holds them together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hookline.data.batch import count_tokens as elements_of_ids
from hookline.data.loaders import Loader
from hookline.engine.cost import Cost
from hookline.engine.plan import Plan
from hookline.run.commands import CommandQueue
from hookline.run.optimizer_router import OptimizerRouter
from hookline.run.rows import MetricRows
from hookline.run.save_request import Saved, SaveRequest
from hookline.run.state import State
from hookline.util.errors import Signal

if TYPE_CHECKING:
    from hookline.run.save_request import Saved

# ---- What a run asks of the parts that are made with it


class ClearsGradients(Protocol):
    """The update of a step."""

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step."""
        ...


class Step(Protocol):
    """What a training batch goes through: `TrainStep`, or a class that replaces its methods."""

    @property
    def backward(self) -> Any:
        """Differentiates a loss, with the events around it."""
        ...

    @property
    def update(self) -> ClearsGradients:
        """Calls every optimizer."""
        ...

    def __call__(self, batches_left: int | None) -> Signal | None:
        """Train on `state.batch`."""
        ...

    def close_window(self) -> None:
        """Update on what an accumulation window has when it ends early."""
        ...

    def close_failed_batch(self) -> None:
        """Before a save after a failure: count a batch whose update was made."""
        ...


class GradientSync(Protocol):
    """What ranks agree on for each accumulation window: `RankGradientSync`."""

    is_clear: bool
    all_or_none: bool

    def begin_batch(self, last: bool) -> None:
        """Begin a batch; last: of its window."""
        ...

    def skip_batch(self, last: bool) -> None:
        """Leave a batch out."""
        ...

    def clear_gradients(self) -> None:
        """Clear the gradients of the finished step."""
        ...

    def agree_on(self, loss: Tensor | None, last: bool) -> Tensor | None:
        """Return the loss that this rank differentiates."""
        ...

    def count_losses(self) -> float:
        """Return what the batches of the window with a loss count, as a mean over ranks."""
        ...

    def everywhere(self, flag: bool) -> bool:
        """Return whether a flag is set on every rank."""
        ...


class FailureMonitor(Protocol):
    """Reports the other ranks' failures, and this one's to them: `RankMonitor`."""

    failure: Any
    nested: Any

    def report_failure(self, error: BaseException) -> None:
        """Report this rank's failure."""
        ...

    def post(self, text: str, failed: bool = True) -> None:
        """Report a text to the other ranks."""
        ...

    def ask_for_validate(self, number: int, polls: int) -> None:
        """Ask the other ranks whether they will still call validate() for this time."""
        ...

    def wait_for_all_ranks(self, where: str) -> None:
        """Wait for all ranks."""
        ...

    def raise_failure(self) -> None:
        """Raise if another rank has failed."""
        ...


class ControlSocket(Protocol):
    """Listens to what is asked of a fit from outside: `Control`."""

    def open(self) -> None:
        """Begin to listen."""
        ...

    def defer(self, number: str, done: dict[str, Any]) -> None:
        """Answer a request later."""
        ...

    def report_saved(self, saved: Saved) -> None:
        """Answer the requests for a checkpoint."""
        ...


class Graphs(Protocol):
    """The graphs of a compiled training step: `CompiledStep`."""

    def compose(self) -> None:
        """Choose what each graph holds, for the listeners that are there."""
        ...

    def text(self) -> str:
        """Return the graphs in words."""
        ...

    def close(self) -> None:
        """Put torch's options back."""
        ...


class FirstBatch(Protocol):
    """Looks at the first batch after a save or a resume: `FirstBatches`."""

    waiting: Any

    def fetched(self) -> None:
        """A batch was fetched."""
        ...


class BackgroundWriter(Protocol):
    """Writes checkpoints in the background: `BackgroundSaver`."""

    def start(self, contents: Any, path: Any, about: Any, on_done: Any, staging: Any = None) -> None:
        """Copy the contents and write them in a thread."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written."""
        ...

    def close(self) -> None:
        """Wait for what is being written, and free the memory."""
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
        """What a batch counts by: `accumulate_by`."""
        self.weight = 1
        """What the newest batch counts."""
        self.count: float = 0
        """What those that have added gradients count together."""
        self.unit: float = 1
        """What a batch counts that is differentiated at its full loss; 0: not known yet."""
        self.correction = 1.0
        """What the gradients of the newest update were multiplied by, to replace the planned count by the
        real one.
        """
        self.had_none = False
        """Whether a step returned no loss."""
        self.losses: list[Any] = []
        self.factors: list[float] = []
        """What each of the losses counts among those that other ranks had in the same turn."""
        self.held: list[tuple[Any, float, str]] = []
        """Losses that join the epoch's mean only if the window turns out finite, with their weight and
        loader.
        """
        self.fed: dict[int, float] = {}
        """What the batches that have trained each optimizer count, where loaders do not train all of them."""

    def clear(self) -> None:
        """Let the next batch open a new window."""
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
    """The data of a run: what was given, and the loaders made from it."""

    given: dict[str, Any]
    loaders: dict[str, list[Loader]] = field(default_factory=dict)
    train: Any = None
    """What training batches come from: the loader, or several as one (`MixedLoader`)."""
    mixture: Any = None
    """How several training loaders are mixed, as the user said."""
    is_mixture: bool = False
    """Whether there are several training loaders."""
    loss_weights: dict[str, float] | None = None
    """What a loader's losses are multiplied by before backward, by its name; None: nothing is."""
    router: OptimizerRouter | None = None
    """Which optimizers a loader trains, if not all."""
    totals: Any = None
    """Counts over all ranks (`BatchTotals`) or in a weighted window (`WeightedBatches`); None:
    neither.
    """
    count_tokens: Callable[[Any], int] = elements_of_ids

    def readings(self) -> dict[str, str]:
        """Return how each loader is read, in words, by its kind and name."""
        several = {kind: {each.name for each in loaders} - {kind} for kind, loaders in self.loaders.items()}
        return {
            f"{kind} {each.name}" if several[kind] else kind: each.reader.describe()
            for kind, loaders in self.loaders.items()
            for each in loaders
        }


@dataclass(slots=True, eq=False)
class Traits:
    """What is chosen for a run before its first batch, and the number of batches that make one update."""

    accumulate: int
    skips_nonfinite: bool
    log_every: int
    scaler: Any
    on_cpu: bool
    is_manual: bool
    logs: bool
    """Whether rows of metrics go to loggers, those of rank zero."""
    started: float
    """When the run began, by its clock."""
    transfers: tuple[Callable[[Any], Any], ...] = ()
    """Moves a batch to the device; empty if batches stay where they are."""
    clips: bool = False
    measures_norm: bool = False
    """Whether the gradient norm is captured before the update, if a listener requests it: clipping does not
    report it, or the gradients are sharded, and measuring takes all ranks.
    """
    recomputes: bool = False
    """Whether an optimizer calls the closure to compute the loss anew."""
    compiled: Graphs | None = None
    """The graphs of the training step (`CompiledStep`), with compile="step"."""


@dataclass(slots=True, eq=False)
class Progress:
    """How far a fit is, beyond the counters that hooks read (`State`)."""

    position: int = 0
    """Batches of this epoch that are done: where a resumed epoch continues."""
    epoch_advanced: bool = False
    """Whether the schedulers that go by epochs have advanced in this epoch."""
    validated_at: tuple[int, ...] = (-1, -1)
    """Epoch and `batches_seen` at the last validation."""
    validation_pending: bool = False
    """Whether a validation was begun and not completed: it is done again after a resume."""
    before_validation: dict[str, Any] = field(default_factory=dict)
    """What that validation may change, as it was before: it must leave no trace in a checkpoint."""
    revision: int = 0
    """Counts the events between batches whose listeners may have changed the state."""
    schedulers_advanced_at: int = -1
    """The step at which schedulers last advanced."""
    step_before_batch: int = 0
    """However many optimizers take part in a batch, `step` counts one."""
    is_updating: bool = False
    """Whether an optimizer's step is running. If it fails, some weights are updated and some are not."""
    skips: int = 0
    """Updates that were not made."""
    last_skip: tuple[str, int] = ("", -1)
    """Why the newest of them was not made, and the batches seen before it."""
    epoch_began: tuple[int, int, int] = (0, 0, 0)
    """Updates (-1: it was begun by another process), skips and batches before this epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {
            "batches": self.position,
            "validated_at": self.validated_at,
            "epoch_advanced": self.epoch_advanced,
            "owes_validation": self.validation_pending,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue where a checkpoint was written."""
        self.position, self.validated_at = saved["batches"], tuple(saved["validated_at"])
        self.epoch_advanced, self.validation_pending = saved["epoch_advanced"], saved["owes_validation"]


@dataclass(slots=True, eq=False)
class Manual:
    """What manual optimization needs."""

    unscaled: dict[int, bool] = field(default_factory=dict)
    """The optimizers whose gradients were unscaled since the scaler's last update; True: overflowed."""
    stepped: set[int] = field(default_factory=set)
    unscale: Callable[[Any], Any] = lambda optimizer: None
    backward: Callable[..., None] = lambda loss: None
    optimizers: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Participants:
    """Who takes part in a run, and what they ask of it."""

    commands: CommandQueue = field(default_factory=CommandQueue)
    """What is to be done at the next batch boundary, asked for by one rank or by another thread."""
    control: ControlSocket | None = None
    """Listens to what is asked of a fit from outside (`Control`)."""
    setup_began: bool = False
    leaving: dict[int, list[Any]] = field(default_factory=dict)
    """By the identity of the hook: entries of hooks that were removed and get their teardown at the next
    batch boundary.
    """
    module_hooks: list[Any] = field(default_factory=list)
    """Entries of the hooks that the module brought, once the run is over."""
    teardown_removed: Callable[[], object] = bool
    """Calls the teardown of hooks that were removed in the middle of the run."""
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Called once the run is over: to put back hooks that the module's have stood in for."""
    costs: list[Cost] = field(default_factory=list)
    """What the hooks have cost, once the run is over."""


@dataclass(slots=True, eq=False)
class Identity:
    """Which run this is, over its resumes."""

    id: str = ""
    """What all its checkpoints have in common."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the run was set up with (`settings_of`), for its checkpoints."""
    started_at: str = ""
    """When this job was started, by the wall clock, but never before anything that its directory knows of."""
    record: Any = None
    """What rank zero writes into run.json (`RunRecord`); None on other ranks, and for a run that leaves
    nothing on disk.
    """


STILL_NEEDED = ("hooks", "filters", "rng", "loader", "loggers", "record")
"""Parts of a checkpoint that are restored after the run has begun."""


@dataclass(slots=True, eq=False)
class Resume:
    """What a run is resumed from."""

    path: Path | str | None = None
    contents: dict[str, Any] = field(default_factory=dict)
    """What is left of the checkpoint: each part is taken out by what restores it."""
    finished: str = ""
    """Why a run that is started again has nothing to train."""

    def take(self, contents: dict[str, Any], path: Path | str | None = None) -> None:
        """Take the contents of a checkpoint; they are restored part by part, as soon as each can be."""
        self.path, self.contents = path, contents

    def keep_needed(self) -> None:
        """Drop what was restored."""
        self.contents = {name: self.contents.get(name) for name in STILL_NEEDED}

    @property
    def was_refused(self) -> bool:
        """Whether the run has failed before the checkpoint that it resumes from was restored."""
        return self.path is not None and not self.contents.keys() <= set(STILL_NEEDED)


@dataclass(slots=True, eq=False)
class ReceivedSignal:
    """The signal that ends a run."""

    received: int = 0
    """What this process has received; with several ranks it ends the run once all know of it."""
    number: int = 0
    """The signal that ends the run."""


@dataclass(slots=True, eq=False)
class Saves:
    """Checkpoints that were requested, and what became of them."""

    requests: list[SaveRequest | None] = field(default_factory=list)
    """What the loop looks at after every batch; None: a checkpoint was written in the background."""
    background: BackgroundWriter | None = None
    """Writes in the background, if asked to."""
    results: list[Saved] = field(default_factory=list)
    newest: Saved | None = None
    """The newest checkpoint that is durable."""
    on_disk: tuple[Any, ...] | None = None
    """`Run.stamp` as of the newest durable checkpoint, or of the one that the run was resumed from."""
    count: int = 0
    """Checkpoints of the run so far, over its resumes: the number of the newest."""
    is_final: bool = False
    """Whether the checkpoint of a signal is written: nothing of what follows may replace it."""
    last: Any = None
    """Keeps `checkpoints/last` of a fit (`LastCheckpoint`); None: only hooks save."""
    first_batches: FirstBatch | None = None
    """What to do with the first batch after a save or a resume (`FirstBatches`); None: it was done."""


class EmittingRun(Protocol):
    """A run whose events are emitted: that of a trainer, or a hosted one that another loop drives."""

    plan: Plan
    state: State
    progress: Progress
    participants: Participants
    resume: Resume
    rows: MetricRows
