"""What the audit of hooks costs: calls per step when it is off, and its share of a GPT's step when it is on.

Both kinds of runs train the GPT of examples/gpt/gpt.py with the same hooks, in turns.
"""

from __future__ import annotations

import statistics
from typing import Any

from gpt_steps import calls_per_step, gpt_step_times

from hookline import Hook

STEPS, WARM, HOOKS = 60, 10, 4


class Listens(Hook):
    """Listens to two events of every step, as a monitor does."""

    def on_train_batch_start(self, batch: Any) -> None:
        """Do nothing with the batch."""

    def on_step_end(self, module: Any, step: int) -> None:
        """Do nothing with the module."""


def step_times(audit: bool, steps: int = STEPS) -> list[float]:
    """Return the seconds of each step of a run with four hooks."""
    return gpt_step_times(steps, [Listens(f"hook_{number}") for number in range(HOOKS)], audit=audit)


def main() -> None:
    """Measure, and print both figures."""
    plain, off = (calls_per_step(lambda: [Listens()], **each) for each in ({}, {"audit": False}))
    print(f"audit off: {off - plain:+.0f} calls per step")
    pairs = [(step_times(False), step_times(True)) for _ in range(3)]
    without, audited = (
        statistics.median(each for pair in pairs for each in pair[kind][WARM:]) for kind in (0, 1)
    )
    calls = 2 * HOOKS + 1
    print(
        f"audit on:  a GPT step takes {without * 1e3:.1f} ms without and {audited * 1e3:.1f} ms with the "
        f"audit, +{(audited - without) / without:.0%}; {calls} hook calls in a step, "
        f"{(audited - without) / calls * 1e6:.0f} µs each"
    )


if __name__ == "__main__":
    main()
