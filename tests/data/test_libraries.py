"""Loaders and datasets of other packages: resumed exactly where that is possible, and else what is not repeated is said.

webdataset and torchdata are the real ones. MosaicML's dataset is written here after its interface; the real one, LitData and
Hugging Face's are in `tests/interop/test_data_libraries.py`.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from data.resumed import Samples, Seen, check, run
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hookline.data.libraries import rank_conflict
from hookline.data.loaders import make_loaders
from hookline.data.sources import has_state, resume_limits, shards_itself
from hookline.util.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:WebDataset"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def files_are_closed() -> Iterator[None]:
    """webdataset leaves that to the garbage collector, which must not come to it in another test."""
    yield
    gc.collect()


def limits(source: Any) -> str:
    return "\n".join(resume_limits(make_loaders(source, 1.0, "train")[0]))


# ---- webdataset --------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / f"{shard}.tar") for shard in range(3)]
    for shard, name in enumerate(names):
        with wds.TarWriter(name) as writer:
            for index in range(shard * 4, shard * 4 + 4):
                writer.write({"__key__": f"{index:03d}", "id": index})
    return names


def sample(record: dict[str, Any]) -> Any:
    return Samples()[int(record["id"])]


def pipeline(shards: list[str], **options: Any) -> Any:
    return wds.WebDataset(shards, **{"shardshuffle": False, **options}).decode()


@pytest.mark.parametrize(
    "make",
    [
        lambda shards: pipeline(shards),
        lambda shards: pipeline(shards).shuffle(4, seed=3),
        lambda shards: pipeline(shards).shuffle(4, rng=random.Random(3)),
        lambda shards: pipeline(shards, shardshuffle=3),
        lambda shards: pipeline(shards, shardshuffle=3, detshuffle=True),
        lambda shards: wds.DataPipeline(
            wds.ResampledShards(shards, deterministic=True), wds.tarfile_to_samples(), wds.decode()
        ).with_epoch(12),
    ],
    ids=["plain", "seed", "rng", "unseeded shards", "detshuffle", "resampled"],
)
def test_a_webdataset_resumes_exactly_if_its_order_can_be_made_again(
    make: Any, shards: list[str], tmp_path: Path
) -> None:
    assert "without a seed" not in limits(make(shards))
    check(lambda: DataLoader(make(shards).compose(wds.map(sample)), 3), tmp_path, (3, 4, 6))


def test_a_webdataset_that_makes_its_own_batches_resumes_exactly(shards: list[str], tmp_path: Path) -> None:
    check(lambda: pipeline(shards).shuffle(4, rng=random.Random(3)).map(sample).batched(3), tmp_path, (3, 6))
    check(
        lambda: wds.WebLoader(pipeline(shards).shuffle(4, rng=random.Random(3)).map(sample), batch_size=3),
        tmp_path,
        (3, 6),
    )


def test_a_webdataset_that_shuffles_without_a_seed_is_said_to_when_the_run_begins(shards: list[str]) -> None:
    unseeded = pipeline(shards).shuffle(4)
    for source in (DataLoader(unseeded, 3), unseeded, wds.WebLoader(unseeded, batch_size=3)):
        assert (
            "shuffles with webdataset's .shuffle(4) without a seed. Each process draws a different order"
            in limits(source)
        )
    assert "webdataset's resampling, which is not seeded" in limits(
        DataLoader(pipeline(shards, resampled=True), 3)
    )
    assert limits(DataLoader(pipeline(shards).shuffle(4, seed=1), 3)) == ""


def test_a_webdataset_that_came_in_another_order_is_reported_at_the_resume(
    shards: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return DataLoader(pipeline(shards * 4).shuffle(48).map(sample), 3)

    run(make(), Seen(tmp_path, (2,)), 1, max_epochs=1, run_dir=tmp_path / "run")
    caplog.clear()
    run(make(), Seen(), 1, max_epochs=1, run_dir=tmp_path / "run", resume=tmp_path / "after-2")
    assert "without a seed" in caplog.text
    assert (
        "The train loader (DataLoader of WebDataset) did not deliver the expected batch: batch 2 of epoch 0"
        in caplog.text
    )
    assert "Seed its shuffle" in caplog.text


def test_a_webdataset_that_splits_itself_by_rank_is_not_split_again(shards: list[str]) -> None:
    assert shards_itself(DataLoader(pipeline(shards, nodesplitter=wds.split_by_node), 3))
    assert not shards_itself(DataLoader(pipeline(shards), 3))


# ---- torchdata ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"snapshot_every_n_steps": 2}, {"shuffle": False}],
    ids=["shuffled", "snapshots", "in order"],
)
def test_torchdatas_loader_resumes_exactly(
    options: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return StatefulDataLoader(Samples(noise="python torch"), 3, **{"shuffle": True, **options})

    check(make, tmp_path, (1, 3, 4, 6))
    assert not [each for each in caplog.messages if "its last state" not in each]


def test_torchdatas_loader_with_workers_resumes_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(lambda: StatefulDataLoader(Samples(), 3, shuffle=True, num_workers=2), tmp_path, (3,), max_epochs=2)
    assert (
        "It restores the order of samples, but not the random numbers that a dataset draws in its workers"
        in caplog.text
    )
    assert "does not advance" not in caplog.text


def test_a_stateful_loader_with_another_number_of_workers_is_refused_with_the_right_number(
    tmp_path: Path,
) -> None:
    run(StatefulDataLoader(Samples(), 3), Seen(tmp_path, (2,)), 1, max_epochs=1)
    other = StatefulDataLoader(Samples(), 3, num_workers=1)
    with pytest.raises(CheckpointError, match=r"had 0 workers .* and has 1 now\. .* pass num_workers=0"):
        run(other, Seen(), 1, max_epochs=1, resume=tmp_path / "after-2")


def test_a_stateful_loader_with_another_batch_size_continues_with_the_next_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, rest = Seen(tmp_path, (2,)), Seen()
    run(StatefulDataLoader(Samples(), 3), whole, 1, max_epochs=1)
    run(StatefulDataLoader(Samples(), 2), rest, 1, max_epochs=2, resume=tmp_path / "after-2")
    numbers = [round(row[0] * 12) for batch in rest.batches for row in batch]
    assert numbers == [*range(6, 12), *range(12)]
    assert "has batches of 2 now. The epoch continues where its state says." in caplog.text
    assert "order is different" not in caplog.text


class AtEpochEnd(Seen):
    def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
        assert self.folder is not None
        trainer.save_checkpoint(self.folder / f"end-{epoch}")


def test_torchdatas_loader_begins_a_new_pass_after_an_epoch_that_a_limit_cut_short(tmp_path: Path) -> None:
    def make() -> Any:
        return StatefulDataLoader(Samples(), 3, shuffle=True)

    whole, rest = AtEpochEnd(tmp_path), Seen()
    run(make(), whole, 1, limit_train_batches=3)
    run(make(), rest, 9, limit_train_batches=3, resume=tmp_path / "end-0")
    assert rest.batches == whole.batches[3:] and len(rest.batches) == 6


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}], ids=["whole epochs", "cut short"])
def test_torchdatas_generator_continues_after_a_resume_also_in_later_epochs(
    options: Any, tmp_path: Path
) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        return StatefulDataLoader(Samples(), 3, shuffle=True, generator=generator)

    whole = AtEpochEnd(tmp_path, (1, 3, 5))
    expected = run(make(), whole, 1, **options)
    per_epoch = len(whole.batches) // 3
    cuts = {"after-1": 1, "after-3": 3, "after-5": 5, "end-0": per_epoch, "end-1": 2 * per_epoch}
    for name, cut in cuts.items():
        rest = Seen()
        ended = run(make(), rest, 100, resume=tmp_path / name, **options)
        assert rest.batches == whole.batches[cut:], name
        assert all(torch.equal(value, ended[key]) for key, value in expected.items()), name
    assert limits(make()) == ""


# ---- MosaicML ----------------------------------------------------------------------------------------------------


class Streaming(IterableDataset[Any]):
    """As `streaming.StreamingDataset`: counts its epochs, and makes its state from what it is told was read."""

    def __init__(self) -> None:
        self.next_epoch = 0
        self.resume: dict[str, Any] | None = None

    def __len__(self) -> int:
        return 12

    def _resume(self, epoch: int) -> tuple[int, int]:
        if self.resume is None or self.resume["epoch"] < epoch:
            return epoch, 0
        return self.resume["epoch"], self.resume["sample_in_epoch"]

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self._resume(self.next_epoch)
        self.next_epoch = epoch + 1
        order = random.Random(epoch).sample(range(12), 12)
        yield from (Samples()[index] for index in order[first:])

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        epoch, offset = self._resume(self.next_epoch - 1)
        return {"epoch": epoch, "sample_in_epoch": num_samples if from_beginning else offset + num_samples}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        self.resume = obj


class StreamingLoader(DataLoader[Any]):
    """As `streaming.StreamingDataLoader`: counts what it yields."""

    num_samples_yielded = 0

    def __iter__(self) -> Any:
        self.num_samples_yielded = 0
        for batch in super().__iter__():
            self.num_samples_yielded += len(batch[0])
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict(self.num_samples_yielded, False)  # type: ignore[attr-defined,no-any-return]

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        self.dataset.load_state_dict(obj)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [DataLoader, StreamingLoader])
@pytest.mark.parametrize("limit", [1.0, 3])
def test_a_state_made_from_the_number_of_samples_resumes_exactly(
    kind: Any, limit: float, tmp_path: Path
) -> None:
    whole = AtEpochEnd(tmp_path, (1, 2, 3, 4, 6))
    expected = run(kind(Streaming(), batch_size=3), whole, 1, limit_train_batches=limit)
    per_epoch = len(whole.batches) // 3
    for name, cut in [
        *((f"after-{cut}", cut) for cut in whole.cuts),
        ("end-0", per_epoch),
        ("end-1", 2 * per_epoch),
    ]:
        rest = Seen()
        ended = run(
            kind(Streaming(), batch_size=3),
            rest,
            100 + cut,
            limit_train_batches=limit,
            resume=tmp_path / name,
        )
        assert rest.batches == whole.batches[cut:], name
        assert all(torch.equal(value, ended[key]) for key, value in expected.items()), name


def test_a_state_made_from_the_number_of_samples_counts_those_of_all_ranks() -> None:
    source = DataLoader(Streaming(), 3)
    assert shards_itself(source) and not has_state(source.dataset)
    assert limits(source) == ""


def test_a_batch_size_that_differs_from_that_of_mosaicmls_dataset_is_said() -> None:
    dataset = Streaming()
    dataset.batch_size = 4  # type: ignore[attr-defined]
    assert "reads batches of 3 from MosaicML's StreamingDataset(batch_size=4)" in limits(
        DataLoader(dataset, 3)
    )


# ---- ranks -------------------------------------------------------------------------------------------------------


def test_a_webdataset_that_refuses_several_ranks_is_refused_before_the_first_step(shards: list[str]) -> None:
    assert "Pass WebDataset(..., nodesplitter=wds.split_by_node)" in rank_conflict(
        DataLoader(pipeline(shards), 3), 1, 2
    )
    assert rank_conflict(DataLoader(pipeline(shards, nodesplitter=wds.split_by_node), 3), 1, 2) == ""


def test_a_dataset_that_was_made_for_another_rank_is_refused() -> None:
    class World:
        rank, num_ranks = 0, 2

    dataset = Streaming()
    dataset._unique_rank_world = World()  # type: ignore[attr-defined]
    assert rank_conflict(DataLoader(dataset, 3), 0, 2) == ""
    assert (
        "MosaicML's StreamingDataset reads the part of rank 0 of 2 on rank 1 of 2, so that ranks would train on the same "
        "samples." in rank_conflict(DataLoader(dataset, 3), 1, 2)
    )
