"""The timeline of hooks, from the traces that runs leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report.reported import data_of, metrics, traced, written
from tiny import Net, batches, quiet

from hookline import Hook


class Works(Hook):
    def on_step_end(self) -> None:
        sum(range(20_000))


def lanes(timeline: dict[str, Any]) -> dict[str, tuple[int, float]]:
    return {each["name"]: (each["calls"], each["total"]) for each in timeline["lanes"]}


def test_a_traced_run_shows_every_call_of_its_hooks() -> None:
    trainer = quiet(run_dir="run", logger=True, trace=True, max_epochs=2, hooks=[Works()])
    trainer.fit(Net(), batches())
    found = data_of(Path("run"))["timeline"]
    assert len(found) == 1 and (found[0]["run"], found[0]["rank"]) == (0, 0)
    calls, total = lanes(found[0])["works"]
    assert (
        calls
        == sum(cell[3] for cell in found[0]["cells"] if found[0]["lanes"][cell[0]]["name"] == "works")
        == 8
    )
    spent = [
        each["dur"]
        for each in json.loads(Path("run/trace.json").read_text())
        if each.get("cat") == "hook" and each["name"] == "works"
    ]
    assert len(spent) == 8 and total == pytest.approx(sum(spent) / 1e6)
    assert {found[0]["events"][cell[5]] for cell in found[0]["cells"] if cell[0] == 0} == {"on_step_end"}


def test_a_run_without_a_trace_has_no_timeline() -> None:
    assert data_of(written("run", metrics(1, loss=1.0)))["timeline"] == []


def test_of_a_large_job_the_first_ranks_are_read() -> None:
    path = written("run", metrics(1, loss=1.0))
    for rank in range(12):
        traced(path, ("a", "on_step_end", 0, 10, 1), rank=rank)
    data = data_of(path)
    assert [each["rank"] for each in data["timeline"]] == list(range(8))
    assert data["notes"] == ["run: the traces of 4 further ranks are not read."]
