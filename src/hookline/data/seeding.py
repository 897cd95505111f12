"""Every source of randomness at once: seed it, keep it, put it back."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hookline.engine.checks import check_seed

seed_torch = torch.default_generator.manual_seed
"""The CPU's stream only: 1.3 µs, where torch.manual_seed looks at every kind of device for 188."""

log = logging.getLogger("hookline")
UNSEEDED = 2**32
"""A stream of torch's that was never seeded has a random seed of 53 bits or more; people choose smaller ones.
"""


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, on the CPU and on every accelerator. seed: from 0 to 2**64 - 1."""
    check_seed("seed", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # covers the CPU and all devices
    _chosen.add(torch.initial_seed())


class Creation:
    """The moment at which a module or a trainer is made: its place in the order of all, and whether torch was
    seeded by then.
    """

    __slots__ = ("number", "seeded")

    def __init__(self) -> None:
        self.number = next(_creations)
        seed = torch.default_generator.initial_seed()
        self.seeded = seed < UNSEEDED or seed in _chosen


_creations = itertools.count()
_chosen: set[int] = set()
"""Seeds that `seed_everything` was given: they may be large."""


def report_unseeded(trainer: Creation, module: Any, seed: int) -> bool:
    """Warn if a module was made between a trainer with a seed and its fit, and drew its
    weights without one.
    """
    made = getattr(
        module.__dict__.get("_door"), "made", None
    )  # of a module that is not ours nothing is known
    if made is None or made.seeded or made.number < trainer.number:
        return False
    name = type(module).__name__
    log.warning(
        "Trainer(seed=%d) takes effect when fit begins. %s was created after the trainer without a seed, "
        "so its initial weights differ from run to run. Call hookline.seed_everything(%d) before you "
        "create it.",
        seed,
        name,
        seed,
    )
    return True


def seed_rank(seed: int, rank: int) -> None:
    """Streams of this rank's own; rank zero goes on with those of the seed."""
    if rank > 0:
        seed_everything(key_of(seed, "rank", rank))


def key_of(*parts: int | str) -> int:
    """A seed of 62 bits made of numbers and names: the same in every process, unlike `hash`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def rng_state() -> dict[str, Any]:
    """The random streams of Python, numpy and torch."""
    streams: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    streams["numpy"] = (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available():
        # of several ranks each has a device of its own; to ask all of them would take memory on every one
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        streams["cuda"] = [torch.cuda.get_rng_state()] if several else torch.cuda.get_rng_state_all()
    return streams


def set_rng_state(streams: dict[str, Any]) -> None:
    """Take them back."""
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        if len(streams["cuda"]) == 1:
            torch.cuda.set_rng_state(streams["cuda"][0])
        else:
            torch.cuda.set_rng_state_all(streams["cuda"])


@contextlib.contextmanager
def isolated_rng() -> Iterator[None]:
    """A block that leaves the random streams as it found them."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
