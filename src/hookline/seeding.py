"""Every source of randomness at once: seed it, keep it, put it back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, on the CPU and on every accelerator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # covers the CPU and all devices


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


@contextlib.contextmanager
def isolated_rng() -> Iterator[None]:
    """A block that leaves the random streams as it found them."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
