"""Facts about a source that are known without reading it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from data.resumed import Samples
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from hookline.data.loaders import make_loaders
from hookline.data.sources import (
    changes,
    counts_samples,
    has_state,
    is_indexed,
    is_of_samples,
    keeps_its_ways,
    length_of,
    resume_limits,
    shards_itself,
    source_facts,
)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Loader(DataLoader[Any]):
    def __len__(self) -> int:
        return 1


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Demanding(Stateful):
    def state_dict(self, samples: int) -> dict[str, Any]:  # type: ignore[override]
        return {"at": samples}


def test_a_state_that_can_be_saved_and_loaded_without_further_arguments_is_usable() -> None:
    assert has_state(Stateful())
    assert not has_state(Demanding())
    assert not has_state(object())


def test_a_length_is_known_or_not() -> None:
    assert length_of(DataLoader(Samples(12), 5)) == 3
    assert length_of(DataLoader(Stream(), 3)) is None
    assert length_of(iter([])) is None


def test_only_a_loader_of_a_dataset_with_indices_is_read_by_index() -> None:
    loader = DataLoader(Samples(), 3)
    assert is_indexed(loader) and is_of_samples(loader) and counts_samples(loader) and keeps_its_ways(loader)
    assert not is_indexed(DataLoader(Stream(), 3)) and not is_indexed([1])
    assert not keeps_its_ways(Loader(Samples(), 3))
    assert not counts_samples(DataLoader(Samples(), 3, collate_fn=list))
    own = DataLoader(Samples(), batch_sampler=[[0, 1], [2]])
    assert is_indexed(own) and not is_of_samples(own)
    torchs = DataLoader(Samples(), batch_sampler=BatchSampler(SequentialSampler(Samples()), 2, False))
    assert is_of_samples(torchs)


def test_a_source_that_shards_itself_says_so() -> None:
    split = DistributedSampler(Samples(), num_replicas=2, rank=0)
    assert shards_itself(DataLoader(Samples(), 3, sampler=split))
    assert not shards_itself(DataLoader(Samples(), 3))
    loader = DataLoader(Samples(), 3)
    loader.dataset.shards_itself = True  # type: ignore[attr-defined]
    assert shards_itself(loader)


def test_a_loader_with_a_state_that_is_not_used_says_why() -> None:
    class Own(Demanding, IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    (limit,) = resume_limits(make_loaders(DataLoader(Own(), 3), 1.0, "train")[0])
    assert "because Own.state_dict or load_state_dict needs further arguments (samples)" in limit


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, ""),
        ({"batch_size": 4}, "had batches of 3 when the checkpoint was saved, and has batches of 4 now"),
        ({"batch_size": 1, "world_size": 3}, ""),  # the same global batch
        (
            {"world_size": 2},
            "global batch than when the checkpoint was saved: 3 -> 6 (batch size x ranks: 3 x 1 -> 3 x 2).",
        ),
        ({"world_size": 3}, "3 x 1 -> 3 x 3). To keep it, set batch_size=1."),
        ({"length": 5, "units": 15}, "had 4 batches when the checkpoint was saved, and has 5 now"),
        ({"workers": 2}, "had 0 workers when the checkpoint was saved, and has 2 now"),
    ],
)
def test_what_has_changed_since_the_checkpoint_is_said(now: dict[str, int], said: str) -> None:
    facts = source_facts(DataLoader(Samples(), 3), 4, 12, 1, False)
    saved = {"kind": "indices", "facts": facts, "of_samples": True}
    found = "\n".join(changes(saved, "indices", {**facts, **now}))
    assert said in found and bool(said) == bool(found)
