"""The command line on several ranks, as torchrun and SLURM start it: one run, one record, one voice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from ranks.torchrun import by_torchrun, environment
from thorough import some

MODEL = """
import torch
from hookline import Module
from torch.utils.data import DataLoader, TensorDataset

def loader(n):
    x = torch.arange(4.0 * n).reshape(n, 4) / n
    return DataLoader(TensorDataset(x, x[:, :2]), batch_size=2)

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
    def train_dataloader(self):
        return loader(16)
    def predict_dataloader(self):
        return loader(10)
"""
CONFIG = """
module = "model.Net"
[trainer]
max_epochs = 2
run_dir = "run"
strategy = "ddp"
[hooks.keep]
class_path = "model_checkpoint"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def from_nothing(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command on two ranks as `by_torchrun` does, but import torch in each process."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.run(
        launch, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("launch", some([by_torchrun], [from_nothing]))
def test_torchrun_runs_the_command_line_as_one_run(project: Path, launch: Any) -> None:
    ended = launch("-m", "hookline", "fit", "run.toml", cwd=project)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("fit completed at step 8") == 1  # 16 samples, 2 ranks of 2, 2 epochs
    record = json.loads((project / "run" / "run.json").read_text())
    assert (record["status"], record["starts"], record["machine"]["world_size"], record["step"]) == (
        "completed",
        1,
        2,
        8,
    )
    records = [json.loads(line) for line in (project / "run" / "log.jsonl").read_text().splitlines()]
    assert [each["type"] for each in records] == [
        "hyperparams",
        "metrics",
        "metrics",
        "cost",
        "timings",
        "end",
    ]  # said once, not by every rank


def test_a_failure_of_one_rank_is_in_the_record_of_the_run(project: Path) -> None:
    (project / "model.py").write_text(
        MODEL
        + """
    def on_train_batch_end(self, batch_idx):
        import torch.distributed
        if torch.distributed.get_rank() == 1 and batch_idx == 2:
            raise ValueError("on purpose")
"""
    )
    ended = by_torchrun("-m", "hookline", "fit", "run.toml", cwd=project)
    assert ended.returncode != 0
    record = json.loads((project / "run" / "run.json").read_text())
    assert record["status"] == "error" and record["error"]["type"] and record["ended_at"]


def test_srun_is_understood_and_predictions_of_all_ranks_come_in_order(project: Path) -> None:
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    launch = [sys.executable, "-m", "hookline", "predict", "run.toml", "--json"]
    tasks = [
        preloaded.Popen(
            launch,
            cwd=project,
            env=environment(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [each.communicate(timeout=300) for each in tasks]
    assert [each.returncode for each in tasks] == [0, 0], said
    assert said[1][0] == ""  # rank zero speaks for all
    told = json.loads(said[0][0])
    lines = [json.loads(line) for line in Path(project, told["predictions"]).read_text().splitlines()]
    assert sorted(number for line in lines for number in line) == pytest.approx(
        [4.0 * n / 10 for n in range(10)]
    )
