"""What starting costs: fresh interpreters that import a trainer and fit one batch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import ClassVar

MODEL = """
import tempfile
import torch
from torch import nn
{imports}

class Net({base}):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

torch.set_num_threads(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1, 32), torch.randn(1, 2)))
"""
BARE = """
net = Net()
updates = net.configure_optimizers()
for index, batch in enumerate(loader):
    updates.zero_grad()
    net.training_step(batch, index).backward()
    updates.step()
"""
HOOKLINE = """
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(max_epochs=1, logger=False, enable_progress_bar=False, device="cpu", run_dir=folder)
    trainer.fit(Net(), loader)
"""
LIGHTNING = """
import logging, warnings
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(max_epochs=1, logger=False, enable_progress_bar=False, accelerator="cpu", devices=1,
                      enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder)
    trainer.fit(Net(), loader)
"""
SCRIPTS = {
    name: MODEL.format(imports=imports, base=base) + train
    for name, imports, base, train in (
        ("bare", "", "nn.Module", BARE),
        ("hookline", "from hookline import Module, Trainer", "Module", HOOKLINE),
        ("lightning", "from lightning.pytorch import LightningModule, Trainer", "LightningModule", LIGHTNING),
    )
}


class Process:
    """Runs a script in a fresh interpreter at every turn. It has the methods of a `lockstep.Runner`."""

    _ran: ClassVar[set[str]] = set()

    def __init__(self, script: str) -> None:
        self.nanoseconds: list[float] = []
        """Wall time, one number for each turn."""
        self._script = script

    def turn(self) -> float:
        """Run it; return the nanoseconds."""
        if self._script not in self._ran:  # the first one compiles and fills the file cache
            run(self._script)
            self._ran.add(self._script)
        began = time.perf_counter_ns()
        run(self._script)
        self.nanoseconds.append(time.perf_counter_ns() - began)
        return self.nanoseconds[-1]

    def finish(self) -> None:
        """Do nothing: there is nothing left to do."""


def run(script: str) -> None:
    """Run a script in a fresh interpreter."""
    # compiled files are what an installed package has
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, env=environment
    )
    if ended.returncode:
        raise RuntimeError(f"A script of the start-up measurement failed:\n{ended.stderr}")
