"""The order of a map-style loader: from the seed and the epoch, the same with workers and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data.resumed import Samples, Seen, check, run
from torch.utils.data import DataLoader

from hookline.data.loaders import make_loaders

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader(workers: int = 0, noise: str = "", **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Samples(noise=noise), **{"batch_size": 3, "num_workers": workers, "shuffle": True, **options}
    )


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_the_order_is_the_same_with_workers_and_without(before: int, after: int, tmp_path: Path) -> None:
    check(lambda: loader(before), tmp_path, (3,), lambda: loader(after), max_epochs=2)


def test_with_a_generator_of_its_own_the_order_is_that_of_a_bare_loop() -> None:
    def make() -> Any:
        return loader(generator=torch.Generator().manual_seed(7))

    bare = make()
    expected = [batch[0].tolist() for _ in range(3) for batch in bare]
    seen = Seen()
    run(make(), seen, 1)
    assert seen.batches == expected


def order(batches: Iterator[Any]) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


def test_the_order_follows_from_seed_and_epoch() -> None:
    (one,), (other,) = make_loaders(loader(), 1.0, "train"), make_loaders(loader(), 1.0, "train")
    first = order(one.open(0, seed=5))
    assert order(one.open(1)) != first
    assert order(other.open(0, seed=5)) == first
    assert order(make_loaders(loader(), 1.0, "train")[0].open(0, seed=6)) != first


def test_without_a_seed_every_run_has_an_order_of_its_own() -> None:
    torch.manual_seed(1)
    source = loader()
    first, second = (order(make_loaders(source, 1.0, "train")[0].open(0)) for _ in range(2))
    assert first != second
    torch.manual_seed(1)
    assert order(make_loaders(source, 1.0, "train")[0].open(0)) == first
