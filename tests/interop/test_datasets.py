"""Hugging Face datasets in one process: how they are read. `test_data_libraries.py` kills and resumes runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from data.resumed import Seen, check, run
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset

from hookline.data.loaders import make_loaders
from hookline.data.sources import resume_limits, shards_itself


def rows(count: int = 12) -> Any:
    return Dataset.from_dict({"index": list(range(count))})


def stream(count: int = 12) -> Any:
    return rows(count).to_iterable_dataset(num_shards=2)


def collate(samples: list[dict[str, int]]) -> Any:
    inputs = torch.stack([torch.full((4,), each["index"] / 12) for each in samples])
    return inputs, inputs[:, :2] * 2


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 3, collate_fn=collate, **options)


def limits(source: Any) -> str:
    return "\n".join(resume_limits(make_loaders(source, 1.0, "train")[0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(rows(), shuffle=True),
        lambda: loader(stream()),
        lambda: loader(stream().shuffle(seed=1, buffer_size=1)),
    ],
    ids=["rows", "stream", "shuffled shards"],
)
def test_rows_and_streams_without_a_buffer_resume_exactly(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(make, tmp_path, (1, 3, 4, 6))
    assert "does not advance" not in caplog.text
    assert limits(make()) == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_seeded_shuffle_buffer_is_filled_again_exactly(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(
        lambda: loader(stream().shuffle(seed=1, buffer_size=4), num_workers=workers),
        tmp_path,
        (3,),
        max_epochs=2,
    )
    assert "3 batches were read again" in caplog.text


def test_a_checkpoint_of_a_stream_that_was_read_by_its_state_can_be_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Older versions read a stream with a shuffle buffer by its state."""
    whole = Seen(tmp_path, (3,))
    run(loader(stream()), whole, 1, max_epochs=1)
    rest = Seen()
    run(loader(stream().shuffle(seed=1, buffer_size=4)), rest, 1, max_epochs=1, resume=tmp_path / "after-3")
    assert "was read by its state when the checkpoint was saved, and is now read by its stream" in caplog.text
    assert len(rest.batches) == 1


def test_a_shuffle_without_a_seed_is_said() -> None:
    said = "shuffles a Hugging Face stream without a seed"
    assert said in limits(loader(stream().shuffle(buffer_size=4)))
    assert said in limits(loader(stream().shuffle(buffer_size=4).map(lambda row: row), num_workers=1))
    assert said not in limits(loader(stream().shuffle(seed=2**32, buffer_size=4)))


def test_interleaved_streams_without_a_seed_are_said() -> None:
    """Each process picks from the streams in another order, so that a seeded shuffle buffer cannot be filled again."""
    said = "interleaves Hugging Face streams without a seed"
    streams = [stream(), stream().shuffle(seed=1, buffer_size=4)]
    assert said in limits(loader(interleave_datasets(streams, probabilities=[0.5, 0.5]).take(5)))
    assert limits(loader(interleave_datasets(streams, probabilities=[0.5, 0.5], seed=1))) == ""
    assert limits(loader(interleave_datasets(streams))) == ""  # takes turns


class Own(IterableDataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner, self.name = inner, "own"

    def __iter__(self) -> Any:
        yield from self.inner


def test_a_shuffle_without_a_seed_is_said_of_a_stream_in_a_dataset_of_the_user() -> None:
    said = "shuffles a Hugging Face stream without a seed"
    assert said in limits(loader(Own(stream().shuffle(buffer_size=4))))
    assert limits(loader(Own(stream().shuffle(seed=1, buffer_size=4)))) == ""


def test_a_stream_that_is_split_by_rank_is_not_split_again() -> None:
    assert shards_itself(loader(split_dataset_by_node(stream(), 0, 2)))
    assert not shards_itself(loader(stream()))


TABLE = {
    "vector": [[float(row), row / 3] for row in range(10)],
    "number": list(range(10)),
    "flag": [row % 3 == 0 for row in range(10)],
    "image": [[[row, row + 1], [2, 3]] for row in range(10)],
}


@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        {**TABLE, "text": [str(row) for row in range(10)]},
        {"ragged": [[1.0] * (1 + row % 2) for row in range(10)]},
    ],
    ids=["tensors", "texts", "ragged"],
)
@pytest.mark.parametrize(
    "view",
    [lambda each: each, lambda each: each.select([5, 3, 9, 0]), lambda each: each.shuffle(seed=1)],
    ids=["all", "selected", "shuffled"],
)
def test_a_dataset_in_torch_format_gives_the_batches_of_the_loader(table: dict[str, Any], view: Any) -> None:
    dataset = view(Dataset.from_dict(table).with_format("torch"))
    source = DataLoader(dataset, 1 if "ragged" in table else 3)
    read = list(make_loaders(source, 1.0, "train")[0].open(0))
    expected = list(source)
    assert len(read) == len(expected) > 0
    for own, theirs in zip(read, expected, strict=True):
        assert type(own) is type(theirs) and list(own) == list(theirs)
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert (
                    torch.equal(own[name], value)
                    and own[name].dtype == value.dtype
                    and own[name].stride() == value.stride()
                )
            else:
                assert own[name] == value


def test_a_dataset_in_torch_format_is_read_by_batches_and_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = Dataset.from_dict(TABLE).with_format("torch")
    loader = make_loaders(DataLoader(dataset, 4), 1.0, "train")[0]
    monkeypatch.setattr(
        Dataset, "__getitems__", lambda self, keys: pytest.fail("the loader took a batch apart")
    )
    assert [len(batch["number"]) for batch in loader.open(0)] == [4, 4, 2]


def test_a_list_of_samples_is_read_in_a_process_that_has_imported_datasets() -> None:
    """A list, unlike a Dataset, has no __dict__ in which methods could be replaced."""
    source = make_loaders(DataLoader([{"index": row} for row in range(4)], 2), 1.0, "train")[0]  # type: ignore[arg-type]
    assert [batch["index"].tolist() for batch in source.open(0)] == [[0, 1], [2, 3]]
