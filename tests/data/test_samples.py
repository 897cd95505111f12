"""The order of a loader as plain data, drawn again from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hookline.data.loaders import make_loaders
from hookline.data.samples import LoaderOrder, describe_loader
from hookline.util.errors import UnknownSamples

DATA = TensorDataset(torch.arange(20))


def described(source: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """The description of a loader, and the batches of its third pass."""
    (loader,) = make_loaders(source, 1.0, "train")
    for number in range(3):
        batches = [batch[0].tolist() for batch in loader.open(number, 0, 7)]
    return json.loads(json.dumps(describe_loader(loader))), batches


@pytest.mark.parametrize(
    "source",
    [
        DataLoader(DATA, batch_size=3),
        DataLoader(DATA, batch_size=3, shuffle=True),
        DataLoader(DATA, batch_size=3, sampler=SubsetRandomSampler(range(2, 20, 2)), drop_last=True),
        DataLoader(DATA, batch_size=3, sampler=DistributedSampler(DATA, num_replicas=1, rank=0, seed=4)),
        DataLoader(DATA, batch_size=3, sampler=[5, 4, 3, 2, 1]),
    ],
    ids=["sequential", "random", "subset", "distributed", "list"],
)
def test_a_pass_is_drawn_again_from_its_description(source: Any) -> None:
    known, batches = described(source)
    order = LoaderOrder("train", known, {})
    for position, expected in enumerate(batches):
        assert list(order.samples(2, position)) == [(0, expected)]
    with pytest.raises(UnknownSamples, match=r"has no batch 9 in its pass 2: .*was the dataset changed\?"):
        list(order.samples(2, 9))


def test_what_only_the_program_has_is_named() -> None:
    batch_sampler = BatchSampler(SequentialSampler(DATA), 4, False)
    batch_sampler.__class__ = type("Buckets", (BatchSampler,), {})
    known, _ = described(DataLoader(DATA, batch_sampler=batch_sampler))
    assert known["sampler"] is None
    with pytest.raises(UnknownSamples, match=r"its order comes from .*Buckets, which only the program"):
        list(LoaderOrder("train", known, {}).samples(0, 0))
    known, _ = described(DataLoader(DATA, batch_size=50_000, sampler=torch.randint(20, (400_000,)).tolist()))
    with pytest.raises(UnknownSamples, match="the 400000 values of its list are too many for the record"):
        list(LoaderOrder("train", known, {}).samples(0, 0))
