"""Run `streaming.py` three times: without interruption, killed, and resumed. The last weights are equal.

`python examples/streaming/kill_and_resume.py`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file


def train(folder: Path, *options: str) -> int:
    """Start the training and return its exit code."""
    program = Path(__file__).with_name("streaming.py")
    command = [sys.executable, str(program), "--run-dir", str(folder), *options]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode


def main() -> int:
    """Compare a run that was killed and resumed with one that was not."""
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name, "whole"), Path(name, "killed")
        print("--- not interrupted")
        train(whole)
        print("--- killed, and started again")
        code = train(killed, "--kill-at", "130")
        print(f"exit code {code}")
        train(killed)
        ends = [load_file(each / "checkpoints/last/model.safetensors") for each in (whole, killed)]
        equal = all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
        print(f"--- the weights of both runs are {'equal, bit for bit' if equal else 'DIFFERENT'}")
        return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
