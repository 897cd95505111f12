"""Projects for the tests of the command line: modules and configurations in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

from hookline.cli import main

PARTS = """
import os
import signal
import time
import torch
from torch.nn import functional as F
from hookline import DataModule, Hook, Module

class Net(Module):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(4, 2), lr
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx): return self.training_step(batch, batch_idx)
    test_step = validation_step
    def forward(self, x): return self.layer(x)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=self.lr)

class Data(DataModule):
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * 4
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

class Speaking(Hook):
    def on_train_start(self): print("the hook speaks")

class Slow(Hook):
    def on_train_batch_end(self, batches_seen):
        print("batch", batches_seen, flush=True)
        time.sleep(0.1)

class Fails(Hook):
    def on_step_end(self, step): raise RuntimeError("broken on purpose")

class Stops(Hook):
    def on_step_end(self, trainer): trainer.stop("enough")

class TrialPruned(Exception): ...

class Prunes(Hook):
    def on_step_end(self, trainer): trainer.stop("not promising", status="pruned", raises=TrialPruned())

class Ends(Hook):
    def on_step_end(self): os.kill(os.getpid(), signal.SIGTERM)

class HasToken(Hook):
    def __init__(self, api_key: str) -> None: self.api_key = api_key
"""
RUN = """
module = "cli_parts.Net"
datamodule = "cli_parts.Data"
[trainer]
max_epochs = 2
seed = 1
enable_progress_bar = false
[hooks.speaking]
class_path = "cli_parts.Speaking"
"""
TRACED_PARTS = """
import torch
from torch.nn import functional as F
from hookline import DataModule, Hook, Module, every

class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx): return self.training_step(batch, batch_idx)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(DataModule):
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * 4
    val_dataloader = train_dataloader

class Leaves(Hook):
    def on_step_end(self, trainer, step):
        if step == 3: trainer.disable_hook("leaves")

class Look(Hook):
    def __init__(self, above: int = 0) -> None: self.above = above
    def on_step_end(self, step, loss):
        if step > self.above: print("step", step, "loss", loss >= 0)

class Wants(Hook):
    def on_step_end(self, module): ...

class Quits(Hook):
    def __init__(self, token: str = "") -> None: ...
    def on_step_end(self, step):
        if step == 6: raise SystemExit(3)

class Fails(Hook):
    def on_step_end(self, step):
        if step == 6: raise RuntimeError("broken on purpose")
"""
TRACED_RUN = """
module = "trace_parts.Net"
datamodule = "trace_parts.Data"
[trainer]
max_epochs = 2
seed = 1
enable_progress_bar = false
[hooks.leaves]
class_path = "trace_parts.Leaves"
"""


STRICT = "import runpy, warnings; warnings.simplefilter('error')\n"
HOOKLINE = f"{STRICT}runpy.run_module('hookline', run_name='__main__', alter_sys=True)"


def hookline(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run as `python -W error -m hookline` does, in a process that has imported torch already."""
    return strict_python("-c", HOOKLINE, *map(str, arguments), cwd=cwd)


def strict_python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with torch imported already. Warnings are errors if the code begins with STRICT."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *words]
    return preloaded.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err
