"""One seed for every source of randomness."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from data.resumed import Samples, check
from tiny import Net, batches, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import OptionError, seed_everything
from hookline.data.rng_exchange import OwnStream
from hookline.data.seeding import Value, find_generators, key_of, put_back, states_of


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_one_seed_covers_python_numpy_and_torch() -> None:
    seed_everything(3)
    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True))
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_a_seed_too_large_for_numpy_is_fine() -> None:
    seed_everything(2**40 + 1)
    first = draw()
    seed_everything(2**40 + 1)
    assert draw() == first


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.drop(batch[0]), batch[1]), batch_idx)


def weights(seed: int | None) -> torch.Tensor:
    net = Dropping()
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
    data = TensorDataset(torch.arange(48.0).reshape(12, 4) / 48, torch.arange(24.0).reshape(12, 2) / 24)
    quiet(seed=seed, max_epochs=2).fit(net, DataLoader(data, batch_size=3, shuffle=True))
    return net.layer.weight.detach()


def test_the_trainers_seed_repeats_shuffling_and_dropout() -> None:
    assert torch.equal(weights(7), weights(7))
    assert not torch.equal(weights(7), weights(8))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_seeded_evaluation_restores_the_random_streams_also_after_an_error(stage: str) -> None:
    trainer = quiet(seed=0, max_epochs=1)
    net, data = Net(), batches()
    trainer.fit(net, data)
    before = drawn_after(lambda: None)
    assert drawn_after(lambda: getattr(trainer, stage)(net, data)) == before

    def fail() -> None:
        with pytest.raises(RuntimeError, match="broken"):
            getattr(trainer, stage)(net, data)

    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    net.layer.forward = broken  # type: ignore[method-assign]

    assert drawn_after(fail) == before


def drawn_after(act: Callable[[], object]) -> tuple[float, float, float]:
    seed_everything(5)
    act()
    return draw()


def test_without_a_seed_the_random_streams_are_left_alone() -> None:
    seed_everything(1)
    first = weights(None)
    assert not torch.equal(first, weights(None))
    seed_everything(1)
    assert torch.equal(first, weights(None))


def test_a_stream_of_ones_own_continues_from_block_to_block_and_leaves_the_main_ones_alone() -> None:
    def drawn(between: int) -> tuple[list[Any], list[Any]]:
        seed_everything(5)
        stream, inside, outside = OwnStream(9), [], []
        for _ in range(3):
            with stream:
                inside.append(draw())
            outside += [
                (*draw(), np.random.randn()) for _ in range(between)
            ]  # every second normal number is kept from the first
        return inside, outside

    seed_everything(5)
    alone = [(*draw(), np.random.randn()) for _ in range(3)]
    assert drawn(1)[1] == alone
    assert drawn(0)[0] == drawn(1)[0] == drawn(2)[0]
    assert len(set(drawn(0)[0])) == 3


def test_a_key_is_the_same_in_every_process_and_differs_with_every_part() -> None:
    assert key_of(1, 2, "train") == 1449415094056342363
    assert len({key_of(1, 2), key_of(2, 1), key_of(1, 2, "a"), key_of(12), key_of("1", 2)}) == 5


# ---- a module that is created after the trainer ------------------------------------------------------------------

SAID = "Trainer(seed=0) takes effect when fit begins. Net was created after the trainer without a seed"
FRESH = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from tiny import Net, batches, quiet
trainer, net = quiet(seed=0), Net()
for _ in range(2):
    trainer.fit(net, batches())
"""


def test_a_module_created_after_the_trainer_in_a_process_without_a_seed_is_reported_once() -> None:
    done = preloaded.run(
        [sys.executable, "-c", FRESH],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count(SAID) == 1
    assert "Call hookline.seed_everything(0) before you create it" in done.stdout


def module_first() -> tuple[Any, Any]:
    net = Net()
    return quiet(seed=0), net


def copied() -> tuple[Any, Any]:
    net = Net()
    return quiet(seed=0), copy.deepcopy(net)


def seeded_between(seed: Callable[[], object]) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        trainer = quiet(seed=0)
        seed()
        return trainer, Net()

    return make


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda: (quiet(seed=0), Net()), True),
        (lambda: (quiet(), Net()), False),
        (module_first, False),
        (copied, False),
        (seeded_between(lambda: torch.manual_seed(4)), False),
        (seeded_between(lambda: seed_everything(2**50)), False),
    ],
    ids=["after", "no seed", "module first", "a copy", "torch seeded", "a large seed"],
)
def test_only_a_module_that_the_trainer_seems_to_seed_is_reported(
    make: Any, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.seed()  # as in a new process
    trainer, net = make()
    trainer.fit(net, batches())
    assert (SAID in caplog.text) == reported


def test_a_seed_before_both_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    torch.seed()
    weights = []
    for _ in range(2):
        seed_everything(0)
        trainer, net = quiet(seed=0), Net()
        weights.append(net.layer.weight.tolist())
        trainer.fit(net, batches())
    assert SAID not in caplog.text and weights[0] == weights[1]


def test_resumed_weights_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(seed=0)
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(tmp_path / "c")
    torch.seed()
    trainer, net = quiet(seed=0, max_epochs=2), Net()
    trainer.fit(net, batches(), resume=tmp_path / "c")
    assert SAID not in caplog.text


# ---- Random generators of a loader, its sampler and its dataset are found, saved and put back


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


def draw_from(owner: Owner) -> list[float]:
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
    draw_from(one)
    states = states_of(find_generators(dataset=one))
    expected = draw_from(one)
    put_back(find_generators(dataset=other), states)
    assert draw_from(other) == expected != draw_from(Owner(2))


def test_a_generator_without_a_saved_state_is_left_alone() -> None:
    owner = Owner(3)
    put_back(find_generators(dataset=owner), {"dataset.gone": None})
    assert draw_from(owner) == draw_from(Owner(3))


def test_a_number_that_decides_an_order_is_kept_like_a_state() -> None:
    owner = {"epoch": 3}
    found = {"sampler.epoch": Value(owner, "epoch")}
    assert states_of(found) == {"sampler.epoch": 3}
    put_back(found, {"sampler.epoch": 5})
    assert owner == {"epoch": 5}


def test_an_argument_that_only_lightning_has_is_told_to_be_left_out() -> None:
    with pytest.raises(OptionError, match="no argument 'workers'. Leave it out: Hookline seeds the workers"):
        seed_everything(1, workers=True)  # type: ignore[arg-type]
