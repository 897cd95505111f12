"""One order dealt out to ranks: nothing is lost or comes twice, whatever the numbers, and however often they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data.resumed import Samples, Seen, run
from distributed.threads import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from hookline.data.loaders import Loader
from hookline.data.sharding import (
    RankBatch,
    RankSharding,
    ShardPlan,
    compare_sources,
    rank_batches,
    shard_plan_for,
)
from hookline.data.sources import shards_itself
from hookline.distributed.comm import Ranks

small = st.integers(1, 5)


def dealt(
    n: int, world: int, size: int, of_samples: bool, first: int = 0
) -> list[list[tuple[list[int], RankBatch]]]:
    """What each rank gets of the numbers from `first` to `n`, with what it is told of every turn."""
    hands = []
    for rank in range(world):
        shard_plan = ShardPlan(rank, world, size if of_samples else 1, of_samples, False)
        hand = []
        for number, mine in enumerate(
            shard_plan.samples(range(first, n), 0) if of_samples else shard_plan.batches(range(first, n), 0)
        ):
            turn = RankBatch()
            shard_plan.describe(number, turn)
            hand.append((mine if of_samples else [mine], turn))  # type: ignore[list-item]
        hands.append(hand)
    return hands


@given(st.integers(1, 40), small, small, st.booleans())
def test_the_real_ones_of_all_ranks_are_the_order(n: int, world: int, size: int, of_samples: bool) -> None:
    hands = dealt(n, world, size, of_samples)
    assert len({len(hand) for hand in hands}) == 1, "every rank has as many turns"
    per_turn = world * (size if of_samples else 1)
    for number, turn in enumerate(zip(*hands, strict=True)):
        real = [unit for units, said in turn if not said.is_padding for unit in units]
        assert sorted(real) == list(range(number * per_turn, min(n, (number + 1) * per_turn)))
        assert all(units for units, _ in turn), "a ghost has something to run on"
        assert sum(said.factor for _, said in turn) == pytest.approx(world), (
            "the mean over ranks is the mean over samples"
        )
        assert all(said.factor == 0 for _, said in turn if said.is_padding)


@given(st.integers(1, 40), st.lists(st.tuples(small, small, st.integers(0, 3)), min_size=1, max_size=4))
def test_an_epoch_may_change_hands_between_other_numbers_of_ranks(
    n: int, stations: list[tuple[int, int, int]]
) -> None:
    seen: list[int] = []
    for world, size, turns in [*stations, (1, 1, n)]:
        hands = dealt(n, world, size, True, first=len(seen))
        for turn in list(zip(*hands, strict=True))[:turns]:
            seen += sorted(unit for units, said in turn if not said.is_padding for unit in units)
    assert seen == list(range(n))


@given(st.integers(1, 40), small, small, st.booleans(), st.booleans())
def test_the_length_is_known_before(n: int, world: int, size: int, drop_last: bool, trains: bool) -> None:
    loader: Any = DataLoader(Samples(n), size, drop_last=drop_last)
    for rank in range(world):
        share = RankSharding(Ranks(rank, 0, world, group=object()), trains=trains)
        made = Loader("x", loader, None, sharding=share)
        counted = sum(1 for _ in made.reader.open(0, 0, 0, None, None))
        assert counted == rank_batches(loader, shard_plan_for(loader, share), trains)


class Own(Dataset[Any]):
    shards_itself = True

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def test_who_shards_itself_is_left_alone() -> None:
    data = Samples(4)
    assert shards_itself(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    assert shards_itself(DataLoader(Own()))
    assert not shards_itself(DataLoader(data, sampler=RandomSampler(data)))
    assert not shards_itself(DataLoader(data, sampler=SequentialSampler(data), num_workers=0))
    marked: Any = DataLoader(data)
    marked.shards_itself = True
    assert shards_itself(marked)


# ---- on one process ----------------------------------------------------------------------------------------------


def samples_of(seen: Seen, batches: slice = slice(None)) -> list[int]:
    return [round(x[0] * 12) for batch in seen.batches[batches] for x in batch]


@pytest.mark.parametrize("size", [1, 2, 4, 5, 12])
@pytest.mark.parametrize("mixed", [False, True])
def test_with_batches_of_another_size_a_resumed_epoch_continues_with_the_next_sample(
    size: int, mixed: bool, tmp_path: Path
) -> None:
    def make(size: int) -> Any:
        loader: Any = DataLoader(Samples(), size, shuffle=True)
        return {"web": loader, "more": DataLoader(Samples(3), 1)} if mixed else loader

    whole, rest = Seen(tmp_path, (3,)), Seen()
    run(make(3), whole, 1, max_epochs=1)
    run(make(size), rest, 1, resume=tmp_path / "after-3", max_epochs=1)
    assert sorted(samples_of(whole, slice(3)) + samples_of(rest)) == sorted(samples_of(whole))
    again = Seen()
    run(make(size), again, 1, resume=tmp_path / "after-3", max_epochs=2)
    assert sorted(samples_of(again, slice(len(rest.batches), None))) == sorted(samples_of(whole)), (
        "the next epoch is a whole one"
    )


def test_a_loader_that_accelerate_has_prepared_is_resumed(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def make() -> Any:
        return accelerator.prepare_data_loader(DataLoader(Samples(), 3, shuffle=True), device_placement=False)

    whole, rest = Seen(tmp_path, (2,)), Seen()
    run(make(), whole, 1, max_epochs=2)
    run(make(), rest, 1, resume=tmp_path / "after-2", max_epochs=2)
    assert rest.batches == whole.batches[2:]


# ---- sources that differ between ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a shard for each rank", "random_split", "other tensors", "the same"])
def test_datasets_of_equal_length_that_differ_between_ranks_are_reported(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    def dataset(rank: int) -> Any:
        whole = TensorDataset(torch.arange(16.0) + (rank if how == "other tensors" else 0))
        if how == "a shard for each rank":
            return Subset(whole, range(rank, 16, 2))
        seed = rank if how == "random_split" else 0
        return random_split(whole, [8, 8], generator=torch.Generator().manual_seed(seed))[0]

    def compare(ranks: Ranks) -> list[int | None]:
        source = DataLoader(dataset(ranks.rank), 2)
        return compare_sources(ranks, "train", source, {}, len(source), False, [])

    assert on_ranks(2, compare) == [[4, 4], [4, 4]]
    assert caplog.text.count("is shared by all ranks, but its dataset differs.") == (how != "the same")
