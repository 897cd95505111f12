"""Finding a watched metric, and what counts as better."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from hookline import Metrics, OptionError
from hookline.hooks._monitor import Monitored


def test_a_missing_metric_names_what_there_is_and_the_nearest() -> None:
    watch = Monitored("EarlyStopping", "val_loss")
    with pytest.raises(
        OptionError,
        match=r"EarlyStopping monitors 'val_loss'.*Did you mean 'val/loss'\?.*val/loss, train/loss",
    ):
        watch.find(Metrics({"val/loss": 1.0, "train/loss": 2.0}))


def test_a_metric_that_may_be_missing_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = Monitored("EarlyStopping", "val_loss", strict=False)
    with caplog.at_level(logging.WARNING, "hookline"):
        assert watch.find({"val/loss": 1.0}) is None
        assert watch.find({"val/loss": 1.0}) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("mode", "value", "best", "better"),
    [
        ("min", 0.8, 1.0, True),
        ("min", 0.95, 1.0, False),
        ("min", 1.2, 1.0, False),
        ("max", 1.2, 1.0, True),
        ("max", 1.05, 1.0, False),
        ("max", 0.5, 1.0, False),
        ("min", 5.0, None, True),
        ("min", math.nan, None, False),
        ("max", math.inf, 1.0, False),
    ],
)
def test_better_means_by_more_than_min_delta_and_finite(
    mode: str, value: float, best: float | None, better: bool
) -> None:
    assert Monitored("x", "val/loss", mode, min_delta=0.1).is_better(value, best) is better


def test_a_nearly_right_name_is_refused_ahead_but_an_unlike_one_may_still_come() -> None:
    metrics = {"val/loss": 1.0}
    with pytest.raises(OptionError, match="Did you mean 'val/loss'"):
        Monitored("x", "val_loss").look_ahead(metrics)
    Monitored("x", "train/accuracy").look_ahead(metrics)
    Monitored("x", "val/loss").look_ahead(metrics)
    Monitored("x", "val_loss", strict=False).look_ahead(metrics)


@pytest.mark.parametrize(
    ("monitor", "meant"), [("val/lss", "val/loss"), ("train/losss", "train/loss"), ("vla/loss", "val/loss")]
)
def test_a_misspelt_loss_is_refused_when_the_hook_is_made(monitor: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"Who: monitor='{monitor}'. Did you mean '{meant}'.*strict=False"):
        Monitored("Who", monitor)
    assert Monitored("Who", monitor, strict=False).monitor == monitor


@pytest.mark.parametrize("monitor", ["val/Loss", "val/los_a", "stp", "val/mloss", "val_loss"])
def test_a_metric_of_ones_own_may_have_a_similar_name(monitor: str) -> None:
    assert Monitored("Who", monitor).monitor == monitor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"monitor": ""}, "monitor=''"),
        ({"monitor": 3}, "monitor=3"),
        ({"monitor": "a", "mode": "mni"}, "mode='mni'.*Did you mean 'min'"),
        ({"monitor": "a", "min_delta": -1}, "min_delta=-1"),
        ({"monitor": "a", "min_delta": math.nan}, "min_delta=nan"),
        ({"monitor": "a", "strict": "no"}, "strict='no'"),
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Monitored("Who", **arguments)
