"""BatchSizeFinder: the largest size that fits, and a training afterwards that equals one started with that size."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_budgets import freeze_imports
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from hookline import DataModule, Hook, HookError, Module, OptionError
from hookline.hooks import BatchSizeFinder, GarbageCollection, LRSchedule
from hookline.hooks.batch_size_finder import search
from hookline.util.errors import HooklineError, Preempted


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """A search collects garbage after each size, which takes long among all that the tests have imported."""
    freeze_imports()


class Full(torch.autograd.Function):
    """A backward pass for which memory does not suffice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
        )


class Greedy(torch.optim.AdamW):
    """An optimizer for whose state memory does not suffice, if the last batch was large."""

    size, most = 0, 0

    def step(self, closure: Any = None) -> Any:
        if self.size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().step(closure)


class Limited(Module):
    """A net with everything that a search could leave changed, in whose memory `most` samples fit."""

    def __init__(self, most: int = 20, where: str = "forward") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.most, self.where = most, where
        self.optimizer: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        size = len(batch[0])
        if self.where == "forward" and size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.optimizer is not None:
            self.optimizer.size = size if self.where == "step" else 0
        outputs = self.net(batch[0] + torch.rand_like(batch[0]) + random.random() + np.random.rand())
        if self.where == "backward" and size > self.most:
            outputs = Full.apply(outputs)
        loss = F.mse_loss(outputs, batch[1])
        self.log("mse", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        self.optimizer = Greedy(self.parameters(), lr=0.01)
        self.optimizer.most = self.most
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows(count: int = 100) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator)
    )


def loader(size: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(), size, **{"shuffle": True, **options})


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_largest_size_that_fits_is_found_wherever_memory_is_exhausted(where: str) -> None:
    finder = BatchSizeFinder()
    assert finder.find(quiet(), Limited(where=where), loader()) == 16
    assert finder.tried == {2: True, 4: True, 8: True, 16: True, 32: False}
    finder = BatchSizeFinder("binsearch", init=3)
    assert finder.find(quiet(), Limited(where=where), loader()) == 20 == finder.batch_size


@pytest.mark.parametrize(
    ("fits", "init", "most", "mode", "margin", "found"),
    [
        (16, 2, 1000, "power", 0.0, 16),
        (31, 2, 1000, "power", 0.0, 16),
        (31, 2, 1000, "binsearch", 0.0, 31),
        (31, 2, 1000, "binsearch", 0.1, 27),
        (1, 2, 1000, "binsearch", 0.5, 1),
        (5, 64, 1000, "power", 0.0, 4),
        (5, 64, 1000, "binsearch", 0.0, 5),
        (10**6, 2, 100, "power", 0.5, 64),  # the data limits it, so that no margin is needed
        (10**6, 2, 100, "binsearch", 0.5, 100),
        (10**6, 64, 10, "power", 0.0, 10),
    ],
)
def test_the_search(fits: int, init: int, most: int, mode: str, margin: float, found: int) -> None:
    tried: list[int] = []
    assert search(lambda size: tried.append(size) or size <= fits, init, most, mode, margin) == found
    assert len(tried) == len(set(tried)) <= 20 and max(tried) <= max(most, 1)


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(HookError, match="exhausted by a batch of one sample"):
        BatchSizeFinder().find(quiet(), Limited(most=0), loader())


