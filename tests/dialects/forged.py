"""A hook of KempnerForge's kind that notes what it hears."""

from __future__ import annotations

from typing import Any

from hookline.interop.kempnerforge import StepContext, TrainingHook


class Heard(TrainingHook):
    """The interface of the page, writing down what it is called with."""

    def __init__(self, heard: list[Any] | None = None, mark: str = "") -> None:
        self.heard: list[Any] = [] if heard is None else heard
        self.mark = mark

    def on_train_begin(self, config: Any) -> None:
        self.heard.append((f"{self.mark}begin", config))

    def on_step_end(self, ctx: StepContext) -> None:
        self.heard.append((f"{self.mark}step", ctx.step))

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        self.heard.append((f"{self.mark}eval", sorted(metrics), step))

    def on_checkpoint_save(self, step: int, path: str) -> None:
        self.heard.append((f"{self.mark}save", step, path))

    def on_train_end(self, step: int, tokens_seen: int) -> None:
        self.heard.append((f"{self.mark}end", step, tokens_seen))
