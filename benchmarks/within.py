"""What one logged metric costs in a real step: logged in every other twenty steps of one and the same run.

Two runs differ by more than a metric costs, whatever the machine does meanwhile; two steps of one run hardly
do.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from hookline import Module, Trainer

STEPS, BLOCK = 30_000, 20


class Alternating(Module):
    """Logs in blocks of steps, and in between calls something empty instead."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)
        self.times: dict[str, list[int]] = {"log": [], "empty": []}
        self.clock: list[int] = [
            0,
            0,
        ]  # a list, because writing an attribute of a module costs more than a metric

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss; the time between two steps belongs to what the first of them did."""
        now, clock = time.thread_time_ns(), self.clock
        logs = clock[1] // BLOCK % 2
        if clock[1] % BLOCK:  # the first of a block has just changed over
            self.times["log" if logs else "empty"].append(now - clock[0])
        loss = mse_loss(self.layer(batch[0]), batch[1])
        if logs:
            self.log("metric", loss)
        else:
            self.empty("metric", loss)
        clock[0], clock[1] = now, clock[1] + 1
        return loss

    def empty(self, name: str, value: Tensor) -> None:
        """Do nothing: it costs a call."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the simplest optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Measure, and print the difference at several quantiles: low ones are disturbed least."""
    torch.set_num_threads(1)
    module = Alternating()
    batches = [(torch.randn(8, 32), torch.randn(8, 2))] * 1000
    trainer = Trainer(max_steps=STEPS, enable_progress_bar=False, logger=False)
    trainer.fit(module, batches)
    print("quantile   with, µs   without, µs   difference, µs   (aim: at most 3)")
    for quantile in (0.1, 0.25, 0.5):
        logged, empty = (
            sorted(module.times[kind])[int(len(module.times[kind]) * quantile)] / 1e3
            for kind in ("log", "empty")
        )
        print(f"{quantile:8.2f} {logged:10.2f} {empty:13.2f} {logged - empty:16.2f}")


if __name__ == "__main__":
    main()