def state(net: nn.Module) -> list[Tensor]:
    return [each.clone() for each in net.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def streams() -> tuple[Any, ...]:
    return random.getstate(), tuple(np.random.get_state()[1]), tuple(torch.get_rng_state().tolist())


def test_a_search_leaves_no_trace() -> None:
    net, generator = Limited().eval(), torch.Generator().manual_seed(7)
    data = loader(generator=generator)
    trainer = quiet(seed=3)
    before, random_before, drawn = state(net), streams(), generator.get_state()
    BatchSizeFinder().find(trainer, net, data, data)
    assert same(state(net), before) and not net.training
    assert all(each.grad is None for each in net.parameters())
    assert streams() == random_before and torch.equal(generator.get_state(), drawn)
    assert data.batch_size == 3 and trainer.status == "" or trainer.global_step == 0
    assert not list(Path().iterdir())


class Rates(Hook):
    """The learning rate and the number of samples of each update."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_train_batch_end(self, batch: Any, lr: float) -> None:
        self.seen.append((len(batch[0]), lr))


def train(finder: BatchSizeFinder | None, size: int, seed: int | None = 5, **options: Any) -> Any:
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(1)
    net, rates = Limited(), Rates()
    data = loader(size, generator=torch.Generator().manual_seed(7), **options)
    hooks = [rates, GarbageCollection(), *([finder] if finder else [])]
    trainer = quiet(seed=seed, hooks=hooks, max_epochs=2, log_every_n_steps=1)
    trainer.fit(net, data)
    return state(net), rates.seen, dict(trainer.metrics), streams(), trainer.global_step


@pytest.mark.parametrize(
    ("options", "seed"), [({}, 5), ({}, None), ({"drop_last": True}, 5), ({"num_workers": 1}, 5)], ids=str
)
def test_training_after_a_search_equals_training_that_began_with_the_size(
    options: dict[str, Any], seed: int | None
) -> None:
    found, expected = (
        train(each, size, seed, **options) for each, size in ((BatchSizeFinder(), 3), (None, 16))
    )
    assert found[1] == expected[1] and found[1][0][0] == 16
    assert same(found[0], expected[0]) and found[2:] == expected[2:]


def test_a_schedule_over_the_whole_run_counts_the_batches_of_the_new_size() -> None:
    class Counts(Net):
        total = 0.0

        def configure_optimizers(self) -> Any:
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    net, rates = Counts(), Rates()
    hooks = [BatchSizeFinder(max=25, mode="binsearch"), LRSchedule("linear"), rates]
    quiet(hooks=hooks).fit(net, loader())
    assert net.total == 4 and [rate for _, rate in rates.seen] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_a_plain_module_and_its_optimizer_are_restored_too() -> None:
    def run(find: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        net(torch.randn(3, 4)).sum().backward()
        optimizer.step()  # it has a state before the fit
        optimizer.zero_grad()

        def step(model: nn.Module, batch: Any) -> Tensor:
            if len(batch[0]) > 8:
                raise torch.OutOfMemoryError("full")
            return F.mse_loss(model(batch[0]), batch[1])

        hooks = [BatchSizeFinder("binsearch")] if find else []
        quiet(hooks=hooks).fit(net, loader(3 if find else 8), step=step, optimizer=optimizer)
        return state(net), optimizer.state_dict()["state"][0]

    (found, optimizer), (expected, other) = run(True), run(False)
    assert same(found, expected) and same([*optimizer.values()], [*other.values()])


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.calls = 3, 0

    def setup(self, stage: str) -> None:
        self.rows = rows(60)

    def train_dataloader(self) -> Any:
        self.calls += 1
        return DataLoader(
            self.rows, batch_sampler=BatchSampler(SequentialSampler(self.rows), self.batch_size, False)
        )


class Returns(Limited):
    """A module that makes its loader itself, without an attribute for the size."""

    def train_dataloader(self) -> Any:
        return loader(3)


def test_loaders_of_data_modules_and_modules_get_the_size() -> None:
    rates, data = Rates(), Data()
    finder = BatchSizeFinder("binsearch", max=60)
    assert finder.find(quiet(), Limited(), datamodule=data) == 20 and data.batch_size == 3
    quiet(hooks=[finder, rates]).fit(Limited(), datamodule=data)
    assert data.batch_size == 20 and [size for size, _ in rates.seen] == [20] * 3
    rates = Rates()
    quiet(hooks=[BatchSizeFinder(), rates]).fit(Returns())
    assert [size for size, _ in rates.seen][:2] == [16, 16]


class Keeps(Hook):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == 4:
            trainer.save_checkpoint(self.folder / "four")


def test_a_resumed_run_keeps_the_size_and_does_not_search(tmp_path: Path) -> None:
    def run(resume: Any = None) -> tuple[BatchSizeFinder, Rates, list[Tensor]]:
        torch.manual_seed(1)
        finder, rates, net = BatchSizeFinder(), Rates(), Limited()
        quiet(hooks=[finder, rates, Keeps(tmp_path)], max_epochs=2).fit(net, loader(), resume=resume)
        return finder, rates, state(net)

    _, whole, weights = run()
    finder, rates, found = run(tmp_path / "four")
    assert finder.tried == {} and finder.batch_size == 16
    assert rates.seen == whole.seen[4:] and same(found, weights)


def test_a_rollback_keeps_the_size(tmp_path: Path) -> None:
    class Undoes(Keeps):
        undone = 0

        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            super().on_train_batch_end(trainer, batches_seen)
            if batches_seen == 5 and not self.undone:
                self.undone += 1
                trainer.roll_back(tmp_path / "four")

    def run(resume: Any = None) -> list[Tensor]:
        finder, undoes, net = BatchSizeFinder(), Undoes(tmp_path), Limited()
        quiet(hooks=[finder, undoes], max_epochs=2).fit(net, loader(), resume=resume)
        assert undoes.undone == 1 and finder.batch_size == 16
        return state(net)

    assert same(run(), run(tmp_path / "four"))


class Own(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(batches(40))


class Stream(IterableDataset[Any]):
    """Single samples, and a position that a trial must not move."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in rows():
            self.read += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.read = saved["read"]


def test_an_iterable_dataset_of_samples_needs_a_largest_size_and_keeps_its_state() -> None:
    data = Stream()
    with pytest.raises(OptionError, match="the dataset has no length; pass max="):
        BatchSizeFinder().find(quiet(), Limited(), DataLoader(data, 3))
    assert BatchSizeFinder(max=64).find(quiet(), Limited(), DataLoader(data, 3)) == 16
    assert BatchSizeFinder(max=512).find(quiet(), Limited(1000), DataLoader(data, 3)) == 512
    assert data.read == 0


class Wrong(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"train": batches(4)}, "is a list, which makes its own batches"),
        (
            {"train": DataLoader(rows(), batch_sampler=[[0, 1], [2, 3]])},
            "has the batch sampler list, which chooses the batches.*train_dataloader of a module or data module",
        ),
        ({"train": DataLoader(Own(), None)}, "has batch_size=None, so its dataset makes the batches"),
        ({"train": {"a": loader(), "b": loader()}}, "mixes 2 training loaders"),
        ({"datamodule": Wrong()}, "Wrong.batch_size is 2, but the training loader has batches of 5"),
    ],
    ids=["list", "batch sampler", "own batches", "mixture", "attribute without effect"],
)
def test_loaders_with_a_fixed_size_are_refused(arguments: dict[str, Any], text: str) -> None:
    for run in (
        lambda: BatchSizeFinder().find(quiet(), Limited(), **arguments),
        lambda: quiet(hooks=[BatchSizeFinder()]).fit(Limited(), **arguments),
    ):
        with pytest.raises(HooklineError, match=text):
            run()


