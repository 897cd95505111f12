"""The tools without a server: limits, costs and series that a client cannot easily bring about."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.reported import metrics, written

from hookline.cli.mcp_folder import ServedFolder
from hookline.cli.mcp_tools import LONGEST_TEXT, CodeTools, ReadTools, default_folder, shorten
from hookline.util.errors import HooklineError, OptionError


def tools(*records: object) -> ReadTools:
    written("runs/one", *records)  # type: ignore[arg-type]
    return ReadTools(ServedFolder(Path("runs")))


def test_a_metric_of_steps_and_of_epochs_is_chosen_by_over_or_by_its_name_on_the_page() -> None:
    of_epoch = {**metrics(2, loss=5.0), "over": "epoch"}
    made = tools({**metrics(1, loss=1.0), "over": "step"}, {**metrics(2, loss=2.0), "over": "step"}, of_epoch)
    assert made.metric_series("one", "loss")["values"] == [1.0, 2.0]
    assert made.metric_series("one", "loss", over="epoch")["values"] == [5.0]
    assert made.metric_series("one", "loss (epoch)")["over"] == "epoch"
    with pytest.raises(OptionError, match=r"no metric 'los' over epochs. Did you mean 'loss'\?"):
        made.metric_series("one", "los", over="epoch")


def test_a_range_without_values_is_empty_and_a_single_point_is_the_first() -> None:
    made = tools(*(metrics(step, loss=float(step)) for step in range(9)))
    assert made.metric_series("one", "loss", first_step=50)["steps"] == []
    assert made.metric_series("one", "loss", limit=1)["steps"] == [0]
    assert made.metric_series("one", "loss", limit=3)["steps"] == [0, 4, 8]


def test_the_cost_of_a_hook_is_summed_over_its_events() -> None:
    rows = [
        {"hook": "a", "event": "on_step_end", "calls": 2, "total": 1.0, "worst": 0.7, "share": 0.1},
        {"hook": "b", "event": "on_step_end", "calls": 9, "total": 1.5, "worst": 0.2, "share": 0.15},
        {"hook": "a", "event": "on_train_end", "calls": 1, "total": 1.0, "worst": 1.0, "share": 0.1},
    ]
    found = tools({"type": "cost", "rows": rows}).hook_costs("one")["hooks"]
    assert [each["name"] for each in found] == ["a", "b"]
    assert found[0] == {
        "name": "a",
        "events": ["on_step_end", "on_train_end"],
        "calls": 3,
        "total": 2.0,
        "worst": 1.0,
        "share": 0.2,
    }


def test_long_texts_are_cut_wherever_they_are() -> None:
    cut = shorten({"a": ["x" * 5000], "b": 1})
    assert len(cut["a"][0]) == LONGEST_TEXT and cut["b"] == 1


def test_the_folder_is_that_of_hookline_runs() -> None:
    assert default_folder(None) == Path()
    Path("runs").mkdir()
    assert default_folder(None) == Path("runs") and default_folder("x") == Path("x")


def test_a_configuration_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.toml").write_text("")
    monkeypatch.setattr("hookline.cli.mcp_tools.EXPLAIN_SECONDS", 0.001)
    with pytest.raises(HooklineError, match="was not explained within 0.001 s"):
        CodeTools(ServedFolder(Path())).explain_configuration("run.toml")
