"""Which loaders can have another batch size, and what they share with the loader that the user made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from hookline import OptionError
from hookline.data.batch_size import why_fixed, with_batch_size

ROWS = TensorDataset(torch.arange(10))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Sized(Stream):
    batch_size = 4


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([*super().__iter__(), *super().__iter__()])


def sizes(loader: Any) -> list[int]:
    return [len(each if isinstance(each, torch.Tensor) else each[0]) for each in loader]


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(ROWS, 3), [4, 4, 2]),
        (DataLoader(ROWS, 3, drop_last=True), [4, 4]),
        (DataLoader(ROWS, 3, shuffle=True, num_workers=1), [4, 4, 2]),
        (DataLoader(Stream(), 3), [4, 4, 2]),
    ],
)
def test_a_loader_gets_another_size_and_the_users_own_stays(loader: Any, expected: list[int]) -> None:
    before = sizes(loader)
    made = with_batch_size(loader, 4)
    assert sizes(made) == expected and made.batch_size == made.batch_sampler.batch_size == 4
    assert loader.batch_size == 3 and sizes(loader) == before
    assert made.dataset is loader.dataset and made.sampler is loader.sampler and type(made) is type(loader)


def test_the_order_and_its_generator_are_those_of_the_loader() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, generator=generator))
    one = torch.cat([each[0] for each in with_batch_size(loader, 5)])
    generator.manual_seed(1)
    assert torch.equal(one, torch.cat([each[0] for each in loader]))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([1, 2], "is a list, which makes its own batches"),
        (ROWS, "is a dataset"),
        (DataLoader(ROWS, None), "has batch_size=None"),
        (DataLoader(ROWS, batch_sampler=[[1]]), "has the batch sampler list"),
        (Twice(ROWS, 3), "is a Twice with an __iter__"),
        (DataLoader(Sized(), 4), "reads Sized, which has a batch size of its own"),
    ],
)
def test_other_loaders_say_why_not(source: Any, text: str) -> None:
    assert why_fixed(source).startswith(text.partition(",")[0])
    with pytest.raises(OptionError, match=text):
        with_batch_size(source, 2)


def test_a_batch_sampler_of_torch_that_the_user_made_can_be_made_again() -> None:
    loader = DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 3, True))
    assert sizes(with_batch_size(loader, 4)) == [4, 4]
