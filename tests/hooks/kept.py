"""Runs that keep checkpoints by scores that a test has written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.hooks.model_checkpoint import ModelCheckpoint


class Scripted(Net):
    """A network whose validation score is dictated."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores, self.at = scores, 0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return None

    def on_validation_epoch_end(self, sanity_checking: bool) -> None:
        if not sanity_checking:
            self.log("val/score", torch.tensor(self.scores[self.at], dtype=torch.float64))
            self.at += 1


class Reasons(Hook):
    """What was saved, in order."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, str, int]] = []

    def on_checkpoint_save(self, path: Path, reason: str, step: int) -> None:
        self.saved.append((path.name, reason, step))


class Elsewhere(Hook):
    """Keeps the best checkpoint outside of the run's directory, as callbacks of other packages may."""

    monitor, mode = "val/loss", "min"

    def __init__(self, folder: Path) -> None:
        super().__init__("elsewhere")
        self.folder = folder
        self.best_model_path, self.best_model_score = "", None

    def on_validation_end(self, trainer: Any, metrics: Any, step: int) -> None:
        score = metrics["val/loss"]
        if self.best_model_score is None or score < self.best_model_score:
            self.best_model_path, self.best_model_score = str(self.folder / f"s{step}"), score
            trainer.save_checkpoint(
                self.best_model_path, "best", {"name": self.monitor, "mode": self.mode, "score": score}
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best_model_path": self.best_model_path, "best_model_score": self.best_model_score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_model_path, self.best_model_score = state.values()


def keep(*scores: float, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    """Two batches an epoch, an epoch per score; returns the hook, the names on disk and what was saved."""
    hook = ModelCheckpoint(
        **{"monitor": "val/score", "filename": "s{step}", "auto_insert_metric_name": False, **options}
    )
    record = Reasons()
    runner = quiet(
        **{"max_epochs": len(scores), "run_dir": "run", "hooks": [hook, record], **(trainer or {})}
    )
    runner.fit(Scripted(*scores), batches(2), batches(1))
    return (
        hook,
        names(last=hook.save_last),
        [each for each in record.saved if each[1] != "last" or hook.save_last],
    )


def names(folder: str = "run/checkpoints", last: bool = False) -> list[str]:
    """What the hook keeps there. Without save_last, `last` is not the hook's: the trainer writes a run's last state there."""
    there = sorted(each.name for each in Path(folder).iterdir()) if Path(folder).is_dir() else []
    return [each for each in there if each != "last" or last]
