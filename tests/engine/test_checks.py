"""Checks of options: the same wording everywhere, with the option, the value and what is allowed."""

from __future__ import annotations

import datetime
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from hookline import OptionError, Trainer
from hookline.engine.checks import (
    Above,
    AtLeast,
    Count,
    Duration,
    Function,
    Number,
    OneOf,
    Portion,
    Several,
    Table,
    apply_rule,
    check_fields,
    check_file,
    check_path,
    check_seed,
    check_writable_directory,
    checked_parameters,
    parse_precision,
    parse_time,
    rule_of,
)
from hookline.run.options import Options


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (90, 90.0),
        (0.5, 0.5),
        ("2 hours", 7200.0),
        ("90 s", 90.0),
        ("1.5 minutes", 90.0),
        ("1 day", 86400.0),
        ("01:02:03:04", 93784.0),
        (datetime.timedelta(minutes=2), 120.0),
    ],
)
def test_time_limits_can_be_written_in_many_ways(given: Any, seconds: float | None) -> None:
    assert parse_time(given) == seconds
    assert Options(max_time=given).max_seconds == seconds


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (32, "32"),
        ("32", "32"),
        ("32-true", "32"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        (16, "16-mixed"),
    ],
)
def test_precisions_have_the_names_people_know(given: Any, expected: str) -> None:
    assert parse_precision(given) == expected


@pytest.mark.parametrize(
    ("given", "meant"),
    [("fp16", "'16-mixed'"), ("bfloat16", "'bf16-mixed'"), ("float32", "'32'"), (128, None)],
)
def test_the_precision_that_was_meant_is_one_that_there_is(given: Any, meant: str | None) -> None:
    with pytest.raises(OptionError) as refused:
        Trainer(precision=given)
    assert (
        (f"Did you mean {meant}?" in str(refused.value))
        if meant
        else ("Did you mean" not in str(refused.value))
    )


def test_checks_name_the_hook_the_parameter_and_the_limits() -> None:
    with pytest.raises(OptionError, match="Who: a=True must be a number from 0 to 1"):
        Number(0.0, 1.0)("Who: a", True)
    with pytest.raises(OptionError, match="Who: b=-1 must be a whole number from 0"):
        Count(0)("Who: b", -1)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (bool, [True, False], [1, "false", None]),
        (Literal["min", "max"], ["min"], ["mean", None]),
        (Annotated[int, AtLeast(1)], [1, 7], [0, True, 1.0]),
        (Annotated[int, AtLeast(1)] | None, [None, 3], [0, "3"]),
        (Annotated[float, Number(0, 1)] | str, ["auto", 0.5], [2.0, float("nan"), True]),
        (bool | None, [None, True], ["true"]),
    ],
    ids=["bool", "words", "at least 1", "at least 1 or None", "number or text", "bool or None"],
)
def test_an_annotation_is_a_rule(kind: Any, good: list[Any], bad: list[Any]) -> None:
    rule = rule_of(kind)
    assert rule is not None
    for value in good:
        assert rule("it", value) is value
    for value in bad:
        with pytest.raises(OptionError, match="it="):
            rule("it", value)


def test_an_annotation_without_a_rule_checks_nothing() -> None:
    assert rule_of(int) is None and rule_of(str | None) is None and rule_of(list[int]) is None


def test_parameters_are_checked_when_an_object_is_made_and_kept_as_the_rule_returns_them() -> None:
    class Made:
        @checked_parameters
        def __init__(
            self, names: Annotated[Any, Several(["a", "b"])], wait: Annotated[Any, Duration()] = "unchecked"
        ) -> None:
            self.names, self.wait = names, wait

    assert (Made("a").names, Made(["b", "a"]).names) == (("a",), ("b", "a"))
    assert Made("a").wait == "unchecked"  # a default is right by itself
    assert Made("a", wait="2 minutes").wait == 120.0
    with pytest.raises(OptionError, match=r"Made: names='c', allowed: 'a', 'b'") as caught:
        Made(["a", "c"])
    assert (caught.value.option, caught.value.value, caught.value.allowed) == ("names", "c", ("a", "b"))
    with pytest.raises(TypeError, match="names"):  # Python's own words
        Made()  # type: ignore[call-arg]


def test_fields_are_checked_and_an_error_inside_a_table_has_the_whole_key() -> None:
    # not a class statement: annotations of this file are text
    made = make_dataclass(
        "Made", [("share", Annotated[float, Above(0)]), ("wait", Annotated[Any, Duration()])]
    )
    good = made(0.5, "2 minutes")
    check_fields(good)
    assert (good.share, good.wait) == (0.5, 120.0)
    with pytest.raises(OptionError, match="share=0 must be a number above 0"):
        check_fields(made(0, 1))

    def inner(name: str, value: Any) -> Any:
        return AtLeast(0)("depth", value["depth"])

    with pytest.raises(OptionError) as caught:
        apply_rule("table", inner, {"depth": -1})
    assert caught.value.option == "table.depth"


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (Portion(), [0, 3, 0.0, 1.0], [-1, 1.5, True, "1"]),
        (Portion(zero=False), [1, 0.5], [0, 0.0]),
        (Count(1), [1], [0, sys.maxsize]),
        (Above(0, most=2), [0.1, 2], [0, 3, True]),
        (Function("a function"), [len], [3]),
        (Table("a table"), [{}, {"a": 1}], [{1: 2}, [1]]),
        (OneOf("a", "b"), ["a"], ["A"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_each_rule_takes_what_it_says_and_nothing_else(rule: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert rule("it", value) == value
    for value in bad:
        with pytest.raises(OptionError):
            rule("it", value)


def test_seeds_are_those_of_torch() -> None:
    assert check_seed("seed", 2**64 - 1) == 2**64 - 1
    for seed in (-1, 2**64, True, 1.0):
        with pytest.raises(OptionError, match="a whole number from 0 to"):
            check_seed("seed", seed)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "is empty"),
        (3, "must be a path"),
        ("a\0b", "NUL"),
        ("x" * 256, "256 bytes"),
        ("ä" * 128, "256 bytes"),
    ],
)
def test_what_can_be_no_path_is_refused(path: Any, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        check_path("it", path)
    check_path("it", "ä" * 127)


@pytest.mark.parametrize("path", ["../x.json", "a/../b.json", "/"])
def test_a_file_does_not_lead_elsewhere(path: str) -> None:
    assert check_file("it", "a/b.json") == "a/b.json"
    with pytest.raises(OptionError, match=r"without '\.\.'"):
        check_file("it", path)


def test_a_directory_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    check_writable_directory("run_dir", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="file is a file"):
        check_writable_directory("run_dir", tmp_path / "file" / "b")
