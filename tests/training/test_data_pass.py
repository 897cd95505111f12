"""The events around fetching a batch, in training and in every evaluation."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader

from hookline import Hook, Trainer
from hookline.engine.plan import noop


class Fetches(Hook):
    """Writes down what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Any, ...]] = []

    def on_before_batch_fetch(self, batch_idx: int) -> None:
        self.heard.append(("before", batch_idx))

    def on_after_batch_fetch(
        self, batch: Any, batch_idx: int, dataloader_name: str, fetch_seconds: float
    ) -> None:
        assert batch is not None and fetch_seconds >= 0
        self.heard.append(("after", batch_idx, dataloader_name))


def test_they_come_before_and_after_every_fetch_and_a_last_one_finds_the_loader_exhausted() -> None:
    hook = Fetches()
    trainer = quiet(hooks=[hook])
    trainer.fit(Net(), batches(2))
    assert hook.heard == [
        ("before", 0),
        ("after", 0, "train"),
        ("before", 1),
        ("after", 1, "train"),
        ("before", 2),
    ]
    assert trainer.state.batch_idx == 1  # of the last batch, as without the hook


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_they_come_in_every_evaluation(verb: str) -> None:
    hook = Fetches()
    getattr(quiet(hooks=[hook]), verb)(Net(), batches(2))
    name = {"validate": "val"}.get(verb, verb)
    assert hook.heard == [("before", 0), ("after", 0, name), ("before", 1), ("after", 1, name), ("before", 2)]


def test_the_sanity_check_fetches_no_more_batches_than_it_runs() -> None:
    fetched = 0

    class Counts:
        def __iter__(self) -> Any:
            nonlocal fetched
            for batch in batches(5):
                fetched += 1
                yield batch

        def __len__(self) -> int:
            return 5

    quiet(num_sanity_val_steps=2, max_steps=1, check_val_every_n_epoch=5).fit(Net(), batches(1), Counts())
    assert fetched == 2


def test_a_validation_leaves_the_facts_of_the_batch_alone() -> None:
    seen: list[tuple[int, float, float]] = []

    class Slow:
        def __iter__(self) -> Any:
            for batch in batches(2):
                time.sleep(0.05)
                yield batch

    class Validates(Fetches):
        def on_train_batch_end(self, trainer: Trainer, fetch_seconds: float) -> None:
            trainer.validate()
            seen.append((trainer.state.batch_idx, fetch_seconds, trainer.state.fetch_seconds))

    quiet(hooks=[Validates()]).fit(Net(), Slow(), batches(3))
    assert [each[0] for each in seen] == [0, 1]
    assert all(before == after >= 0.05 for _, before, after in seen)


def test_a_hook_that_joins_in_the_middle_of_an_epoch_hears_them() -> None:
    heard: list[int] = []

    class Joins(Hook):
        def on_train_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
            if batch_idx == 1:
                self.handle = trainer.on("after_batch_fetch")(lambda batch_idx: heard.append(batch_idx))
            if batch_idx == 3:
                self.handle.remove()

    trainer = quiet(hooks=[Joins()])
    trainer.fit(Net(), batches(6))
    assert heard == [2, 3]
    assert trainer.plan.on_after_batch_fetch is noop


def test_the_module_hears_them() -> None:
    heard: list[str] = []

    class Hears(Net):
        def on_before_batch_fetch(self) -> None:
            heard.append("before")

        def on_after_batch_fetch(self) -> None:
            heard.append("after")

    quiet().fit(Hears(), batches(1))
    assert heard == ["before", "after", "before"]


def test_a_stop_asked_for_at_a_fetch_is_honoured_at_the_next_batch_boundary() -> None:
    trainer = quiet()
    trainer.on("before_batch_fetch")(
        lambda trainer, batch_idx: trainer.stop("enough") if batch_idx == 1 else None
    )
    trainer.fit(Net(), batches(5))
    assert trainer.state.batches_seen == 2 and trainer.status == "stopped"


def test_an_error_of_the_loader_is_the_errors_own() -> None:
    class Breaks:
        def __iter__(self) -> Any:
            yield batches(1)[0]
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        quiet(hooks=[Fetches()]).fit(Net(), Breaks())


def test_a_batch_that_was_replaced_is_not_kept_alive() -> None:
    """As when it was moved to a device: the loop must not hold the first one until the next is fetched."""
    gone: list[bool] = []

    class Samples:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(4), torch.zeros(2)

    class Replaces(Hook):
        def on_after_batch_transfer(self, batch: Any) -> Any:
            self.first = weakref.ref(batch[0])
            return tuple(each.clone() for each in batch)

        def on_train_batch_end(self) -> None:
            gc.collect()
            gone.append(self.first() is None)

    quiet(hooks=[Replaces()]).fit(Net(), DataLoader(Samples(), batch_size=2))  # type: ignore[arg-type]
    assert gone == [True, True, True]


@pytest.mark.parametrize("event", ["before_batch_fetch", "after_batch_fetch"])
@pytest.mark.parametrize("verb", ["fit", "validate", "predict"])
def test_a_hook_that_raises_stop_iteration_does_not_end_the_data(event: str, verb: str) -> None:
    trainer = quiet()

    @trainer.on(event)
    def fails() -> None:
        raise StopIteration("of a hook")

    with pytest.raises(StopIteration, match="of a hook"):
        getattr(trainer, verb)(Net(), batches(3))


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise ValueError("sample 7 is broken")
        return torch.ones(4), torch.ones(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_names_the_batch_that_it_was_to_be_part_of(workers: int) -> None:
    trainer = quiet()
    loader = DataLoader(Broken(), 2, num_workers=workers)
    with pytest.raises(ValueError, match="sample 7 is broken") as caught:
        trainer.fit(Net(), loader)
    assert any("batch 3, step 3" in note for note in caught.value.__notes__)
    assert trainer.state.batch is None and trainer.state.batch_idx == 3
    with pytest.raises(ValueError, match="sample 7 is broken") as caught:
        trainer.validate(Net(), loader)
    assert any("batch 3" in note for note in caught.value.__notes__)
