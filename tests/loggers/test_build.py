"""What may be passed as `Trainer(logger=...)`."""

from __future__ import annotations

from typing import Any

import pytest

from hookline import Logger, OptionError, Trainer
from hookline.loggers import JSONLines, Queued, make_loggers


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


def test_a_trainer_logs_json_lines_unless_told_otherwise() -> None:
    assert [type(each) for each in Trainer().loggers.members] == [JSONLines]
    assert not Trainer(logger=False).loggers
    assert not Trainer(fast_dev_run=True).loggers


def test_a_logger_that_asks_for_a_queue_gets_one() -> None:
    class Slow(Logger):
        queued = True

    plain, slow, own = Logger(), Slow(), Queued(Slow(), size=5)
    first, second, third = make_loggers([plain, slow, own], JSONLines).members
    assert first is plain and third is own
    assert isinstance(second, Queued) and second.logger is slow and second.label == "Slow"


class AsInLightning(Logger):
    def log_metrics(self, metrics: Any, step: int) -> None:  # type: ignore[override]
        ...


class Misspelt(Logger):
    def log_metric(self, metrics: Any, step: int, epoch: int) -> None: ...


class Own(Logger):
    def log_metrics(self, *given: Any, **named: Any) -> None: ...

    def log_metric(self, name: str) -> None: ...

    def log_tables(self) -> None: ...


def test_a_logger_whose_rows_would_be_lost_is_refused_at_once() -> None:
    with pytest.raises(
        OptionError,
        match=r"AsInLightning.log_metrics\(metrics.*step.*\) .*is called with metrics, step, epoch",
    ):
        make_loggers(AsInLightning(), JSONLines)
    with pytest.raises(
        OptionError, match="Misspelt.log_metric is not called by a run. Did you mean 'log_metrics'?"
    ):
        make_loggers(Misspelt(), JSONLines)
    assert make_loggers(Own(), JSONLines).members
