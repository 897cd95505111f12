"""What Hookline costs, as counts that are the same on every machine. Times are in benchmarks/."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from servers import nobody_at
from tiny import Net, batches, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import hookline
from hookline import Hook
from hookline.engine.plan import noop
from hookline.hooks import OpenTelemetry, ProgressBar
from hookline.run.state import detach_all
from hookline.training.fit import fit
from hookline.training.step import TrainStep

SOURCE = str(Path(hookline.__file__).parent)
CALLS_PER_STEP, FRAMES, FILES = 23, 6, 4
CALLS_OF_A_LIST = 23
FEW, MANY = 20, 60
Train = Callable[[list[tuple[Tensor, Tensor]]], object]


@functools.cache
def freeze_imports() -> None:
    """Leave what torch has imported out of later collections, which take most of the time of a count."""
    quiet().fit(Net(), batches(2))
    gc.collect()
    gc.freeze()


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((SOURCE, "<hookline"))


def starts_a_thread(frame: FrameType | None) -> bool:
    """Starting a thread takes more calls if it is not there at once, which depends on what else the machine does."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back
    return False


def python_calls(run: Callable[[], object], counts: Callable[[FrameType], bool] = lambda frame: True) -> int:
    """How many Python functions are called while it runs."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if event == "call" and counts(frame) and not starts_a_thread(frame):
            count += 1

    freeze_imports()
    gc.collect()
    gc.disable()  # what a collection calls depends on what ran before
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def per_step(train: Train, counts: Callable[[FrameType], bool] = lambda frame: True) -> float:
    """Calls per batch: the difference between a long and a short run leaves set-up and teardown out."""
    for _ in range(2):  # whatever is done only the first time, and what that leaves to be looked up anew
        train(batches(2))
    short, long = batches(FEW), batches(MANY)
    return (python_calls(lambda: train(long), counts) - python_calls(lambda: train(short), counts)) / (
        MANY - FEW
    )


def bare(data: list[tuple[Tensor, Tensor]]) -> None:
    """The loop that people write by hand."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch_idx, batch in enumerate(data):
        loss = net.training_step(batch, batch_idx)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_hooks(*hooks: Any, **options: Any) -> Train:
    return lambda data: quiet(hooks=hooks, **options).fit(Net(), data)


@functools.cache
def without_hooks(counts: Callable[[FrameType], bool] = lambda frame: True) -> float:
    """Calls per batch of a list that no hook listens to, counted once."""
    return per_step(with_hooks(), counts)


class Batches:
    """An iterable that is not a list."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.data)


class Samples(Dataset[Any]):
    """Reads one sample at a time."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def rows(data: list[tuple[Tensor, Tensor]]) -> TensorDataset:
    return TensorDataset(
        torch.cat([inputs for inputs, _ in data]), torch.cat([targets for _, targets in data])
    )


SOURCES: dict[str, tuple[Callable[[list[tuple[Tensor, Tensor]]], Any], int, int]] = {
    "iterable": (Batches, 9, 16),
    "DataLoader": (lambda data: DataLoader(Samples(data), 1), 6, -6),
    "in memory": (lambda data: DataLoader(rows(data), 3, shuffle=True), 9, -30),
    "subset in memory": (
        lambda data: DataLoader(Subset(rows(data), range(3 * len(data))), 3, shuffle=True),
        11,
        -30,
    ),
}
"""Each with the calls that a batch may cost over one of a list, ours alone, and all over a bare loop with the same source."""


class Silent(Hook):
    """Overrides nothing."""


class Counts(Hook):
    """Hears one event, asks for one fact."""

    def on_train_batch_end(self, batch_idx: int) -> None:
        pass


def test_a_step_without_listeners_costs_few_calls() -> None:
    assert without_hooks() - per_step(bare) <= CALLS_PER_STEP
    # counted by itself too: what is saved inside torch must not hide what is spent here
    assert 0 < without_hooks(is_ours) <= CALLS_PER_STEP


@pytest.mark.parametrize("name", SOURCES)
def test_a_batch_of_a_loader_costs_few_calls(name: str) -> None:
    make, ours, over_bare = SOURCES[name]
    train: Train = lambda data: quiet().fit(Net(), make(data))  # noqa: E731
    assert per_step(train, is_ours) - without_hooks(is_ours) <= ours
    assert per_step(train) - per_step(lambda data: bare(make(data))) <= over_bare


def test_a_batch_of_a_list_costs_few_calls() -> None:
    """All but a few of them are calls of the loop."""
    assert without_hooks(is_ours) <= CALLS_OF_A_LIST


def test_keeping_the_last_checkpoint_costs_a_step_nothing() -> None:
    """Counted in the loops alone: how many calls a write takes depends on the disk."""

    def in_loops(frame: FrameType) -> bool:
        return frame.f_code.co_filename in (fit.__code__.co_filename, TrainStep.__call__.__code__.co_filename)

    assert per_step(with_hooks(checkpoint=True), in_loops) == without_hooks(in_loops) > 0


