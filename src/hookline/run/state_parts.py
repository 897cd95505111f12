"""The facts of a run in small objects with one owner each. Loops write them; hooks read them in `State`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


def fact(path: str, doc: str | None = None) -> Any:
    """Make a read-only attribute that reads a fact from its owner. It costs no Python call."""
    return property(attrgetter(path), doc=doc)


@dataclass(slots=True, eq=False)
class Setup:
    """The objects of a run that are fixed before training begins."""

    trainer: Any = None
    shown_trainer: Any = None
    """The trainer that hooks get: the same, or the trainer of another package that runs this one."""
    module: Any = None
    wrapped_model: Any = None
    hooks: Any = None
    logger: Any = None
    config: Any = None
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    device: Any = None
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    stage: str = ""
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)
    """A monotonic clock in seconds; with several ranks, one clock for all."""
    timer: Any = None
    """Measures the parts of a fit (`RunTimer`)."""
    norm_takes_all: bool = False
    """Whether all ranks must compute the gradient norm together, because the gradients are sharded."""


@dataclass(slots=True, eq=False)
class Counts:
    """The counters of a run. They count what is finished."""

    epoch: int = 0
    epochs_seen: int = 0
    step: int = 0
    batches_seen: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    batches_in_pass: int = 0
    """Evaluated batches so far, over all evaluations."""
    resumed: bool = False

    SAVED = ("epoch", "epochs_seen", "step", "batches_seen", "samples_seen", "tokens_seen")

    def state_dict(self) -> dict[str, int]:
        """Return the counters for a checkpoint."""
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, saved: dict[str, int], resumed: bool = True) -> None:
        """Restore the counters from a checkpoint."""
        for name in self.SAVED:
            setattr(self, name, saved[name])
        self.resumed = resumed

    def reset(self) -> None:
        """Set all counters to zero."""
        self.load_state_dict(dict.fromkeys(self.SAVED, 0), resumed=False)

    def continue_at(self, step: int, epochs_seen: int, resumed: bool = True) -> None:
        """Set the counters to those of another trainer."""
        self.step, self.epochs_seen, self.resumed = step, epochs_seen, resumed


@dataclass(slots=True, eq=False)
class Ending:
    """Whether and how a run ends."""

    should_stop: bool = False
    stop_reason: str = ""
    status: str = "created"
    exception: BaseException | None = None
    stop_status: str = "stopped"
    """The status of a run that ends because of the request to stop: 'stopped' or 'pruned'."""
    stop_error: BaseException | None = None
    """The exception that `fit` raises once a run has ended with `stop_status`."""

    def request_stop(self, reason: str, status: str = "stopped", raises: BaseException | None = None) -> None:
        """Request a stop at the next batch boundary. The first request is kept.

        A run that had ended with this status before it was started again gets the exception of this request.
        """
        if not self.should_stop or (self.status == status and self.stop_error is None):
            self.stop_status, self.stop_error = status, raises
        self.should_stop = True
        self.stop_reason = self.stop_reason or reason

    def set_stop(self, reason: str, status: str) -> None:
        """Set the stop, the reason and the status that all ranks agreed on."""
        if status != self.stop_status:
            self.stop_error = None
        self.should_stop, self.stop_reason, self.stop_status = True, reason, status

    def withdraw_stop(self) -> None:
        """Withdraw a request to stop."""
        self.should_stop, self.stop_reason, self.stop_status, self.stop_error = False, "", "stopped", None

    def raise_requested(self) -> None:
        """Raise the exception of the request to stop, if the run has ended by it."""
        error, self.stop_error = self.stop_error, None
        if error is not None and self.status == self.stop_status:
            try:
                raise error
            finally:
                del error  # avoids a reference cycle: its traceback holds this frame

    def restore(self, status: str, reason: str) -> None:
        """Set status and reason of a run that had already ended."""
        self.status, self.stop_reason = status, reason


@dataclass(slots=True, eq=False)
class CurrentBatch:
    """The current batch and its loss."""

    batch: Any = None
    fetch_ns: int | None = None
    """Nanoseconds that the loop waited for this batch; None if another package's loop fetches the batches."""
    batch_idx: int = 0
    interrupted_batch: int | None = None
    """The number of the training batch that an evaluation interrupts; None outside of one."""
    dataloader_idx: int = 0
    dataloader_name: str = ""
    several_loaders: bool = False
    """Whether this pass over data has more than one loader."""
    indices_of: Callable[[int], list[int] | None] | None = None
    """Returns the indices of the samples of a batch, by its number; None if another loop fetches them."""
    returned: Any = None
    """The value that the step returned."""
    live_loss: Any = None
    """The user's loss, at on_before_backward."""
    scaled_loss: Any = None
    """The loss for backward: divided by the window's length and scaled."""
    backward_options: dict[str, Any] = field(default_factory=dict)
    """The options of `manual_backward`."""
    last_loss: Tensor | float | None = None
    """The user's loss after backward: detached on its device, or a number if it is on the CPU."""
    window_losses: list[Any] | None = None
    """All losses of the window, if it has more than one batch."""
    window_weights: list[float] | None = None
    """The weight of each loss in the window's mean; None: equal weights."""
    shared_loss: Any = None
    """The window's loss over all ranks, if a listener requests it; `float` waits for it."""
    predictions: list[Any] = field(default_factory=list)
    modes: list[Any] = field(default_factory=list)
    """Every submodule's train or eval flag before an evaluation."""

    def forget_window(self) -> None:
        """Forget the losses of the last window."""
        self.window_losses = self.window_weights = self.shared_loss = None


@dataclass(slots=True, eq=False)
class Optimization:
    """The current optimizer and the newest update."""

    norm_tensor: Tensor | None = None
    used_lr: float | None = None
    """The learning rate that the newest update used."""
    optimizer: Any = None
    optimizer_idx: int = 0
    optimizer_closure: Any = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    scheduler: Any = None
    metric: Any = None

    def add_norm(self, norm: Tensor | None) -> None:
        """Add one optimizer's norm to the total norm."""
        if norm is not None:
            known = self.norm_tensor
            self.norm_tensor = norm if known is None else torch.linalg.vector_norm(torch.stack([known, norm]))

    def set_norm(self, norm: Tensor | None) -> None:
        """Set the total norm; None: it is not computed yet."""
        self.norm_tensor = norm


@dataclass(slots=True, eq=False)
class Subject:
    """The facts of a single event."""

    checkpoint: Any = None
    path: Any = None
    saved_step: int = 0
    reason: str = ""
    row: Any = None
    row_over: str = "step"
    """What the numbers of the row are values or means of: 'step' or 'epoch'."""
    own: dict[str, Any] = field(default_factory=dict)
    """The facts of an event that the user declared."""


PARTS: dict[str, Any] = {
    "setup": Setup,
    "counts": Counts,
    "ending": Ending,
    "current": CurrentBatch,
    "optimization": Optimization,
    "subject": Subject,
}
"""The parts of a state, by the attribute that holds each."""

if TYPE_CHECKING:

    class Facts(Setup, Counts, Ending, CurrentBatch, Optimization, Subject):  # type: ignore[misc]
        """The facts of all parts as read-only attributes, which `State` inherits."""

else:
    # such an attribute costs no Python call
    Facts = type(
        "Facts",
        (),
        {
            "__slots__": (),
            **{each.name: fact(f"{part}.{each.name}") for part, cls in PARTS.items() for each in fields(cls)},
        },
    )
