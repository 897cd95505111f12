"""A run that was cut in two sees the same batches and ends with the same weights, whatever loader the user brought."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.resumed import Samples, Seen, check, run
from tiny import shown
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from hookline.data.loaders import make_loaders
from hookline.data.sources import resume_limits

CUTS = (3, 4, 6)  # four batches an epoch: in the middle, after the last one, and in the middle of the second
ALL = "python numpy torch"
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def loader(workers: int = 0, noise: str = "", **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Samples(noise=noise), **{"batch_size": 3, "num_workers": workers, "shuffle": True, **options}
    )


# ---- datasets with indices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"shuffle": True},
        {"drop_last": True, "batch_size": 5},
        {"batch_size": None},
        {"shuffle": None, "sampler": WeightedRandomSampler([0.1, 0.9] * 6, 12)},
        {"shuffle": None, "sampler": range(11, -1, -1)},
        {
            "shuffle": None,
            "batch_size": 1,
            "batch_sampler": BatchSampler(RandomSampler(range(12), replacement=True), 3, False),
        },
    ],
    ids=shown,
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_workers_augmentation_and_dropout_share_the_users_streams(
    options: Any, accumulate: int, tmp_path: Path
) -> None:
    check(lambda: loader(noise=ALL, **options), tmp_path, (1, 2, 4, 5), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("persistent", [False, True])
def test_with_another_number_of_workers_every_sample_is_augmented_alike(
    before: int, after: int, persistent: bool, tmp_path: Path
) -> None:
    def make(workers: int) -> Any:
        return loader(workers, ALL, persistent_workers=persistent)

    whole = check(lambda: make(before), tmp_path, (3, 6), lambda: make(after), max_epochs=2)
    first, second = sorted(sum(whole.batches[:4], [])), sorted(sum(whole.batches[4:], []))
    assert [round(x[0] * 12) for x in first] == [round(x[0] * 12) for x in second] == list(range(12))
    assert len({x[column] for x in first + second for column in (1, 2, 3)}) > 60, (
        "augmented anew in every epoch"
    )


def test_nothing_is_read_again_and_the_users_loader_is_not_touched(tmp_path: Path) -> None:
    check(loader, tmp_path, (6,))
    again = loader()
    before = dict(vars(again))
    run(again, Seen(), 5, resume=tmp_path / "after-6")
    assert vars(again) == before
    assert len(again.dataset.reads) == 6 * 3  # type: ignore[attr-defined]


class Wandering(Sampler[int]):
    """Draws from the global streams as it goes, in all three ways."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield (random.randrange(12) + int(np.random.randint(12)) + int(torch.randint(12, ()))) % 12

    def __len__(self) -> int:
        return 12


class OwnRandom(Wandering):
    """Has generators of its own, which continue from epoch to epoch."""

    def __init__(self) -> None:
        self.python, self.numpy, self.legacy = (
            random.Random(1),
            np.random.default_rng(1),
            np.random.RandomState(1),
        )

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield (
                self.python.randrange(12) + int(self.numpy.integers(12)) + int(self.legacy.randint(12))
            ) % 12


@pytest.mark.parametrize("sampler", [Wandering, OwnRandom])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_as_it_goes_continues(
    sampler: type[Sampler[int]], workers: int, tmp_path: Path
) -> None:
    def make(workers: int) -> Any:
        return loader(workers, shuffle=None, sampler=sampler())

    check(lambda: make(workers), tmp_path, (3, 5), lambda: make(workers and 3), max_epochs=2)


class ByHand(DataLoader[Any]):
    """A loader with an `__iter__` of its own; `twice` yields every batch two times."""

    twice = False

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            if self.twice:
                yield batch

    def __len__(self) -> int:
        return super().__len__() * (1 + self.twice)


class Twice(ByHand):
    twice = True


@pytest.mark.parametrize("kind", [ByHand, Twice])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_its_own_iter_keeps_working(kind: type[ByHand], workers: int, tmp_path: Path) -> None:
    check(lambda: kind(Samples(), 3, shuffle=True, num_workers=workers), tmp_path, (3, 7), max_epochs=2)


class AtOnce(Samples):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def test_a_batch_that_is_read_at_once_is_keyed_too(tmp_path: Path) -> None:
    def make(workers: int) -> Any:
        return DataLoader(AtOnce(noise=ALL), 3, shuffle=True, num_workers=workers)

    check(lambda: make(1), tmp_path, (3,), lambda: make(2), max_epochs=2)