def test_hooks_that_hear_nothing_cost_nothing() -> None:
    silent = [Silent(f"silent_{index}") for index in range(50)]
    assert per_step(lambda data: with_hooks(*silent)(data)) == without_hooks()


def test_hooks_switched_off_cost_nothing() -> None:
    def switched_off(data: list[tuple[Tensor, Tensor]]) -> None:
        trainer = quiet(hooks=[Counts()])
        trainer.disable_hook("counts")
        trainer.fit(Net(), data)

    assert per_step(switched_off) == without_hooks()


def test_every_further_listener_costs_its_own_call_and_no_search() -> None:
    one, two, ten = (per_step(with_hooks(*[Counts(f"c{index}") for index in range(n)])) for n in (1, 2, 10))
    assert ten - two == pytest.approx(8 * (two - one))
    assert two - one == 1  # the method itself


def test_a_step_without_a_span_of_opentelemetry_costs_no_call() -> None:
    """Nor does a listener cost more: the spans of its calls are for sampled steps."""
    endpoint = nobody_at("")

    def traced(data: list[tuple[Tensor, Tensor]], *hooks: Any) -> None:
        hook = OpenTelemetry(every=10**6, endpoint=endpoint, timeout=0.1)
        with_hooks(hook, *hooks, log_every_n_steps=10**6)(data)

    assert per_step(traced) == without_hooks()
    counted = per_step(with_hooks(Counts())) - without_hooks()
    assert per_step(lambda data: traced(data, Counts())) - without_hooks() == counted


def test_a_step_without_a_digest_costs_no_call(tmp_path: Path) -> None:
    assert per_step(with_hooks(digest=False)) == without_hooks()
    # the first step is digested, and no other; when the timer samples a step, it asks for the next digest
    assert per_step(with_hooks(digest=10**6, run_dir=tmp_path)) == pytest.approx(without_hooks(), abs=0.2)


def test_accounting_costs_no_call() -> None:
    plain = per_step(with_hooks(Counts(), accounting=False)) - per_step(with_hooks(accounting=False))
    counted = per_step(with_hooks(Counts())) - without_hooks()
    assert counted == plain <= 2  # the slot and the method


def test_logging_costs_the_same_however_long_the_run() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("x", loss)
            return loss

    cost = per_step(lambda data: quiet().fit(Logs(), data)) - without_hooks()
    assert cost <= 3  # the override itself, the module's log, the run's


def test_logging_a_mean_over_the_epoch_costs_one_more_call() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("x", loss, on_step=True, on_epoch=True)
            return loss

    assert per_step(lambda data: quiet().fit(Logs(), data)) - without_hooks() <= 4


def test_between_two_refreshes_a_progress_bar_costs_a_look_at_the_clock() -> None:
    cost = per_step(lambda data: with_hooks(ProgressBar(plain_every=1e9))(data)) - without_hooks()
    assert cost <= 2  # the slot and the method


def test_outputs_are_detached_once_and_only_for_listeners_that_request_them() -> None:
    class Requests(Hook):
        def on_train_batch_end(self, outputs: Any) -> None:
            pass

    def detaches(frame: FrameType) -> bool:
        return frame.f_code is detach_all.__code__

    ten, others = [[kind(f"hook_{index}") for index in range(10)] for kind in (Requests, Counts)]
    assert per_step(with_hooks(*others), detaches) == 0
    assert per_step(with_hooks(*ten), detaches) == 1
    assert (
        per_step(with_hooks(*ten)) - per_step(with_hooks(*others)) <= 10 + 1
    )  # one call each reads them, one detaches


def test_the_way_from_fit_to_the_training_step_is_short() -> None:
    ways: list[list[tuple[str, str]]] = []

    class Looks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            frame, way = sys._getframe(1), []
            while frame is not None:
                if frame.f_code.co_filename.startswith(
                    SOURCE
                ):  # generated code and the user's own do not count
                    way.append((frame.f_code.co_filename, frame.f_code.co_name))
                if frame.f_code.co_qualname == "Trainer.fit":
                    break
                frame = frame.f_back
            ways.append(way)
            return super().training_step(batch, batch_idx)

    quiet().fit(Looks(), batches(2))
    for way in ways:
        assert way[-1][1] == "fit"
        assert len(way) <= FRAMES, way
        assert len({file for file, _ in way}) <= FILES, way
    assert len(ways) == 2


def test_an_event_without_listeners_is_an_empty_slot() -> None:
    heard: dict[str, bool] = {}

    class Looks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            plan = self.trainer.plan
            heard.update(
                {
                    event.name: getattr(plan, event.name) is not noop
                    for event in plan.table
                    if not event.action
                }
            )
            return super().training_step(batch, batch_idx)

    quiet(hooks=[Counts(), Silent()]).fit(Looks(), batches(1))
    assert {name for name, somebody in heard.items() if somebody} == {"on_train_batch_end"}
    assert len(heard) > 40


def test_a_slot_is_empty_again_when_its_last_listener_leaves() -> None:
    trainer = quiet()
    handle = trainer.on("step_end")(lambda: None)
    assert trainer.plan.on_step_end is not noop
    handle.remove()
    assert trainer.plan.on_step_end is noop