def test_other_errors_end_the_search_and_everything_is_restored() -> None:
    class Broken(Limited):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 4:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    net = Broken()
    before = state(net)
    with pytest.raises(ValueError, match="broken"):
        BatchSizeFinder().find(quiet(), net, loader())
    assert same(state(net), before) and all(each.grad is None for each in net.parameters())


def test_manual_optimization_is_searched_too() -> None:
    class ByHand(Limited):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return loss

    for where in ("forward", "backward", "step"):
        assert BatchSizeFinder().find(quiet(), ByHand(where=where), loader()) == 16


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0},
        {"accumulate_by": "samples", "accumulate_grad_batches": 2},
        {"nonfinite": "skip"},
    ],
    ids=str,
)
def test_options_of_the_step_do_not_disturb_the_search(options: dict[str, Any]) -> None:
    rates = Rates()
    quiet(hooks=[BatchSizeFinder(), rates], **options).fit(Limited(), loader())
    assert rates.seen[0][0] == 16


def test_after_a_search_a_compiled_model_gets_a_graph_of_its_own_size() -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    class Small(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Inner(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 4:
                raise torch.OutOfMemoryError("full")
            return super().training_step(batch, batch_idx)

    sizes: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes.append(
            next(each.shape[0] for each in inputs if isinstance(each, Tensor) and not each.requires_grad)
        )
        return graph.forward

    quiet(hooks=[BatchSizeFinder()], compile={"backend": backend}).fit(Small(), DataLoader(rows(8), 2))
    assert [each if type(each) is int else None for each in sizes] == [
        2,
        4,
        4,
    ]  # one for several sizes has a symbol


def test_memory_of_a_trial_is_freed_before_the_next_one() -> None:
    class Heavy(Dataset[Any]):
        """Counts the samples that are alive."""

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return torch.randn(4), torch.randn(2)

    import weakref

    alive: list[int] = []
    made: list[Any] = []

    class Holds(Limited):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                alive.append(sum(each() is not None for each in made))
            made.append(weakref.ref(batch[0]))
            self.cycle = [batch]
            self.cycle.append(self.cycle)
            del self.cycle
            return super().training_step(batch, batch_idx)

    BatchSizeFinder("binsearch").find(quiet(), Holds(), DataLoader(Heavy(), 2))
    assert len(alive) > 5 and set(alive) == {0}


def test_a_signal_ends_the_search_and_the_run() -> None:
    class Signalled(Limited):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) == 4 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    finder = BatchSizeFinder()
    trainer = quiet(hooks=[finder])
    with pytest.raises(Preempted):
        trainer.fit(Signalled(), loader())
    assert trainer.global_step == 0 and finder.tried == {2: True, 4: True}
    with pytest.raises(Preempted):
        finder.find(quiet(), Signalled(), loader())


def test_validation_and_other_stages_do_not_search() -> None:
    class Validates(Limited):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self.net(batch[0]), batch[1])

    finder = BatchSizeFinder()
    quiet(hooks=[finder]).validate(Validates(), loader())
    assert finder.tried == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "binary"}, "mode='binary'"),
        ({"init": 0}, "init=0 must be a whole number from 1"),
        ({"init": 8, "max": 4}, "max=4 is less than init=8"),
        ({"steps": 0}, "steps=0"),
        ({"margin": 1.0}, "margin=1.0 must be a number from 0 to 0.9"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        BatchSizeFinder(**options)


def test_the_size_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hookline"):
        quiet(hooks=[BatchSizeFinder()]).fit(Limited(), loader())
    assert "batches of 32 do not fit" in caplog.text and "the run trains with batches of 16" in caplog.text
