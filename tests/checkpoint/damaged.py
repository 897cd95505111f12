"""Two whole checkpoints to damage, and how a damaged one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import CheckpointError
from hookline.checkpoint.files import read, verify


def contents(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "module": {
            "weight": torch.randn(8, 8, generator=generator),
            "half": torch.randn(5, generator=generator).bfloat16(),
        },
        "optimizers": [
            {"state": {0: {"m": torch.randn(8, 8, generator=generator)}}, "groups": ({"lr": 0.1},)}
        ],
        "counters": {"step": step, "epoch": 0},
        "metrics": {"loss": float("nan")},
    }


def refused(path: Path, name: str) -> None:
    for look in (verify, read):
        with pytest.raises(CheckpointError) as caught:
            look(path)
        assert path.name in str(caught.value)
        assert name in str(caught.value) or "has format" in str(caught.value), str(caught.value)
