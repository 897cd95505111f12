"""Names of parameters and modules are chosen by patterns."""

from __future__ import annotations

from typing import Any

import pytest

from hookline import Hook, HookError, OptionError
from hookline.hooks._settings import as_patterns, is_match, matching_names, parse_moment
from hookline.hooks.freeze_schedule import FreezeSchedule
from hookline.hooks.loss_schedule import LossSchedule
from hookline.hooks.mixture_schedule import MixtureSchedule

NAMES = ["encoder.0.weight", "encoder.0.bias", "decoder.weight"]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("encoder", True),
        ("0.we", True),
        ("encoder.*.weight", True),
        ("*.weight", True),
        ("encoder.?", False),  # a pattern is for the whole name
        ("encoder.[0-9].weight", True),
        ("Encoder", False),
        ("ENCODER.*", False),
    ],
)
def test_plain_text_matches_any_part_and_a_pattern_the_whole_name(pattern: str, matches: bool) -> None:
    assert is_match("encoder.0.weight", pattern) is matches


def test_names_keep_their_order_and_come_once() -> None:
    assert matching_names("it", ["weight", "encoder.*"], NAMES) == NAMES
    assert matching_names("it", ["bias"], NAMES) == ["encoder.0.bias"]


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        HookError, match=r"it: 'decoder.wieght' matches nothing. Did you mean 'decoder.weight'"
    ):
        matching_names("it", ["bias", "decoder.wieght"], NAMES)
    with pytest.raises(HookError, match="Names: none"):
        matching_names("it", ["x"], [])


def test_one_pattern_or_several_are_a_tuple() -> None:
    assert as_patterns("it", "a.*") == ("a.*",) and as_patterns("it", ["a", "b"]) == ("a", "b")


@pytest.mark.parametrize("given", ["", [], [""], 3, ["a", 3], None])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="a name, a part of one, a pattern"):
        as_patterns("it", given)


# ---- moments -----------------------------------------------------------------------------------------------


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
