"""Random streams: seed, save and restore those of the process (Python's, NumPy's and torch's), and save and
restore the random generators of a loader, its samplers and its dataset.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Never

import numpy as np
import torch

from hookline.engine.checks import check_seed
from hookline.util.errors import OptionError

seed_torch = torch.default_generator.manual_seed
"""Seeds only the CPU's stream: 1.3 µs, where torch.manual_seed takes 188 for all devices."""

log = logging.getLogger("hookline")
UNSEEDED = 2**32
"""An unseeded torch stream has a random seed of 53 bits or more; users choose smaller ones."""


def seed_everything(seed: int, **unknown: Never) -> None:
    """Seed Python, NumPy and torch, on the CPU and on every accelerator. seed: from 0 to 2**64 - 1."""
    for name in unknown:
        advice = " Leave it out: Hookline seeds the workers of loaders itself." if name == "workers" else ""
        raise OptionError(
            f"seed_everything() has no argument {name!r}.{advice}", option=name, allowed=("seed",)
        )
    check_seed("seed", seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # covers the CPU and all devices
    _chosen.add(torch.initial_seed())


class Creation:
    """The creation of a module or a trainer: its number in the process, and whether torch was seeded."""

    __slots__ = ("number", "seeded")

    def __init__(self) -> None:
        self.number = next(_creations)
        seed = torch.default_generator.initial_seed()
        self.seeded = seed < UNSEEDED or seed in _chosen


_creations = itertools.count()
_chosen: set[int] = set()
"""Seeds that were passed to `seed_everything`; they may be large."""


def report_unseeded(trainer: Creation, module: Any, seed: int) -> bool:
    """Warn if an unseeded module was created after a trainer with a seed and before its fit."""
    made = getattr(module.__dict__.get("_run_ref"), "made", None)  # None for a plain nn.Module
    if made is None or made.seeded or made.number < trainer.number:
        return False
    name = type(module).__name__
    log.warning(
        "Trainer(seed=%d) takes effect when fit begins. %s was created after the trainer without a seed, "
        "so its initial weights differ from run to run, unless its __init__ seeds torch. Call "
        "hookline.seed_everything(%d) before you create it.",
        seed,
        name,
        seed,
    )
    return True


def seed_rank(seed: int, rank: int) -> None:
    """Seed the random streams of this rank differently; rank zero keeps those of the seed."""
    if rank > 0:
        seed_everything(key_of(seed, "rank", rank))


def key_of(*parts: int | str) -> int:
    """Return a 62-bit seed from numbers and names, the same in every process, unlike `hash`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def rng_state() -> dict[str, Any]:
    """Return the states of the random streams of Python, NumPy and torch."""
    streams: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    streams["numpy"] = (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available():
        # each of several ranks has its own device, and reading the other devices would allocate memory there
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        streams["cuda"] = [torch.cuda.get_rng_state()] if several else torch.cuda.get_rng_state_all()
    return streams


def set_rng_state(streams: dict[str, Any]) -> None:
    """Restore the random streams of Python, NumPy and torch."""
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        if len(streams["cuda"]) == 1:
            torch.cuda.set_rng_state(streams["cuda"][0])
        else:
            torch.cuda.set_rng_state_all(streams["cuda"])


def seed_temporarily(seed: int) -> Callable[[], None]:
    """Seed everything, and return a function that restores the random streams."""
    before = rng_state()
    seed_everything(seed)
    return functools.partial(set_rng_state, before)


@contextlib.contextmanager
def isolated_rng() -> Iterator[None]:
    """Restore the random streams after the block."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


# ---- the generators of a loader ----------------------------------------------------------------------------


GENERATOR_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

Generators = dict[str, Any]
"""Generators by location, such as "sampler.generator"."""


@dataclass(frozen=True, slots=True)
class Value:
    """A seed or an epoch number that determines an order like a generator's state."""

    owner: dict[str, Any]
    name: str


def find_generators(**owners: Any) -> Generators:
    """Return the generators that are attributes of the owners, each once."""
    found: Generators = {}
    seen: set[int] = set()
    for owner, value in owners.items():
        for name, attribute in getattr(value, "__dict__", {}).items():
            if isinstance(attribute, GENERATOR_KINDS) and id(attribute) not in seen:
                seen.add(id(attribute))
                found[f"{owner}.{name}"] = attribute
    return found


def seeds_itself(collate: Any) -> bool:
    """Return whether a collator makes a generator of its own from its seed at the first batch.

    Collators of transformers do, such as DataCollatorForLanguageModeling(seed=...).
    """
    has_seed = getattr(collate, "seed", None) is not None and hasattr(collate, "generator")
    return has_seed and callable(getattr(collate, "create_rng", None))


def with_generator(collate: Any) -> Any:
    """Return a collator after it has made its own generator, so that a checkpoint can hold its state."""
    if seeds_itself(collate) and collate.generator is None:
        with contextlib.suppress(ValueError):  # in a process of multiprocessing it refuses
            collate.create_rng()
    return collate


def states_of(generators: Generators) -> dict[str, Any]:
    """Return the states of generators as plain data and tensors."""
    return {name: _state_of(each) for name, each in generators.items()}


def put_back(generators: Generators, states: dict[str, Any]) -> None:
    """Restore the states of generators; skip generators without a saved state."""
    for name, generator in generators.items():
        if name not in states:
            continue
        if isinstance(generator, Value):
            generator.owner[generator.name] = states[name]
        elif isinstance(generator, torch.Generator):
            generator.set_state(states[name])
        elif isinstance(generator, random.Random):
            generator.setstate(states[name])
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(states[name])
        else:
            generator.bit_generator.state = states[name]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, Value):
        return generator.owner[generator.name]
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return (
        generator.get_state(legacy=False)
        if isinstance(generator, np.random.RandomState)
        else generator.bit_generator.state
    )
