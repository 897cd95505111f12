"""What importing costs on top of `import torch`, in fresh interpreters."""

from __future__ import annotations

import statistics
import subprocess
import sys

SCRIPT = """
import time
marks = [time.perf_counter()]
import torch
marks.append(time.perf_counter())
import hookline
marks.append(time.perf_counter())
from hookline import Trainer
marks.append(time.perf_counter())
print(*(after - before for before, after in zip(marks, marks[1:])))
"""
NAMES = ("import torch", "import hookline, torch being there", "from hookline import Trainer, on top of both")


def startup(times: int) -> int:
    """Print the medians."""
    found = []
    for turn in range(times + 1):
        output = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout
        if turn:  # the first one fills the file cache
            found.append([1000 * float(each) for each in output.split()])
    for name, values in zip(NAMES, zip(*found, strict=True), strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:45} {middle:8.1f} ms (quartiles {low:.1f} to {high:.1f}, {times} interpreters)")
    return 0
