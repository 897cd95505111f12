"""The facts of a run in small objects, each with one owner: the loops write them, hooks read them through `State`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Setup:
    """What takes part in a run; settled before training begins."""

    trainer: Any = None
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
    """Seconds since some moment; with several ranks it is one clock for all."""
    timer: Any = None
    """Measures where the time goes (`RunTimer`), in a fit."""
    norm_takes_all: bool = False
    """Whether all ranks must measure the gradient norm together, because each holds only a part of the gradients."""


@dataclass(slots=True, eq=False)
class Counts:
    """How far a run is. Counts are of finished things."""

    epoch: int = 0
    epochs_seen: int = 0
    step: int = 0
    batches_seen: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    batches_in_pass: int = 0
    """Batches evaluated so far, over all evaluations."""
    resumed: bool = False

    SAVED = ("epoch", "epochs_seen", "step", "batches_seen", "samples_seen", "tokens_seen")

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps of it."""
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, saved: dict[str, int], resumed: bool = True) -> None:
        """Continue where a checkpoint was written."""
        for name in self.SAVED:
            setattr(self, name, saved[name])
        self.resumed = resumed

    def reset(self) -> None:
        """Begin at zero."""
        self.load_state_dict(dict.fromkeys(self.SAVED, 0), resumed=False)

    def continue_at(self, step: int, epochs_seen: int, resumed: bool = True) -> None:
        """Continue where another trainer says that it is."""
        self.step, self.epochs_seen, self.resumed = step, epochs_seen, resumed


@dataclass(slots=True, eq=False)
class Ending:
    """Whether and how a run ends."""

    should_stop: bool = False
    stop_reason: str = ""
    status: str = "created"
    exception: BaseException | None = None

    def request_stop(self, reason: str) -> None:
        """End the run at the next batch boundary. The first reason stays."""
        self.should_stop = True
        self.stop_reason = self.stop_reason or reason

    def settle_stop(self, reason: str) -> None:
        """End the run for this reason, which all ranks have agreed on."""
        self.should_stop, self.stop_reason = True, reason

    def withdraw_stop(self) -> None:
        """Take a request to stop back."""
        self.should_stop, self.stop_reason = False, ""

    def restore(self, status: str, reason: str) -> None:
        """Let a run that was over before end as it had ended."""
        self.status, self.stop_reason = status, reason


@dataclass(slots=True, eq=False)
class CurrentBatch:
    """The batch of this moment and its loss."""

    batch: Any = None
    fetch_ns: int | None = None
    """Nanoseconds that the loop waited for this batch; None if another loop fetches the batches."""
    batch_idx: int = 0
    dataloader_idx: int = 0
    dataloader_name: str = ""
    returned: Any = None
    """What the step returned, as it is."""
    live_loss: Any = None
    """The user's loss, at on_before_backward."""
    scaled_loss: Any = None
    """What is differentiated: the loss divided by the window's length and scaled."""
    backward_options: dict[str, Any] = field(default_factory=dict)
    """What `manual_backward` was given besides the loss."""
    last_loss: Tensor | float | None = None
    """The user's loss after backward: detached on its device, or a number at once if it is on the CPU."""
    window_losses: list[Any] | None = None
    """All losses of the window, if it has more than one batch."""
    window_weights: list[float] | None = None
    """What each of them counts in the window's mean; None: all the same."""
    shared_loss: Any = None
    """The window's loss over all ranks, on its way, if a listener requests it and there are several; `float` reads it."""
    predictions: list[Any] = field(default_factory=list)
    modes: list[Any] = field(default_factory=list)
    """Every submodule's train or eval flag before an evaluation."""


@dataclass(slots=True, eq=False)
class Optimization:
    """The optimizer of this moment, and the newest update."""

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
        """Add one optimizer's share to the total norm."""
        if norm is not None:
            known = self.norm_tensor
            self.norm_tensor = norm if known is None else torch.linalg.vector_norm(torch.stack([known, norm]))

    def set_norm(self, norm: Tensor | None) -> None:
        """Take the total norm; None: it is not measured yet."""
        self.norm_tensor = norm


@dataclass(slots=True, eq=False)
class Subject:
    """What one event is about."""

    checkpoint: Any = None
    path: Any = None
    saved_step: int = 0
    reason: str = ""
    row: Any = None
    own: dict[str, Any] = field(default_factory=dict)
    """The facts of an event that a user has declared."""
