"""Random generators of a loader, its sampler and its dataset are found, saved and put back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.resumed import Samples, check
from torch.utils.data import DataLoader

from hookline.data.generators import Value, find_generators, put_back, states_of

CUTS = (3, 4, 6)  # four batches an epoch: in the middle, after the last one, and in the middle of the second


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader(workers: int = 0, noise: str = "", **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Samples(noise=noise), **{"batch_size": 3, "num_workers": workers, "shuffle": True, **options}
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("limit", [1.0, 3])
def test_a_generator_of_the_loaders_own_is_taken_up(
    workers: int, persistent: bool, limit: float, tmp_path: Path
) -> None:
    if persistent and not workers:
        return

    def make() -> Any:
        return loader(workers, generator=torch.Generator().manual_seed(7), persistent_workers=persistent)

    check(make, tmp_path, (3, 5), max_epochs=2, limit_train_batches=limit)


def test_a_generator_of_the_datasets_own_continues(tmp_path: Path) -> None:
    class Own(Samples):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(3)

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + self.rng.random(dtype=np.float32), y

    check(lambda: DataLoader(Own(), 3, shuffle=True), tmp_path, CUTS)


class Owner:
    """Has a generator of every kind, one of them twice, and other things."""

    def __init__(self, seed: int) -> None:
        self.torch = self.again = torch.Generator().manual_seed(seed)
        self.python = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.older = np.random.RandomState(seed)
        self.seed, self.name = seed, "not one"


def draw(owner: Owner) -> list[float]:
    return [
        torch.rand(1, generator=owner.torch).item(),
        owner.python.random(),
        owner.numpy.random(),
        owner.older.random_sample(),
    ]


def test_generators_of_every_kind_are_found_once_by_their_place() -> None:
    owner = Owner(1)
    found = find_generators(dataset=owner, sampler=Owner(2), nothing=None)
    assert [name for name in found if name.startswith("dataset")] == [
        "dataset.torch",
        "dataset.python",
        "dataset.numpy",
        "dataset.older",
    ]
    assert found["dataset.numpy"] is owner.numpy and "sampler.torch" in found and len(found) == 8


def test_states_are_put_back_into_other_generators() -> None:
    one, other = Owner(1), Owner(2)
    draw(one)
    states = states_of(find_generators(dataset=one))
    expected = draw(one)
    put_back(find_generators(dataset=other), states)
    assert draw(other) == expected != draw(Owner(2))


def test_a_generator_without_a_saved_state_is_left_alone() -> None:
    owner = Owner(3)
    put_back(find_generators(dataset=owner), {"dataset.gone": None})
    assert draw(owner) == draw(Owner(3))


def test_a_number_that_decides_an_order_is_kept_like_a_state() -> None:
    owner = {"epoch": 3}
    found = {"sampler.epoch": Value(owner, "epoch")}
    assert states_of(found) == {"sampler.epoch": 3}
    put_back(found, {"sampler.epoch": 5})
    assert owner == {"epoch": 5}
