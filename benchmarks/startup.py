"""What importing and a first fit cost on top of `import torch`, in fresh interpreters: CPU time, and modules
of Hookline.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

SCRIPT = """
import sys, time
def mark():
    marks.append((time.process_time(), sum(name.partition(".")[0] == "hookline" for name in sys.modules)))
marks = []
mark()
import torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
batches = [(torch.randn(4, 2), torch.randn(4, 1))] * 2
for inputs, targets in batches:  # what torch itself loads and sets up with its first step
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(inputs), targets).backward()
    optimizer.step()
mark()
import hookline
mark()
from hookline import Trainer
mark()
for turn in range(2):
    trainer = Trainer(max_epochs=1, run_dir=f"run{turn}", enable_progress_bar=False)
    trainer.fit(net, batches, batches, loss=torch.nn.functional.mse_loss, optimizer=optimizer)
    mark()
spans = [after - before for (before, _), (after, _) in zip(marks, marks[1:])]
print(*spans, *(count for _, count in marks[1:]))
"""
NAMES = (
    "import torch, and a step by hand",
    "import hookline",
    "from hookline import Trainer",
    "a first fit of two steps",
    "a second fit of two steps",
)


def startup(times: int) -> int:
    """Print the medians."""
    # compiled files are what an installed package has; one thread, because idle threads of torch take time as
    # well
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["OMP_NUM_THREADS"] = "1"
    found = []
    for turn in range(times + 1):
        command = [sys.executable, "-c", SCRIPT]
        with tempfile.TemporaryDirectory() as folder:
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment, cwd=folder
            ).stdout
        if turn:  # the first one compiles and fills the file cache
            found.append([float(each) for each in output.splitlines()[-1].split()])
    columns = list(zip(*found, strict=True))
    for name, seconds, modules in zip(NAMES, columns[: len(NAMES)], columns[len(NAMES) :], strict=True):
        low, middle, high = (1000 * each for each in statistics.quantiles(seconds, n=4))
        print(
            f"{name:34} {middle:8.1f} ms CPU (quartiles {low:.1f} to {high:.1f}), then {modules[0]:.0f} "
            f"modules of Hookline"
        )
    print(f"{times} interpreters")
    return 0
