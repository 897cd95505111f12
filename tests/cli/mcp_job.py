"""A job that trains until it is stopped, for an assistant that watches it. `truth.jsonl` has what it does, step by step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tiny import Net, batches, quiet

from hookline import Hook


class Truth(Hook):
    """Writes what happens, without Hookline's logs."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "truth.jsonl").open("a", buffering=1)

    def on_before_optimizer_step(self, step: int, optimizer: Any) -> None:
        self.file.write(json.dumps({"step": step, "lr": optimizer.param_groups[0]["lr"]}) + "\n")

    def on_validation_end(self, step: int, metrics: Any) -> None:
        self.file.write(json.dumps({"step": step, "validated": metrics["val/loss"]}) + "\n")


class Ticks(Hook):
    """A hook to switch: slow, so that the job does not need a core of its own."""

    def on_step_end(self) -> None:
        time.sleep(0.004)


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.004)
        return super().training_step(batch, batch_idx)


def main(run_dir: Path) -> None:
    """Train with a validation set that no validation is due for."""
    run_dir.mkdir(parents=True)
    trainer = quiet(
        run_dir=run_dir,
        logger=True,
        max_epochs=-1,
        max_time="10 minutes",
        log_every_n_steps=1,
        check_val_every_n_epoch=10**6,
        checkpoint=True,
        hooks=[Truth(run_dir), Ticks()],
    )
    trainer.fit(Slow(), batches(50), batches(2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
