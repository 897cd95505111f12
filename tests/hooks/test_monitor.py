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


def test_a_missing_loss_of_training_is_named_at_the_first_validation() -> None:
    with pytest.raises(OptionError, match="Did you mean 'train/loss'. Metrics: val/loss"):
        Monitored("x", "train_loss").find({"val/loss": 1.0})
    with pytest.raises(OptionError, match="'train/loss', which was not logged. Metrics: none yet"):
        Monitored("x", "train/loss").find({})


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


@pytest.mark.parametrize("mode", ["min", "max"])
def test_rounding_is_no_improvement_but_the_next_step_is(mode: str) -> None:
    watch = Monitored("x", "val/accuracy", mode)
    up, down = (0.92444443, 0.92444441) if mode == "max" else (0.92444441, 0.92444443)
    assert not watch.is_better(up, down)
    assert watch.is_better(20_000_001.0 if mode == "max" else 19_999_999.0, 20_000_000.0)


@pytest.mark.parametrize(("monitor", "logged"), [("val/acc", "val/accuracy"), ("valid_loss", "val/loss")])
def test_a_similar_name_is_warned_of_ahead_because_it_may_still_come(
    monitor: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hookline"):
        Monitored("EarlyStopping", monitor).look_ahead({logged: 1.0})
        assert f"After the sanity check: EarlyStopping monitors {monitor!r}" in caplog.text
        assert f"Did you mean {logged!r}?" in caplog.text
        caplog.clear()
        Monitored("EarlyStopping", monitor, strict=False).look_ahead({logged: 1.0})
        Monitored("EarlyStopping", "distance").look_ahead({logged: 1.0})
    assert caplog.text == ""


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
