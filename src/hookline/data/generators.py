"""Random generators that belong to a loader, its samplers or its dataset: found, kept and put back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

Found = dict[str, Any]
"""Generators by where they were found: "sampler.generator"."""


@dataclass(frozen=True, slots=True)
class Value:
    """A seed, or the number of an epoch, that decides an order as a generator's state does."""

    owner: dict[str, Any]
    name: str


def find_generators(**owners: Any) -> Found:
    """Those that are attributes of one of the owners, each once however many share it."""
    found: Found = {}
    seen: set[int] = set()
    for owner, value in owners.items():
        for name, each in getattr(value, "__dict__", {}).items():
            if isinstance(each, KINDS) and id(each) not in seen:
                seen.add(id(each))
                found[f"{owner}.{name}"] = each
    return found


def states_of(generators: Found) -> dict[str, Any]:
    """Their states, as plain data and tensors."""
    return {name: _state(each) for name, each in generators.items()}


def put_back(generators: Found, states: dict[str, Any]) -> None:
    """Take the states back; a generator that was not there when they were kept stays as it is."""
    for name, each in generators.items():
        if name not in states:
            continue
        if isinstance(each, Value):
            each.owner[each.name] = states[name]
        elif isinstance(each, torch.Generator):
            each.set_state(states[name])
        elif isinstance(each, random.Random):
            each.setstate(states[name])
        elif isinstance(each, np.random.RandomState):
            each.set_state(states[name])
        else:
            each.bit_generator.state = states[name]


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
