"""Batches fetched ahead: the same ones in the same order, no more than allowed, and a thread that goes when it should."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data.resumed import Samples, check
from torch.utils.data import DataLoader

from hookline.data.prefetch import prefetch_batches


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "hookline-prefetch"]


class Counting:
    """Yields 0, 1, 2 ... and knows how many were asked of it."""

    def __init__(self, n: int | None = None) -> None:
        self.numbers = itertools.count() if n is None else iter(range(n))
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = next(self.numbers)
        self.given += 1
        return number


@pytest.mark.parametrize("depth", [0, 1, 4, 100])
def test_the_batches_come_in_their_order_and_moved(depth: int) -> None:
    assert list(prefetch_batches(iter(range(50)), depth)) == list(range(50))
    assert list(prefetch_batches(iter(range(50)), depth, lambda batch: batch * 2)) == list(range(0, 100, 2))
    assert list(prefetch_batches(iter(()), depth)) == []
    assert not threads()


@pytest.mark.parametrize("depth", [1, 4])
def test_no_more_than_that_many_are_fetched_and_not_handed_out(depth: int) -> None:
    source, most = Counting(), []
    for taken, _ in zip(range(1, 30), prefetch_batches(source, depth), strict=False):
        if taken == 1:
            assert eventually(lambda: source.given == 1 + depth), "they are fetched while the first is used"
        most.append(source.given - taken)
    assert max(most) <= depth


def test_a_batch_is_fetched_and_moved_in_another_thread() -> None:
    def source() -> Iterator[Any]:
        yield threading.current_thread()

    ((fetched, moved),) = prefetch_batches(source(), 1, lambda thread: (thread, threading.current_thread()))
    assert fetched is moved is not threading.current_thread()


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_comes_out_where_its_batch_would_have(depth: int, kind: type[BaseException]) -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise kind("the disk is gone")

    taken = []
    with pytest.raises(kind, match="the disk is gone") as caught:
        for batch in prefetch_batches(source(), depth):
            taken.append(batch)
    assert taken == [0, 1, 2] and caught.traceback[-1].name == "source"
    assert eventually(lambda: not threads())


def test_an_error_of_the_move_comes_out_too() -> None:
    with pytest.raises(ZeroDivisionError):
        list(prefetch_batches(iter([1, 0]), 2, lambda batch: 1 // batch))


def test_the_thread_ends_when_the_rest_is_not_wanted() -> None:
    source = Counting()
    batches = prefetch_batches(source, 3)
    assert [next(batches), next(batches)] == [0, 1]
    batches.close()
    assert not threads()
    given = source.given
    time.sleep(0.05)
    assert source.given == given <= 5


def test_one_that_was_never_begun_has_no_thread() -> None:
    prefetch_batches(Counting(), 2).close()
    assert not threads()


def test_closing_does_not_wait_for_a_source_that_blocks() -> None:
    going_on = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        going_on.wait(60)
        yield 2
        raise AssertionError("nobody wants a third one")

    batches = prefetch_batches(source(), 2)
    next(batches)
    batches.close()
    assert threads(), "it is still in the source, and harms nobody"
    going_on.set()
    assert eventually(lambda: not threads())


def test_batches_are_not_kept_alive() -> None:
    import gc
    import weakref

    kept: list[Any] = []

    def source() -> Iterator[torch.Tensor]:
        for _ in range(6):
            made = torch.zeros(3)
            kept.append(weakref.ref(made))
            yield made
            del made

    for count, batch in enumerate(prefetch_batches(source(), 1)):
        gc.collect()
        assert sum(ref() is not None for ref in kept[:count]) == 0
        del batch


# ---- in a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("kind", ["workers", "list", "in this process"])
def test_what_is_trained_and_resumed_does_not_change_with_it(depth: int, kind: str, tmp_path: Path) -> None:
    def make() -> Any:
        made = DataLoader(Samples(noise="torch"), 3, shuffle=True, num_workers=1 if kind == "workers" else 0)
        return [tuple(each) for each in made] if kind == "list" else made

    made = make() if kind == "list" else None
    whole = check(lambda: made or make(), tmp_path, (3, 6), max_epochs=2, prefetch_batches=depth)
    assert len(whole.batches) == 8
    assert not threads()
    if depth and kind != "list":
        without = check(make, tmp_path / "without", (3,), max_epochs=2)
        assert whole.batches == without.batches


def test_an_epoch_that_is_ended_early_leaves_no_thread_and_no_worker_behind() -> None:
    from tiny import Net, quiet

    from hookline import END_EPOCH, Hook

    class Early(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return END_EPOCH if batch_idx == 2 else None

    loaders = {
        "web": DataLoader(Samples(30), 2, num_workers=1),
        "code": DataLoader(Samples(30), 2, num_workers=1),
    }
    trainer = quiet(hooks=[Early()], max_epochs=2, prefetch_batches=2)
    trainer.fit(Net(), loaders, DataLoader(Samples(4), 2, num_workers=1))
    assert not threads()
    assert trainer.metrics["train/dl_web/samples_seen"] == 8


def test_the_copy_to_the_device_is_made_ahead_unless_a_hook_wants_the_batch_before() -> None:
    from tiny import Net, batches, quiet

    from hookline import Hook

    class Sees(Hook):
        def __init__(self) -> None:
            self.devices: list[str] = []

    class Before(Sees):
        def on_before_batch_transfer(self, batch: Any) -> None:
            self.devices.append(batch[0].device.type)

    class After(Sees):
        def on_after_batch_transfer(self, batch: Any) -> None:
            self.devices.append(batch[0].device.type)

    before, after, alone = Before(), After(), After()
    options: dict[str, Any] = {"device": "meta", "prefetch_batches": 2, "log_every_n_steps": 1000}
    quiet(hooks=[before, after], **options).fit(Net(), batches(3))
    trainer = quiet(hooks=[alone], **options)
    trainer.fit(Net(), batches(3))
    assert before.devices == ["cpu"] * 3 and after.devices == alone.devices == ["meta"] * 3
    assert trainer._last is not None and trainer._last.data.loaders["train"][0].move is not None
