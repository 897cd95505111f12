"""Find, save and restore the random generators of a loader, its samplers and its dataset."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

Found = dict[str, Any]
"""Generators by location, such as "sampler.generator"."""


@dataclass(frozen=True, slots=True)
class Value:
    """A seed or an epoch number that determines an order like a generator's state."""

    owner: dict[str, Any]
    name: str


def find_generators(**owners: Any) -> Found:
    """Return the generators that are attributes of the owners, each once."""
    found: Found = {}
    seen: set[int] = set()
    for owner, value in owners.items():
        for name, attribute in getattr(value, "__dict__", {}).items():
            if isinstance(attribute, KINDS) and id(attribute) not in seen:
                seen.add(id(attribute))
                found[f"{owner}.{name}"] = attribute
    return found


def states_of(generators: Found) -> dict[str, Any]:
    """Return the states of generators as plain data and tensors."""
    return {name: _state(each) for name, each in generators.items()}


def put_back(generators: Found, states: dict[str, Any]) -> None:
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


def _state(generator: Any) -> Any:
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
