"""Settings of runs: which differ, their titles in a table, and their values as text."""

from __future__ import annotations

from pathlib import Path

from hookline.report.reader import RecordedRun
from hookline.report.settings import (
    column_titles,
    differences,
    format_column,
    format_setting,
    recorded_settings,
)
from hookline.util.text import cut


def test_a_setting_with_two_names_is_listed_once() -> None:
    found = differences(
        [
            {"config.optimizer.lr": 1, "optimizers.0.lr": 1, "x.lr": 5},
            {"config.optimizer.lr": 2, "optimizers.0.lr": 2, "x.lr": 6},
        ]
    )
    assert [each["key"] for each in found] == ["config.optimizer.lr", "x.lr"]


def test_a_setting_with_two_values_comes_before_one_that_a_run_does_not_have() -> None:
    found = differences([{"config.a": 1, "x.lr": 1}, {"config.b": 1, "x.lr": 2}, {"x.lr": 2}])
    assert [each["key"] for each in found] == ["x.lr", "config.a", "config.b"]
    assert found[1]["values"] == [1, None, None]


def test_a_section_that_a_run_has_not_recorded_is_not_a_difference() -> None:
    assert differences([{"data.train.shuffle": True, "x.lr": 1}, {"x.lr": 1}]) == []


def test_titles_are_as_short_as_is_unique_and_a_hook_stands_for_its_class() -> None:
    assert column_titles(["module.lr", "trainer.seed"]) == ["lr", "seed"]
    assert column_titles(["module.lr", "optimizer.lr"]) == ["module.lr", "optimizer.lr"]
    assert column_titles(["lr", "module.lr"]) == ["lr", "module.lr"]
    assert column_titles(["hooks.watch.class"]) == ["watch"]


def test_values_are_short() -> None:
    assert [format_setting(value) for value in (None, "sgd", 0.123456, True, [1])] == [
        "-",
        "sgd",
        "0.1235",
        "true",
        "[1]",
    ]
    assert format_setting("package.module.Net", is_class=True) == "Net"


def test_different_values_look_different_in_a_column() -> None:
    assert format_column("lr", [0.1, 0.25, None]) == ["0.1", "0.25", "-"]
    assert format_column("lr", [0.123456, 0.123457]) == ["0.123456", "0.123457"]
    assert format_column("net.class", ["a.Net", "b.Net"]) == ["a.Net", "b.Net"]
    assert format_column("net.class", ["a.Net", "a.Other"]) == ["Net", "Other"]
    paths = [f"/data/{'long/' * 20}{name}{'/parts' * 20}/train.csv" for name in ("first", "second")]
    first, second = map(cut, format_column("path", paths))
    assert "first" in first and "second" in second


def test_a_setting_is_what_the_optimizer_used_and_a_class_is_listed_once() -> None:
    record = {
        "config": {
            "optimizer": {"class_path": "AdamW", "lr": 0.0001, "clip": 3},
            "hooks": {"k": {"class_path": "mine.Watch", "at": 50}},
        },
        "hooks": {"k": {"class": "mine.Watch", "params": {"at": 50}}},
        "settings": {"optimizers.0.groups.0.lr": 0.003, "seed": 1},  # resumed: the checkpoint's rate is used
    }
    found = recorded_settings(RecordedRun(Path("run"), record=record))
    assert found["config.optimizer.lr"] == 0.003 and found["config.optimizer.clip"] == 3
    assert found["hooks.k.class"] == "mine.Watch" and "config.hooks.k.class_path" not in found
