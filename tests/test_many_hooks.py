"""Thousands of hooks: the work that each operation does grows with their number, not with its square.

Counted in Python calls, which are the same on every machine and under any load.
"""

from __future__ import annotations

import cProfile
import gc
from collections.abc import Callable
from typing import Any

import pytest
from test_budgets import freeze_imports
from thorough import some
from tiny import Net, batches, quiet

from hookline import Hook, Trainer

FEW = 100
LINEAR = 2.5
"""Twice the hooks take twice the work, and a little for what does not grow; a square would take four times."""


class Listens(Hook):
    """Hears the events that have slots of their own kinds, and keeps state."""

    def setup(self) -> None: ...

    def on_before_backward(self, loss: Any) -> None: ...

    def on_train_batch_start(self) -> None: ...

    def on_step_end(self, step: int) -> None: ...

    def teardown(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def calls(work: Callable[[], object]) -> int:
    """How many functions, Python's and C's, are called while it runs."""
    profile = cProfile.Profile()  # which counts in C
    freeze_imports()
    gc.collect()
    gc.disable()
    try:
        profile.runcall(work)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


def trainer_with(n: int, **options: Any) -> Trainer:
    return quiet(hooks=[Listens() for _ in range(n)], **options)


def in_a_run(trainer: Trainer, work: Callable[[], object], steps: int = 2) -> Callable[[], object]:
    """A run whose first batch does the work."""
    trainer.on("train_batch_start", once=True, name="worker")(lambda: work() and None)
    return lambda: trainer.fit(Net(), batches(steps))


def registered(n: int) -> Callable[[], object]:
    return lambda: trainer_with(n)


def functions_registered(n: int) -> Callable[[], object]:
    trainer = quiet()
    return lambda: [trainer.on("step_end")(lambda step: None) for _ in range(n)]


def on_one_rank_only(n: int) -> Callable[[], object]:
    class Elsewhere(Listens):
        ranks = (7,)

    return lambda: quiet(hooks=[Elsewhere() for _ in range(n)])


def removed(n: int) -> Callable[[], object]:
    trainer = trainer_with(n)
    return lambda: [trainer.remove_hook(name) for name in trainer.hooks.list_hooks()]


def removed_and_added(n: int) -> Callable[[], object]:
    trainer = trainer_with(n)
    return lambda: [trainer.add_hook(trainer.remove_hook(name)) for name in trainer.hooks.list_hooks()]


def switched(n: int) -> Callable[[], object]:
    trainer = trainer_with(n)

    def work() -> None:
        names = trainer.hooks.list_hooks()
        for name in names:
            trainer.disable_hook(name)
        for name in names:
            trainer.enable_hook(name)

    return work


def trained(n: int) -> Callable[[], object]:
    trainer = trainer_with(n)
    return lambda: trainer.fit(Net(), batches(2))


def explained(n: int) -> Callable[[], object]:
    trainer = trainer_with(n)
    return lambda: str(trainer.explain(Net()))


def added_in_a_run(n: int) -> Callable[[], object]:
    trainer = quiet()
    return in_a_run(trainer, lambda: [trainer.add_hook(Listens()) for _ in range(n)])


def removed_in_a_run(n: int) -> Callable[[], object]:
    trainer = trainer_with(n)
    return in_a_run(trainer, lambda: [trainer.remove_hook(name) for name in trainer.hooks.list_hooks()[:n]])


def exchanged_in_a_run(n: int) -> Callable[[], object]:
    trainer = trainer_with(n)

    def work() -> None:
        removed = [trainer.remove_hook(name) for name in trainer.hooks.list_hooks()[:n]]
        for hook in removed:
            trainer.add_hook(hook)

    return in_a_run(trainer, work)


def switched_in_a_run(n: int) -> Callable[[], object]:
    class Plain(Hook):
        def on_step_end(self) -> None: ...

    trainer = quiet(hooks=[Plain() for _ in range(n)])

    def work() -> None:
        names = trainer.hooks.list_hooks()[:n]
        for name in names:
            trainer.disable_hook(name)
        for name in names:
            trainer.enable_hook(name)

    return in_a_run(trainer, work)


OPERATIONS = [
    registered,
    functions_registered,
    on_one_rank_only,
    removed,
    removed_and_added,
    switched,
    trained,
    explained,
    added_in_a_run,
    removed_in_a_run,
    exchanged_in_a_run,
    switched_in_a_run,
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_twice_the_hooks_take_twice_the_work(operation: Callable[[int], Callable[[], object]]):
    operation(2)()  # what is looked up once per process
    few, many = calls(operation(FEW)), calls(operation(2 * FEW))
    assert many / few < LINEAR, f"{few} calls for {FEW} hooks, {many} for {2 * FEW}"


@pytest.mark.parametrize("known", [True, False])
def test_a_resume_with_many_hooks_is_linear(tmp_path, known: bool):
    def resumed(n: int) -> Callable[[], object]:
        trainer = trainer_with(n)
        trainer.fit(Net(), batches(1))
        trainer.save_checkpoint(tmp_path / f"of-{n}")
        again = trainer_with(n, max_epochs=2) if known else quiet(max_epochs=2)
        return lambda: again.fit(Net(), batches(1), resume=tmp_path / f"of-{n}")

    resumed(2)()
    few, many = calls(resumed(FEW)), calls(resumed(2 * FEW))
    assert many / few < LINEAR, f"{few} calls for {FEW} hooks, {many} for {2 * FEW}"


@pytest.mark.parametrize("n", some([2_000], [10_000]))
def test_thousands_of_hooks_are_added_called_and_removed(n: int):
    seen = []

    class Counts(Hook):
        def on_step_end(self, step):
            seen.append(step)

    trainer = quiet(hooks=[Counts() for _ in range(n)])
    trainer.fit(Net(), batches(1))
    assert len(seen) == n
    assert trainer.hooks.list_hooks()[-1] == f"counts_{n}"
    for name in trainer.hooks.list_hooks():
        trainer.remove_hook(name)
    assert len(trainer.hooks) == 0


def test_a_number_that_has_become_free_is_given_again():
    trainer = trainer_with(4)
    assert trainer.hooks.list_hooks() == ["listens", "listens_2", "listens_3", "listens_4"]
    trainer.remove_hook("listens_3")
    trainer.remove_hook("listens_2")
    assert [trainer.add_hook(Listens()).name for _ in range(3)] == ["listens_2", "listens_3", "listens_5"]


def test_a_number_that_a_user_has_given_is_left_out():
    trainer = trainer_with(1)
    trainer.add_hook(Listens(), "listens_2")
    assert trainer.add_hook(Listens()).name == "listens_3"
    trainer.remove_hook("listens_2")
    assert trainer.add_hook(Listens()).name == "listens_2"
