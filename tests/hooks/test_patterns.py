"""Names of parameters and modules are chosen by patterns."""

from __future__ import annotations

from typing import Any

import pytest

from hookline import HookError, OptionError
from hookline.hooks._patterns import as_patterns, choose, is_match, listed

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
    assert choose("it", ["weight", "encoder.*"], NAMES) == NAMES
    assert choose("it", ["bias"], NAMES) == ["encoder.0.bias"]


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        HookError, match=r"it: 'decoder.wieght' matches nothing. Did you mean 'decoder.weight'"
    ):
        choose("it", ["bias", "decoder.wieght"], NAMES)
    with pytest.raises(HookError, match="Names: none"):
        choose("it", ["x"], [])


def test_one_pattern_or_several_are_a_tuple() -> None:
    assert as_patterns("it", "a.*") == ("a.*",) and as_patterns("it", ["a", "b"]) == ("a", "b")


@pytest.mark.parametrize("given", ["", [], [""], 3, ["a", 3], None])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="a name, a part of one, a pattern"):
        as_patterns("it", given)


def test_a_long_list_is_cut() -> None:
    assert listed("abc") == "a, b, c" and listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert listed("abc", most=2) == "a, b and 1 more"