# ---- things with a state of their own ----------------------------------------------------------------------------


class Stateful(IterableDataset[Any]):
    """Says where it is; after a state was loaded the next pass continues from there, and from a finished one yields nothing."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 12:
            self.at += 1
            self.read += 1
            yield Samples()[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulLoader:
    """The same as a loader, which continues after `load_state_dict` as torchdata's does."""

    def __init__(self) -> None:
        self.data = Stateful()

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.data, 3))

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state)


class StatefulSampler(Sampler[int]):
    """Goes on after `load_state_dict`; a finished one stays finished for one more pass."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.passes = 0
        self.loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.passes += 1
            self.left = [(index * 5 + self.passes) % 12 for index in range(12)]
        self.loaded = False
        while self.left:
            yield self.left.pop(0)

    def __len__(self) -> int:
        return 12

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.passes, self.loaded = list(state["left"]), state["passes"], True


@pytest.mark.parametrize(
    "make",
    [
        StatefulLoader,
        lambda: DataLoader(Stateful(), 3),
        lambda: loader(shuffle=None, sampler=StatefulSampler()),
        lambda: loader(2, shuffle=None, sampler=StatefulSampler()),
    ],
    ids=["loader", "dataset", "sampler", "sampler with workers"],
)
def test_what_has_a_state_is_used_through_it(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(make, tmp_path, CUTS)
    assert "read again" not in caplog.text and "does not advance" not in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        StatefulLoader,
        lambda: DataLoader(Stateful(), 3),
        lambda: loader(shuffle=None, sampler=StatefulSampler()),
    ],
)
def test_a_state_of_an_epochs_end_makes_no_epoch_empty(make: Any, tmp_path: Path) -> None:
    class AtEpochEnd(Seen):
        def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
            if epoch == 0:
                trainer.save_checkpoint(tmp_path / "c")

    whole = AtEpochEnd()
    expected = run(make(), whole, 1)
    rest = Seen()
    ended = run(make(), rest, 9, resume=tmp_path / "c")
    assert rest.batches == whole.batches[4:] and len(rest.batches) == 8
    assert torch.equal(ended["layer.weight"], expected["layer.weight"])


# ---- states that do not say where they are -----------------------------------------------------------------------


class StuckLoader:
    """Reports the same position however far it was read."""

    def __init__(self) -> None:
        self.data = Samples()

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.data, 3))

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StuckDataset(StuckLoader, IterableDataset[Any]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(12))

    def __len__(self) -> int:
        return 12


class StuckSampler(StatefulSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([(index * 5 + 1) % 12 for index in range(12)])

    def state_dict(self) -> dict[str, Any]:
        return {"seed": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


STUCK = [
    StuckLoader,
    lambda: DataLoader(StuckDataset(), 3),
    lambda: loader(shuffle=None, sampler=StuckSampler()),
    lambda: loader(2, shuffle=None, sampler=StuckSampler()),
]


@pytest.mark.parametrize("make", STUCK, ids=["loader", "dataset", "sampler", "sampler with workers"])
def test_a_state_that_does_not_advance_is_not_relied_on(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(make, tmp_path, (3, 4, 5, 6))
    assert ".state_dict() does not advance: at batch 3 it is the same as at batch 1" in caplog.text


def test_a_state_that_has_not_advanced_after_one_batch_is_not_relied_on(tmp_path: Path) -> None:
    check(StuckLoader, tmp_path, (1, 2), max_epochs=1)


def test_a_run_whose_loader_does_not_advance_is_resumed_again_and_again(tmp_path: Path) -> None:
    whole, second, third = Seen(tmp_path, (1,)), Seen(tmp_path, (2,)), Seen()
    run(StuckLoader(), whole, 1, max_epochs=1)
    run(StuckLoader(), second, 2, max_epochs=1, resume=tmp_path / "after-1")
    run(StuckLoader(), third, 3, max_epochs=1, resume=tmp_path / "after-2")
    assert third.batches == whole.batches[2:] == second.batches[1:]


def test_a_pass_that_begins_where_the_last_one_was_left_is_not_taken_for_one_that_stands_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lazy(StatefulLoader):
        """Is put back to its beginning when the first batch is asked for."""

        def __iter__(self) -> Iterator[Any]:
            if self.data.at >= 9:
                self.data.at = 0
            yield from super().__iter__()

    check(Lazy, tmp_path, (3, 6), limit_train_batches=3)
    assert "does not advance" not in caplog.text


class WantsMore(StuckLoader):
    def state_dict(self, samples: int) -> dict[str, Any]:  # type: ignore[override]
        return {"at": samples}


def test_a_state_that_needs_arguments_is_not_used_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(WantsMore, tmp_path, (3, 5))
    said = "has a state that is not used, because WantsMore.state_dict or load_state_dict needs further arguments (samples)"
    assert said in caplog.text


# ---- streams -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Shuffles and augments as it goes, from the global streams."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        own = list(range(12))[info.id :: info.num_workers] if info else list(range(12))
        random.shuffle(own)
        for index in own:
            yield Samples(noise=ALL)[index]


class Iterable:
    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Stream(), 3))


def generator_of_batches() -> Iterator[Any]:
    while True:
        yield torch.rand(3, 4), torch.rand(3, 2)


@pytest.mark.parametrize(
    "make",
    [lambda: DataLoader(Stream(), 3), lambda: DataLoader(Stream(), 3, num_workers=2), Iterable],
    ids=["dataset", "workers", "iterable"],
)
def test_a_stream_is_read_again_and_the_user_is_told(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(make, tmp_path, (3, 5), max_epochs=2)
    assert "To continue at the saved position, 3 batches were read again, which took" in caplog.text


def test_a_new_generator_is_read_again(tmp_path: Path) -> None:
    check(generator_of_batches, tmp_path, (3,), max_epochs=1, limit_train_batches=5)


# ---- what is said ------------------------------------------------------------------------------------------------


def limits(source: Any) -> str:
    return "\n".join(resume_limits(make_loaders(source, 1.0, "train")[0]))


def test_what_cannot_be_resumed_exactly_is_said() -> None:
    class Own(Samples):
        rng: Any = None

    own = Own()
    own.rng = random.Random(1)
    assert "is a generator, which can be iterated over only once" in limits(generator_of_batches())
    assert "reads Stream with 2 workers" in limits(DataLoader(Stream(), 3, num_workers=2))
    assert "has persistent_workers" in limits(DataLoader(Stream(), 3, num_workers=2, persistent_workers=True))
    assert "has in_order=False" in limits(loader(2, in_order=False))
    assert "a random generator in dataset.rng, which each of the 2" in limits(
        DataLoader(own, 3, num_workers=2)
    )
    for fine in (
        loader(),
        loader(2),
        DataLoader(own, 3),
        DataLoader(Stream(), 3),
        StatefulLoader(),
        Iterable(),
    ):
        assert limits(fine) == ""


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (
            lambda: loader(batch_size=4),
            "had batches of 3 when the checkpoint was saved, and has batches of 4 now",
        ),
        (
            lambda: DataLoader(Samples(15), 3, shuffle=True),
            "had 4 batches when the checkpoint was saved, and has 5 now",
        ),
        (
            lambda: loader(1),
            "had 0 workers when the checkpoint was saved, and has 1 now: the random numbers that the dataset draws",
        ),
        (Iterable, "was read by its indices when the checkpoint was saved, and is now read by its stream"),
    ],
)
def test_another_loader_than_before_is_said(
    after: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(loader(), Seen(tmp_path, (2,)), 1, max_epochs=1)
    with caplog.at_level(logging.WARNING, "hookline"):
        run(after(), Seen(), 1, max_epochs=1, resume=tmp_path / "after-2")
    assert said in caplog.text


def test_the_same_loader_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(lambda: loader(2, ALL), tmp_path, (3,), lambda: loader(3, ALL), max_epochs=1)
    assert not [each for each in caplog.messages if "its last state" not in each]


# ---- whose random streams ----------------------------------------------------------------------------------------


def streams() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]


@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda: loader(2, ALL),
        lambda: loader(shuffle=None, sampler=Wandering()),
        lambda: DataLoader(Stream(), 3),
        Iterable,
    ],
)
def test_reading_does_not_move_the_main_streams(make: Any) -> None:
    (only,) = make_loaders(make(), 1.0, "train")
    before = streams()
    assert len(list(only.open(0, 1, seed=5))) == 3
    assert streams() == before


def order(batches: Iterator[Any]) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)])
def test_every_evaluation_sees_the_same_order_and_leaves_no_trace(generator: Any) -> None:
    (only,) = make_loaders(loader(generator=generator), 1.0, "val")
    before = streams()
    assert order(only.batches()) == order(only.batches())
    assert streams() == before
