"""Every source of randomness at once: seed it, keep it, put it back, and streams beside the main ones."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hookline.checks import check_seed

numpy_random: Any = np.random  # its stubs know neither get_bit_generator nor set_bit_generator
seed_torch = torch.default_generator.manual_seed
"""The CPU's stream only: 1.3 µs, where torch.manual_seed looks at every kind of device for 188."""

log = logging.getLogger("hookline")
UNSEEDED = 2**32
"""A stream of torch's that was never seeded has a random seed of 53 bits or more; people choose smaller ones."""
MT_BYTES = 625 * 4
"""A Mersenne twister: 624 words and the position in them."""


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, on the CPU and on every accelerator. seed: from 0 to 2**64 - 1."""
    check_seed("seed", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # covers the CPU and all devices
    _chosen.add(torch.initial_seed())


class Creation:
    """The moment at which a module or a trainer is made: its place in the order of all, and whether torch was seeded by then."""

    __slots__ = ("number", "seeded")

    def __init__(self) -> None:
        self.number = next(_creations)
        seed = torch.default_generator.initial_seed()
        self.seeded = seed < UNSEEDED or seed in _chosen


_creations = itertools.count()
_chosen: set[int] = set()
"""Seeds that `seed_everything` was given: they may be large."""


def report_unseeded(trainer: Creation, module: Any, seed: int) -> bool:
    """Warn if a module was made between a trainer with a seed and its fit, and drew its weights without one."""
    made = getattr(module.__dict__.get("_door"), "made", None)  # of a module that is not ours nothing is known
    if made is None or made.seeded or made.number < trainer.number:
        return False
    name = type(module).__name__
    log.warning("Trainer(seed=%d) takes effect when fit begins. %s was created after the trainer without a seed, so its initial "
                "weights differ from run to run. Call hookline.seed_everything(%d) before you create it.", seed, name, seed)
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


class OwnStream:
    """Random streams of somebody's own: inside the block they stand in for the main ones, from where the last block left them.

    About 30 µs for a block, nearly all of it for Python's stream. Numpy's would take 95 µs to read and write, so the generator
    behind it is exchanged instead.
    """

    def __init__(self, key: int) -> None:
        self._python = random.Random(key).getstate()
        self._numpy: Any = np.random.MT19937(key)
        self._torch = torch.Generator().manual_seed(key).get_state()
        self._words = b""
        self._half_drawn: Any = None

    def __enter__(self) -> None:
        self._half_drawn = self._find_half_drawn()
        self._swap()

    def __exit__(self, *error: object) -> None:
        self._swap()
        if self._half_drawn is not None:
            np.random.set_state(self._half_drawn)

    def _swap(self) -> None:
        python, numpy, streams = random.getstate(), numpy_random.get_bit_generator(), torch.default_generator.get_state()
        random.setstate(self._python)
        numpy_random.set_bit_generator(self._numpy)
        torch.default_generator.set_state(self._torch)
        self._python, self._numpy, self._torch = python, numpy, streams

    def _find_half_drawn(self) -> Any:
        """The state of numpy's main stream if it holds the second of a pair of normal numbers, which an exchange forgets.

        It holds none if it held none before and has not moved since; so most of the time it need not be asked, which is slow.
        """
        generator: Any = numpy_random.get_bit_generator()
        words = ctypes.string_at(generator.ctypes.state_address, MT_BYTES) if type(generator) is np.random.MT19937 else b""
        if words and words == self._words:
            return None
        state: Any = np.random.get_state(legacy=False)
        self._words = b"" if state["has_gauss"] else words
        return state if state["has_gauss"] else None
