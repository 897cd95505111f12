"""What digests cost: calls per step when they are off, and their share of a GPT's step when they are on.

All kinds of runs train the GPT of examples/gpt.py, in turns.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import ALPHABET, BATCH, CONTEXT, GPT

from hookline import Hook, Trainer

STEPS, WARM, EVERY = 30, 5, 10
KINDS: dict[str, Any] = {
    "without": False,
    "every step": True,
    "every step, modules": {"every": 1, "modules": True},
}


class Clock(Hook):
    """Measures the processor time of a step, from the end of the one before: other programs do not count."""

    order = 1000

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_step_end(self, step: int) -> None:
        """Store the time."""
        self.ends.append(time.process_time())


def batches(count: int) -> list[Any]:
    """Return random texts."""
    texts = torch.randint(len(ALPHABET), (BATCH, CONTEXT + 1))
    return [(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())] * count


def step_times(digest: Any, steps: int) -> tuple[list[float], float]:
    """Return the seconds of each step of a run, and the bytes of a digest."""
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=steps,
            hooks=[clock],
            digest=digest,
            run_dir=folder,
            logger=False,
            enable_progress_bar=False,
            checkpoint=False,
        )
        trainer.fit(GPT(), batches(steps))
        file = Path(folder) / "digests.jsonl"
        size = file.stat().st_size / steps if file.exists() else 0.0
    return [end - begin for begin, end in itertools.pairwise(clock.ends)], size


def calls_per_step(steps: int, **options: Any) -> int:
    """Return the Python calls of a run."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=steps,
            run_dir=folder,
            logger=False,
            enable_progress_bar=False,
            checkpoint=False,
            **options,
        )
        model, data = torch.nn.Linear(4, 1), [(torch.ones(2, 4), torch.ones(2, 1))] * steps
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sys.setprofile(profile)
        try:
            trainer.fit(model, data, loss=torch.nn.functional.mse_loss, optimizer=sgd)
        finally:
            sys.setprofile(None)
    return count


def more_calls(**options: Any) -> float:
    """Return the calls that one further step makes, without the first step, which is digested."""
    calls_per_step(20, **options)
    return (calls_per_step(40, **options) - calls_per_step(20, **options)) / 20


def main() -> None:
    """Measure, and print both figures."""
    plain, off, between = more_calls(), more_calls(digest=False), more_calls(digest=1000)
    print(
        f"digests off: {off - plain:+.0f} calls per step; in a step without a digest: {between - plain:+.0f}"
    )
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    sizes = dict.fromkeys(KINDS, 0.0)
    for _ in range(3):
        for name, digest in KINDS.items():
            times, sizes[name] = step_times(digest, STEPS)
            found[name] += times[WARM:]
    without, *others = (statistics.median(each) for each in found.values())
    print(f"a GPT step takes {without * 1e3:.1f} ms without digests")
    for name, took in zip(list(KINDS)[1:], others, strict=True):
        more = took - without
        print(
            f"{name}: {more * 1e3:.1f} ms and {sizes[name]:.0f} bytes for each digest, "
            f"+{more / without:.0%} of a step; every {EVERY} steps +{more / EVERY / without:.1%}"
        )


if __name__ == "__main__":
    main()
