"""Loaders: what counts as one, what it is called, how much of it is used."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookline import Hook, OptionError
from hookline.data.loaders import apply_limit, make_loaders


class Endless:
    """A stream: no length, a new pass each time."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        while True:
            yield from batches(2)


def names(given: Any) -> list[str]:
    return [loader.name for loader in make_loaders(given, 1.0, "val")]


def loader(n: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(n))), batch_size=1)


def test_nothing_is_no_loader() -> None:
    assert make_loaders(None, 1.0, "val") == []


def test_one_loader_is_named_after_its_kind_several_by_number_or_by_their_keys() -> None:
    assert names(loader()) == ["val"]
    assert names([loader()]) == ["val"]
    assert names([loader(), loader()]) == ["dl0", "dl1"]
    assert names((loader(), loader())) == ["dl0", "dl1"]
    assert names({"easy": loader(), "hard": loader()}) == ["easy", "hard"]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(1), torch.zeros(1)),
        [torch.zeros(1)],
        {"x": torch.zeros(1)},
        torch.zeros(2, 2),
        "text",
        np.zeros((2, 2)),
        collections.UserDict(x=torch.zeros(1)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_list_of_batches_is_one_loader_whatever_a_batch_is(batch: Any) -> None:
    (only,) = make_loaders([batch, batch, batch], 1.0, "train")
    assert (only.name, only.length) == ("train", 3)
    assert [each is batch for each in only.batches(0)] == [True] * 3


def test_what_cannot_be_iterated_over_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="The val loader 'hard' is a int, which cannot be iterated over"):
        make_loaders({"easy": loader(), "hard": 5}, 1.0, "val")


@pytest.mark.parametrize("rows", [torch.zeros(6, 4), torch.zeros(6, 4).numpy()])
def test_rows_of_one_tensor_are_not_taken_for_batches(rows: Any) -> None:
    with pytest.raises(OptionError, match=r"each row would be a batch. Pass DataLoader\(TensorDataset\(inp"):
        make_loaders(rows, 1.0, "predict")


def test_a_source_with_getitem_is_enough() -> None:
    class Squares:
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise IndexError
            return index * index

    (only,) = make_loaders(Squares(), 1.0, "predict")
    assert only.length is None and list(only.batches(0)) == [0, 1, 4]


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [
        (10, 1.0, 10),
        (10, 1, 1),
        (10, 3, 3),
        (10, 30, 10),
        (10, 0, 0),
        (10, 0.0, 0),
        (10, 0.25, 2),
        (None, 5, 5),
        (None, 1.0, None),
    ],
)
def test_a_limit_is_a_number_of_batches_or_a_fraction(
    length: int | None, limit: float, expected: int | None
) -> None:
    assert apply_limit(length, limit, "train") == expected


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(OptionError, match="limit_train_batches=0.5: a fraction needs a loader with a length"):
        make_loaders(Endless(), 0.5, "train")


def test_a_loader_whose_length_is_not_known_has_none() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(batches(2))

    (only,) = make_loaders(DataLoader(Stream(), batch_size=None), 1.0, "train")
    assert only.length is None and len(list(only.batches(0))) == 2


def test_a_pass_can_begin_in_the_middle_and_never_exceeds_the_limit() -> None:
    (only,) = make_loaders(list("abcdef"), 4, "train")
    assert list(only.batches(0)) == list("abcd")
    assert list(only.open(0, 3)) == ["d"]
    assert list(only.open(0, 4)) == []


def test_limiting_takes_no_batch_more_than_needed() -> None:
    drawn = []

    class Counted:
        def __iter__(self) -> Iterator[int]:
            for index in range(100):
                drawn.append(index)
                yield index

    (only,) = make_loaders(Counted(), 3, "train")
    assert list(only.batches(0)) == drawn == [0, 1, 2]


@pytest.mark.parametrize("where", ["sampler", "batch_sampler"])
def test_samplers_that_shuffle_by_epoch_are_told_the_epoch(where: str) -> None:
    class Sampler:
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Source(list[Any]):
        pass

    source = Source(batches(1))
    sampler = Sampler()
    sampler.epochs = []
    setattr(source, where, sampler)
    quiet(max_epochs=3).fit(Net(), source)
    assert sampler.epochs == [0, 1, 2]


def test_an_endless_stream_trains_for_max_steps() -> None:
    trainer = quiet(max_epochs=None, max_steps=5)
    source = Endless()
    trainer.fit(Net(), source)
    assert (trainer.global_step, source.passes) == (5, 1)


def test_an_endless_stream_with_a_limit_has_epochs() -> None:
    trainer = quiet(max_epochs=3, limit_train_batches=2)
    source = Endless()
    trainer.fit(Net(), source)
    assert (trainer.global_step, source.passes) == (6, 3)


def test_a_limit_beyond_a_stream_that_ends_early_still_ends_epochs() -> None:
    class Short:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches(3))

    trainer = quiet(max_epochs=2, limit_train_batches=10, accumulate_grad_batches=2)
    trainer.fit(Net(), Short())
    assert (trainer.state.epochs_seen, trainer.state.batches_seen, trainer.global_step) == (2, 6, 4)


def test_a_used_up_generator_is_an_error_that_says_why() -> None:
    with pytest.raises(
        OptionError, match="yielded no batch in epoch 1; a generator can be iterated over only once"
    ):
        quiet(max_epochs=2).fit(Net(), (each for each in batches(2)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hook_that_asks_for_them_gets_the_indices_of_each_batch(workers: int) -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_validation_batch_end(self, batch: Any, sample_ids: Any) -> None:
            self.seen.append((sample_ids, batch[0][:, 0].tolist()))

        on_test_batch_end = on_validation_batch_end

    data = TensorDataset(torch.arange(7.0).unsqueeze(1).expand(7, 4), torch.zeros(7, 2))
    looks, source = Looks(), DataLoader(data, 3, shuffle=True, num_workers=workers)
    quiet(hooks=[looks]).fit(Net(), batches(1), source)
    assert len(looks.seen) == 3 and all(indices == values for indices, values in looks.seen)
    assert sorted(each for indices, _ in looks.seen for each in indices) == [*range(7)]
    looks.seen = []
    quiet(hooks=[looks]).test(Net(), DataLoader(data, 3))
    quiet(hooks=[looks]).test(Net(), batches(2))
    assert [indices for indices, _ in looks.seen] == [[0, 1, 2], [3, 4, 5], [6], None, None]


def test_indices_that_no_hook_asks_for_are_not_kept_and_those_of_past_batches_are_forgotten() -> None:
    source = DataLoader(TensorDataset(torch.zeros(100, 4)), 2)
    (loader,) = make_loaders(source, 1.0, "val")
    for _ in loader.open(0):
        assert loader.sample_ids(0) is None
    loader.keeps_indices = True
    for number, _ in enumerate(loader.open(0)):
        assert loader.sample_ids(number) == [2 * number, 2 * number + 1]
        assert len(loader.reader.order.kept) == 1  # type: ignore[attr-defined]
