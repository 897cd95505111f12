"""A hook that overrides many events, each with a subset of their facts, in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hookline
from hookline import (
    SKIP_BATCH,
    Hook,
    Metrics,
    Module,
    State,
    StepContext,
    Trainer,
    after,
    before,
    every,
    no_event,
    on,
    once,
    when,
)


def past_the_first(step: int) -> bool:
    return step > 1


class Everything(Hook):
    """Parameters are facts: any subset, any order, any spelling."""

    tier = "monitor"
    on_error = "warn"
    ranks = "zero"
    after_module = {"on_train_end"}

    def __init__(self, limit: float = 1.0) -> None:
        super().__init__(name="everything")
        self.limit = limit
        self.best = float("inf")
        self.heard: list[str] = []

    def setup(self, stage: str) -> None:
        self.heard.append(stage)

    def on_fit_start(self) -> None: ...

    def on_train_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_epoch_begin(self, current_epoch: int) -> None: ...

    def on_train_batch_start(
        self, batch_idx: int, batch: Any, *, device: torch.device
    ) -> hookline.util.errors.Signal | None:
        return SKIP_BATCH if batch_idx == 1 else None

    def on_before_backward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2

    def on_after_backward(self, pl_module: Module, own: int = 3) -> None: ...

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None: ...

    def on_before_optimizer_step(
        self, optimizer_idx: int, optimizer: torch.optim.Optimizer, step: int
    ) -> None: ...

    @every("2 steps")
    def on_step_end(self, ctx: StepContext, loss: float, grad_norm: float, lr: float) -> None:
        self.best = min(self.best, ctx.loss, loss)

    @once
    def on_train_batch_end(self, metrics: Metrics, outputs: Any, state: State) -> None:
        self.best = min(self.best, metrics["loss"])

    def on_train_metrics(self, metrics: Metrics) -> dict[str, float]:
        return {**metrics, "added": 1.0}

    @when(past_the_first)
    def on_validation_start(self, **facts: Any) -> None: ...

    @after("1 steps")
    @before(100)
    def on_validation_end(self, metrics: Metrics, epoch: int) -> None: ...

    def on_checkpoint_save(self, path: Path, reason: str) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_epoch_end(self, epoch: int, metrics: Metrics) -> None: ...

    def on_train_end(self, *args: Any) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...

    def teardown(self, stage: str) -> None: ...

    @on("fit_end")
    def any_name(self, step: int) -> None:
        self.heard.append("fit_end")

    @no_event
    def on_purpose(self, number: int) -> int:
        return number

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def hooks() -> list[Hook]:
    everything = Everything(limit=0.5)
    doubled: int = everything.on_purpose(2)
    assert doubled == 2
    return [everything]
