"""All GPUs of a machine over NCCL: DDP, FSDP and FSDP with offloaded parameters train the weights of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.accelerator import ON_GPU, RANKS, Net, same, weights

from hookline import load_weights

TESTS = Path(__file__).resolve().parents[1]
CASES = ("ddp", "ddp, accumulated", "fsdp", "fsdp, clipped", *(("fsdp, offloaded",) if ON_GPU else ()))


@pytest.fixture(scope="module")
def launched() -> Iterator[dict[str, list[Any]]]:
    """Run all cases on all GPUs, with processes that begin from nothing: CUDA does not survive a fork."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
        ]
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [
                *launch,
                "--log-dir",
                f"{folder}/said",
                "--redirects",
                "3",
                str(TESTS / "gpu" / "rank_cases.py"),
                folder,
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        said = {path: path.read_text() for path in Path(folder, "said").rglob("*.log")}
        assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *said.values()])
        found: dict[str, list[Any]] = {}
        for text in said.values():
            for line in text.splitlines():
                if line.startswith("CASE "):
                    name, rank, result = json.loads(line.removeprefix("CASE "))
                    found.setdefault(name, []).append((rank, result))
        yield found


@pytest.mark.parametrize("case", CASES)
def test_all_gpus_train_the_weights_of_one_process(case: str, launched: dict[str, list[Any]]) -> None:
    results = dict(launched[case])
    assert sorted(results) == list(range(RANKS))
    for rank, result in results.items():
        assert result["distance"] < 1e-8
        assert result["steps"] == (6 if "accumulated" in case else 12)
        assert result["backend"] == ("nccl" if ON_GPU else "gloo")
        assert result["device"] == (f"cuda:{rank}" if ON_GPU else "cpu")


def test_a_checkpoint_of_all_gpus_loads_on_the_cpu(launched: dict[str, list[Any]]) -> None:
    folder = Path(launched["fsdp, saved"][0][1]["path"])
    module = Net().double()
    assert load_weights(module, folder).complete
    assert same(weights(module), torch.load(folder.parents[2] / "weights.pt", weights_only=True))
