"""Several loggers as one, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, Logger, OptionError, Trainer
from hookline.loggers import JSONLines, Loggers, make_loggers

CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("log_metrics", ({"a": 1.0}, 1, 0)), ("log_hyperparams", ({"lr": 0.1},)), ("add_scalar", ("a", 1.0, 1)),
    ("add_histogram", ("a", torch.zeros(3), 1)), ("add_text", ("a", "text", 1)),
    ("add_image", ("a", torch.zeros(1, 2, 2), 1)), ("add_figure", ("a", object(), 1)), ("close", ()), ("open", (Path,)),
]  # fmt: skip


class Spy(Logger):
    """Remembers which of its methods were called, with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in dict(CALLS):
            return lambda *given, **named: self.calls.append((name, (*given, *named.values())))
        return super().__getattribute__(name)


@pytest.mark.parametrize(("method", "given"), CALLS, ids=[name for name, _ in CALLS])
def test_everything_reaches_every_logger_and_a_plain_logger_takes_everything(method: str, given: tuple[Any, ...]) -> None:
    spies = [Spy(), Spy()]
    together = Loggers([spies[0], Logger(), spies[1]])
    getattr(together, method)(*given)
    assert spies[0].calls == spies[1].calls == [(method, given)]
    assert getattr(Loggers(), method)(*given) is None


def test_no_public_method_of_a_logger_is_forgotten_by_the_group() -> None:
    public = {name for name in vars(Logger) if not name.startswith("_")}
    assert public <= set(vars(Loggers))
    assert public == set(dict(CALLS))


def test_what_may_be_passed_as_logger() -> None:
    one = Logger()
    assert [type(each) for each in make_loggers(True, JSONLines).members] == [JSONLines]
    assert make_loggers(False, JSONLines).members == make_loggers(None, JSONLines).members == []
    assert make_loggers(one, JSONLines).members == [one]
    assert make_loggers([one, one], JSONLines).members == [one, one]
    with pytest.raises(OptionError, match="logger='wandb' must be True, False, a Logger"):
        make_loggers("wandb", JSONLines)


def test_any_iterable_of_loggers_will_do() -> None:
    assert len(make_loggers((each for each in [Logger(), Logger()]), JSONLines).members) == 2


def test_a_group_is_true_only_if_somebody_is_in_it() -> None:
    assert Loggers([Logger()]) and not Loggers()


def test_the_module_can_use_its_experiment_even_without_a_logger() -> None:
    class Draws(Net):
        def on_after_backward(self) -> None:
            self.experiment.add_histogram(tag="grad", values=self.layer.weight.grad, global_step=self.global_step)
            self.logger.add_text("note", "hello")

    quiet().fit(Draws(), batches(1))  # nothing to hear it, and nothing breaks
    spy = Spy()
    quiet(logger=spy).fit(Draws(), batches(1))
    assert {"add_histogram", "add_text"} <= {name for name, _ in spy.calls}


def test_hooks_get_the_loggers_as_logger_and_as_experiment() -> None:
    class Draws(Hook):
        def on_step_end(self, logger: Any, experiment: Any, step: int) -> None:
            assert logger is experiment
            experiment.add_scalar("mine", 1.0, step)

    spy = Spy()
    quiet(logger=spy, hooks=[Draws()]).fit(Net(), batches(2))
    assert [given for name, given in spy.calls if name == "add_scalar"] == [("mine", 1.0, 1), ("mine", 1.0, 2)]


@pytest.mark.parametrize("fails", [False, True])
def test_loggers_are_opened_and_closed_once_per_run_whatever_happens(fails: bool) -> None:
    class Opens(Logger):
        events: list[str] = []

        def open(self, run_dir: Callable[[], Path]) -> None:
            self.events.append("open")

        def close(self) -> None:
            self.events.append("close")

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    logger = Opens()
    logger.events = []
    try:
        quiet(logger=logger).fit(Fails(), batches(1))
    except RuntimeError:
        assert fails
    assert logger.events == ["open", "close"]


def test_a_trainer_logs_json_lines_unless_told_otherwise() -> None:
    assert [type(each) for each in Trainer().loggers.members] == [JSONLines]
    assert not Trainer(logger=False).loggers
    assert not Trainer(fast_dev_run=True).loggers
