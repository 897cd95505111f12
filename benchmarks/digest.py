"""What digests cost: calls per step when they are off, and their share of a GPT's step when they are on.

All kinds of runs train the GPT of examples/gpt/gpt.py, in turns. Times are those of the processor, so that
other programs do not count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gpt_steps import calls_per_step, gpt_step_times

STEPS, WARM, EVERY = 30, 5, 10
KINDS: dict[str, Any] = {
    "without": False,
    "every step": True,
    "every step, modules": {"every": 1, "modules": True},
}


def step_times(digest: Any, steps: int = STEPS) -> tuple[list[float], float]:
    """Return the seconds of each step of a run, and the bytes of a digest."""
    with tempfile.TemporaryDirectory() as folder:
        times = gpt_step_times(steps, clock=time.process_time, digest=digest, run_dir=folder)
        file = Path(folder) / "digests.jsonl"
        return times, file.stat().st_size / steps if file.exists() else 0.0


def calls(**options: Any) -> float:
    """Return the calls of a step."""
    with tempfile.TemporaryDirectory() as folder:
        return calls_per_step(run_dir=folder, **options)


def main() -> None:
    """Measure, and print both figures."""
    plain, off, between = calls(), calls(digest=False), calls(digest=1000)
    print(f"digests off: {off - plain:+.0f} calls per step; in a step without one: {between - plain:+.1f}")
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    sizes = dict.fromkeys(KINDS, 0.0)
    for _ in range(3):
        for name, digest in KINDS.items():
            times, sizes[name] = step_times(digest)
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
