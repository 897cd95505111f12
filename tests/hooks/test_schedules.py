"""A moment of the run is written the same way for every schedule."""

from __future__ import annotations

from typing import Any

import pytest

from hookline import Hook, HookError, OptionError
from hookline.hooks._schedules import parse_moment
from hookline.hooks.freeze_schedule import FreezeSchedule
from hookline.hooks.loss_schedule import LossSchedule
from hookline.hooks.mixture_schedule import MixtureSchedule

SCHEDULES = {
    "freeze": lambda moment: FreezeSchedule({"*": moment}),
    "loss": lambda moment: LossSchedule(weight={moment: 0.5}),
    "mixture": lambda moment: MixtureSchedule({moment: {"web": 0.5}}),
}


@pytest.mark.parametrize(
    ("given", "moment"),
    [
        (0, (0, "step")),
        (500, (500, "step")),
        ("500", (500, "step")),
        ("500 steps", (500, "step")),
        (" 1 epoch ", (1, "epoch")),
        ("0 epochs", (0, "epoch")),
        ("0 steps", (0, "step")),
        ("2K steps", (2000, "step")),
        ("1_000 steps", (1000, "step")),
    ],
)
def test_a_moment_is_a_count_from_zero_and_its_unit(given: Any, moment: tuple[int, str]) -> None:
    assert parse_moment(given, "Who: when") == moment


@pytest.mark.parametrize(
    "given",
    [
        -1,
        True,
        1.5,
        None,
        "",
        "soon",
        "-1 steps",
        "0.5 epochs",
        "0 bananas",
        "3 minutes",
        "0 hours",
        "1 token",
    ],
)
def test_what_is_no_moment_is_refused_with_what_was_written(given: Any) -> None:
    with pytest.raises((OptionError, HookError), match="Who: when") as caught:
        parse_moment(given, "Who: when")
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("moment", ["0 steps", "0 epochs", "2 epochs", "1K steps"])
def test_every_schedule_takes_the_same_moments(schedule: str, moment: str) -> None:
    assert isinstance(SCHEDULES[schedule](moment), Hook)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("moment", ["0 bananas", "0 minutes", "1.5 steps", "2 calls", "soon"])
def test_every_schedule_refuses_the_same_moments(schedule: str, moment: str) -> None:
    with pytest.raises((OptionError, HookError), match=moment):
        SCHEDULES[schedule](moment)
