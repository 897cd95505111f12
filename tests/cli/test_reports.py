"""`hookline report`, as people and programs use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report.reported import metrics, written

from hookline.cli import main


def test_it_says_where_the_page_is(capsys: pytest.CaptureFixture[str]) -> None:
    written("run", metrics(1, loss=1.0), metrics(2, loss=0.5))
    assert main(["report", "run"]) == 0
    said = capsys.readouterr().out
    assert "step 2, in the first epoch, 2 records" in said and "wrote run/report.html" in said
    assert Path("run/report.html").read_text().startswith("<!doctype html>")


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        written(name, metrics(1, loss=1.0))
    assert main(["report", "a", "b", "--out", "both.html", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == "both.html" and told["bytes"] == Path("both.html").stat().st_size
    assert [(each["run_dir"], each["step"], each["records"]) for each in told["runs"]] == [
        ("a", 1, 1),
        ("b", 1, 1),
    ]


def test_a_wrong_directory_is_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    written("run", metrics(1, loss=1.0))
    assert main(["report", "rum"]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err
