"""What hooks ask for, and what a checkpoint holds of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

REASONS = ("interval", "best", "last", "signal", "exception", "manual")
COUNTERS = ("epoch", "epochs_seen", "step", "batches_seen", "samples_seen", "tokens_seen")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that somebody asked for; it is written at the loop's next save point."""

    path: Path | None
    reason: str


def rng_state() -> dict[str, Any]:
    """The random streams of Python, numpy and torch."""
    streams: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    streams["numpy"] = (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state_all()
    return streams


def set_rng_state(streams: dict[str, Any]) -> None:
    """Take them back."""
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(streams["cuda"])
