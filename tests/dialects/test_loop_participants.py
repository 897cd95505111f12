"""Hooks that come and go in the middle of a run: the same in a loop of one's own as in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn
from torch.nn import functional as F

from hookline import Hook, Line, StopTraining, on

Run = Callable[[list[Any]], None]
HEARD: list[str] = []


@pytest.fixture(autouse=True)
def nothing_heard_yet() -> None:
    HEARD.clear()


def in_the_trainer(hooks: list[Any]) -> None:
    quiet(hooks=hooks).fit(Net(), batches())


def go_through(line: Line, data: Any = None) -> Line:
    with line:
        for x, y in line.epoch(batches() if data is None else data):
            line.optimizers[0].zero_grad()
            line.backward(F.mse_loss(line.module(x), y))
            line.optimizers[0].step()
    return line


def make_line(hooks: list[Any], **options: Any) -> Line:
    net = nn.Linear(4, 2)
    return Line(net, torch.optim.SGD(net.parameters(), lr=0.1), hooks=hooks, **options)


def in_a_line(hooks: list[Any]) -> None:
    go_through(make_line(hooks))


either = pytest.mark.parametrize("run", [in_the_trainer, in_a_line])


class Witness(Hook):
    def __init__(self, name: str, error: BaseException | None = None) -> None:
        super().__init__(name)
        self.error = error

    def setup(self) -> None:
        HEARD.append(f"{self.name} is set up")

    def on_step_end(self, step: int) -> None:
        HEARD.append(f"{self.name} hears step {step}")

    def teardown(self) -> None:
        HEARD.append(f"{self.name} is torn down")
        if self.error is not None:
            raise self.error


class Removes(Hook):
    """Sends others away at an event."""

    def __init__(self, event: str, *names: str) -> None:
        super().__init__("removes")
        self.names = names
        setattr(self, event, self.send_away)

    def send_away(self, trainer: Any) -> None:
        for each in self.names:
            if each in trainer.hooks:
                trainer.remove_hook(each)


@either
@pytest.mark.parametrize("event", ["on_train_batch_end", "on_train_end", "on_fit_end", "teardown"])
def test_a_removed_hook_is_torn_down_whatever_another_teardown_raises(run: Run, event: str) -> None:
    hooks = [
        Removes(event, "one", "two", "three"),
        Witness("one", ValueError("of one")),
        Witness("two", KeyError("of two")),
        Witness("three"),
        Witness("stays"),
    ]
    with pytest.raises(ValueError, match="of one") as caught:
        run(hooks)
    notes = "\n".join(caught.value.__notes__)
    assert (
        "hook 'one' in teardown" in notes and "KeyError: 'of two' (raised by hook 'two' in teardown" in notes
    )
    assert sorted(each for each in HEARD if "torn" in each) == [
        f"{each} is torn down" for each in ("one", "stays", "three", "two")
    ]


@either
def test_a_removed_hook_may_end_the_run_in_its_teardown(run: Run) -> None:
    run([Removes("on_train_batch_end", "one"), Witness("one", StopTraining("enough")), Witness("stays")])
    assert HEARD.count("stays hears step 1") == 1 and "stays hears step 2" not in HEARD


@either
def test_a_hook_that_is_removed_and_added_again_is_torn_down_before_it_is_set_up(run: Run) -> None:
    class Swaps(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.add_hook(trainer.remove_hook("one"))

    run([Witness("one"), Swaps()])
    steps = [f"one hears step {step}" for step in (1, 2, 3, 4)]
    expected = [
        "one is set up",
        steps[0],
        "one is torn down",
        "one is set up",
        *steps[1:],
        "one is torn down",
    ]
    assert expected == HEARD


def test_every_run_of_a_line_begins_with_a_full_budget() -> None:
    class Dear(Hook):
        budget, over_budget = "1 us", "disable"

        def on_step_end(self) -> None:
            sum(range(20_000))

    line = make_line([Dear()])
    calls = []
    for _ in range(2):
        go_through(line, batches(6))
        assert line.hooks.list_hooks() == []
        calls.append(line.cost()[0].calls)
        line.enable_hook("dear")
    assert calls[0] == calls[1] < 6


def test_a_hook_that_was_switched_off_in_a_run_of_a_line_hears_nothing_of_the_next() -> None:
    line = make_line([Witness("one")])
    line.hooks.add(_switches_off_one)
    go_through(line, batches(1))
    assert HEARD == ["one is set up", "one is torn down"]
    go_through(line, batches(1))
    assert HEARD == ["one is set up", "one is torn down"]


@on("train_batch_start")
def _switches_off_one(trainer: Any) -> None:
    trainer.disable_hook("one")


def test_a_hook_that_comes_late_to_a_line_gets_its_saved_state(tmp_path: Path) -> None:
    class Remembers(Hook):
        said = ""

        def on_step_end(self) -> None:
            self.said = "hello"

        def state_dict(self) -> dict[str, Any]:
            return {"said": self.said}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.said = state["said"]

    line, late = make_line([Remembers("it")]), Remembers("it")
    go_through(line, batches(1))
    line.save_checkpoint(tmp_path / "here")
    resumed = make_line([])
    with resumed:
        resumed.load_checkpoint(tmp_path / "here")
        resumed.add_hook(late)
    assert late.said == "hello"
