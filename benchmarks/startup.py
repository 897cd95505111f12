"""What importing costs on top of `import torch`, in fresh interpreters."""

from __future__ import annotations

import os
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
    # compiled files are what an installed package has
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for turn in range(times + 1):
        command = [sys.executable, "-c", SCRIPT]
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        if turn:  # the first one compiles and fills the file cache
            found.append([1000 * float(each) for each in output.split()])
    for name, values in zip(NAMES, zip(*found, strict=True), strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:45} {middle:8.1f} ms (quartiles {low:.1f} to {high:.1f}, {times} interpreters)")
    return 0
