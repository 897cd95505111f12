"""Does memory grow with the number of steps? One long epoch with everything listening that keeps something
per step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from work import Tiny, numbers, optimizer

from hookline import Hook, Module, Trainer

ALLOWED = 4.0
"""MB from the end of the warm-up to the end of the run; allocators are not exact."""


class Net(Tiny, Module):
    """The tiny model, logging each step's loss for the step and for the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss and log a metric."""
        loss = super().training_step(batch, batch_idx)
        self.log("seen", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the other measurements."""
        return optimizer(self.parameters())


class Listening(Hook):
    """Asks for what is worked out per batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Do nothing, so that the event has a listener."""

    def on_train_batch_end(self, outputs: Any, loss: float, metrics: Any, batch_idx: int) -> None:
        """Do nothing, so that the event has a listener."""


class Repeated:
    """Few batches, many times."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.few = [numbers() for _ in range(50)]

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        return (self.few[index % len(self.few)] for index in range(self.steps))


def resident() -> float:
    """Return the MB of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch(Hook):
    """Reads the memory now and then."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_step_end(self, step: int) -> None:
        """Take a reading."""
        self.seen.append((step, resident()))


def leak(steps: int) -> int:
    """Train for so many steps; 1 if memory grew."""
    if not Path("/proc/self/statm").exists():
        print("Memory is read from /proc, which this system does not have.")
        return 1
    watch = Watch()
    trainer = Trainer(
        hooks=[Listening() for _ in range(10)],
        logger=False,
        max_epochs=1,
        device="cpu",
        enable_progress_bar=False,
    )
    trainer.on("step_end", every=f"{max(1, steps // 20)} steps")(watch.on_step_end)
    trainer.fit(Net(), Repeated(steps))
    for step, megabytes in watch.seen:
        print(f"step {step:>8,}: {megabytes:8.2f} MB")
    warm = watch.seen[len(watch.seen) // 5]
    grown = watch.seen[-1][1] - warm[1]
    print(
        f"Growth from step {warm[0]:,} to step {watch.seen[-1][0]:,}: {grown:+.2f} MB (at most {ALLOWED:g} "
        f"allowed)."
    )
    return int(grown > ALLOWED)
